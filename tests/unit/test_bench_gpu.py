"""`sgl bench gpu`: its parts on the toy model on a CPU, floors, what is said without a GPU, what survives an error."""

from __future__ import annotations

from typing import Any

import pytest

from sgl.bench import gpu, program_wall
from sgl.bench.ceilings import Ceilings
from sgl.bench.floors import SHAPES, layer_weights, mixed_floor_s
from sgl.bench.gpu import Sizes
from sgl.bench.harness import PairPlan
from sgl.bench.workloads import WORKLOADS
from sgl.bench.workloads.questions import apart
from sgl.cli.bench_gpu import show
from sgl.errors import ConfigError

SMALL = Sizes(
    large="dummy",
    small="dummy",
    device="cpu",
    rows=(1, 3),
    context=16,
    steps=3,
    rounds=1,
    chunk=32,
    prompts=2,
    new_tokens=4,
    mixed=(3, 12, 8),
    scale=0.002,
    workloads=("hellaswag",),
    pairs=1,
    apart=(3, 12, 6),
)
CEILINGS = Ceilings(card="none", copied_bytes_per_s=1e12, read_bytes_per_s=2e12, flops_per_s=1e15)
FIELDS: dict[str, Any] = {"model_path": "dummy", "num_threads": 1}


def test_parts_run_and_are_handed_out_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []
    report = gpu.run(
        FIELDS,
        parts=("correct", "decode", "prefill"),
        sizes=SMALL,
        ceilings=CEILINGS,
        partial=lambda report: seen.append(len(report.parts)),
    )
    assert seen == [1, 2, 3]
    assert [part.error for part in report.parts] == ["", "", ""]
    figures = {figure.what: figure for part in report.parts for figure in part.figures}
    assert figures["prompts whose greedy float32 tokens are the CPU's"].is_met
    for rows in (1, 3):
        assert figures[f"dummy, {rows} rows: step"].value > 0
        assert figures[f"dummy, {rows} rows: of the floor"].value < 1
    assert len(report.parts[1].details["dummy, 3"]["overlap"][0]["step_s"]) == SMALL.steps
    show(report)
    assert "of the floor" in capsys.readouterr().out


def test_constrained_rows_take_turns_with_free_ones() -> None:
    (part,) = gpu.run(FIELDS, parts=("constrained-small",), sizes=SMALL).parts
    assert part.error == ""
    figures = {figure.what: figure.value for figure in part.figures}
    for way in ("plain strings", "strings of maxLength"):
        assert figures[f"dummy, 3 rows, {way}: over free"] > 0
        assert figures[f"dummy, 3 rows, {way}: host, masks"] > 0
        runs = part.details["dummy, 3"][way]
        assert [run["new_tokens"] for run in runs] == [3 * 3 * SMALL.steps] * SMALL.rounds
        assert figures[f"dummy, 3 rows, {way}, forced tokens: tokens per second"] > 0
    assert figures["dummy, 3 rows, free: host, masks"] == 0


def test_deterministic_mode_beside_other_steps() -> None:
    (part,) = gpu.run(FIELDS, parts=("deterministic",), sizes=SMALL).parts
    assert part.error == ""
    assert {figure.what for figure in part.figures} >= {
        "dummy, 1 rows: deterministic over plain",
        "dummy, 3 rows: deterministic over plain",
    }


def test_programs_are_all_workloads_and_what_has_no_time_is_said_to_be_left_out() -> None:
    assert sorted(gpu.PROGRAMS) == sorted(WORKLOADS)
    calls = apart(3, 40, 7).build(seed=1, scale=0.01, unit="bytes")
    assert [call.arguments["output_len"] for call in calls] == [7] * 3
    assert len({call.arguments["before"][:2] for call in calls}) == 3

    class Form:
        num_programs = 1
        runs = 0

        def seconds(self, number: int) -> dict[str, float]:
            self.runs += 1
            return {"wall": 0.5}

        def tokens(self) -> program_wall.FormTokens:
            return program_wall.FormTokens(prefill_tokens=1, decode_tokens=1, forwards=1, requests=1)

    programs, plain = Form(), Form()
    plan = PairPlan(pairs=3, quiet_s=0.0, turn_s=1.0)
    given: Any = ("x", program_wall.TOGETHER, programs, plain, None, plan, lambda what: None)
    assert program_wall._compare(*given, most_seconds=5.9) is None, "three pairs of two calls each take six seconds"
    assert (programs.runs, plain.runs) == (1, 1)


def test_what_fails_is_told_and_the_next_part_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(bench: gpu._Bench) -> None:
        bench._figure("one", 1.0, goal=2.0)
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setitem(gpu.PARTS, "decode", broken)
    report = gpu.run(FIELDS, parts=("decode", "prefill"), sizes=SMALL)
    first, second = report.parts
    assert "illegal memory access" in first.error
    assert [(figure.what, figure.is_met) for figure in first.figures] == [("one", False)]
    assert not second.error
    late = gpu.run(FIELDS, parts=("prefill",), sizes=SMALL, budget_s=-1.0)
    assert "not begun" in late.parts[0].error


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        gpu.run(FIELDS)
    with pytest.raises(ConfigError, match="part 'everything' is unknown"):
        gpu.run(FIELDS, parts=("everything",))


def test_floors_follow_from_shapes() -> None:
    assert layer_weights(SHAPES["llama-3-8b"]) == pytest.approx(6.98e9, rel=1e-3)
    endless = Ceilings(card="none", copied_bytes_per_s=1e12, read_bytes_per_s=2e12, flops_per_s=float("inf"))
    two_steps = mixed_floor_s(SHAPES["qwen3-0.6b"], [10, 20], [3, 2], 1000, 10, endless)
    assert two_steps == pytest.approx(((1000 + 10 * (11 + 21)) + (1000 + 10 * 12)) / 2e12)
