"""`sgl bench kernels`: its cases in Triton's interpreter under an invented clock, floors, errors, and what fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from sgl.bench import kernels
from sgl.bench.ceilings import Ceilings
from sgl.bench.kernels import Calls, Sizes
from sgl.cli.bench_kernels import show
from sgl.errors import ConfigError
from sgl.kernels.triton import attention
from sgl.kernels.triton.attention import Tile

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
SMALL = Sizes(
    heads=2,
    kv_heads=1,
    head_dim=16,
    dtype="float32",
    device="cpu",
    rows=(1, 2),
    context=20,
    page_sizes=(1, 4),
    chunk=20,
    batch=3,
    shared=16,
    own=4,
    resident_bytes=1,
    dtypes=("float32",),
)
CEILINGS = Ceilings(card="none", copied_bytes_per_s=1e9, read_bytes_per_s=2e9, flops_per_s=1e9)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def one() -> Iterator[Tile]:
        yield Tile(16, 32, 2, 1)

    monkeypatch.setattr(attention, "_PROGRAMS", 2)
    monkeypatch.setattr(kernels, "_decode_tiles", one)
    monkeypatch.setattr(kernels, "_wide_tiles", one)


def test_every_case_in_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    outputs: list[list[torch.Tensor]] = []

    def clock(calls: Calls) -> float:
        outputs.append([call() for call in calls])  # type: ignore[misc]
        return 1e-3 * len(outputs)

    report = kernels.run(sizes=SMALL, ceilings=CEILINGS, clock=clock)
    assert report.missing == ()
    cases = list(dict.fromkeys(time.case for time in report.times))
    assert len(cases) == 2 * 2 + 2 + 2
    for case in cases:
        assert sum(time.in_use for time in report.times if time.case == case) == 1
    assert [time.seconds for time in report.times] == [1e-3 * (i + 1) for i in range(len(report.times))]
    for layers in outputs:
        assert len(layers) == 2
        assert all(layer.isfinite().all() for layer in layers)
        assert not torch.equal(*layers)  # keys and values of their own
    decode = report.times[0]
    # 20 keys and values of 16 float32 numbers, a query and a result of two heads.
    assert (decode.num_bytes, decode.flops) == (20 * 2 * 16 * 4 + 2 * 2 * 16 * 4, 4 * 20 * 2 * 16)
    assert decode.floor_s == pytest.approx(max(decode.num_bytes / 2e9, decode.flops / 1e9))
    grouped = [time for time in report.times if "shared" in time.case]
    assert {time.way.split(",")[1].split(" (")[0] for time in grouped} == {" prefix together", " each row by itself"}
    assert grouped[0].num_bytes == (16 + 3 * 4) * 128 + 3 * 2 * 128
    assert {error.kernel for error in report.errors} >= {"attention, prefill with a tree", "norm", "product of 1 rows"}
    assert all(0 < error.error < 1e-5 for error in report.errors)
    show(report)
    printed = capsys.readouterr().out
    assert "prefill, 20 tokens" in printed
    assert "attention, decode, prefix together" in printed


def test_what_fails_is_told_and_the_next_is_measured() -> None:
    turns: list[int] = []

    def clock(calls: Calls) -> float:
        turns.append(len(calls))
        assert calls[0]() is not None
        if len(turns) == 2:
            raise RuntimeError("out of resource: shared memory\nmore")
        return 1.0

    sizes = Sizes(**{**vars_of(SMALL), "page_sizes": (1,), "dtypes": ()})
    report = kernels.run(sizes=sizes, ceilings=CEILINGS, clock=clock, variants=False)
    (missing,) = report.missing
    assert missing.startswith("decode, 2 rows x 20, page size 1")
    assert missing.endswith("RuntimeError: out of resource: shared memory")
    assert len(report.times) == len(turns) - 1 == 5


def test_after_its_time_nothing_is_begun() -> None:
    report = kernels.run(sizes=Sizes(**{**vars_of(SMALL), "dtypes": ()}), clock=lambda calls: 1.0, budget_s=0.0)
    assert report.times == ()
    assert all(what.endswith("no time was left") for what in report.missing)
    assert len(report.missing) > 6


def test_a_gpu_is_needed() -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        kernels.run()


def vars_of(sizes: Sizes) -> dict[str, object]:
    return {name: getattr(sizes, name) for name in Sizes.__struct_fields__}
