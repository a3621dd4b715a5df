"""Weights in oneDNN's own order: the products, when there are any, and the model that computes with them.

float32 stands in for bfloat16 where oneDNN does not multiply that: the ops are the same.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from sgl.kernels import prepacked
from sgl.kernels.native import library
from sgl.lang.graph import Sampling
from sgl.runtime.config import EngineConfig
from sgl.runtime.loading.checkpoint import open_checkpoint
from sgl.runtime.loading.sources import locate
from sgl.runtime.model_runner import ModelRunner
from sgl.runtime.models.layers import Linear, prepack
from sgl.runtime.plan import Chunk, SampleSpec, StepPlan
from sgl.runtime.resolution import resolve

DTYPES = [torch.float32, torch.bfloat16]

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_product(dtype: torch.dtype, rows: int) -> None:
    if dtype == torch.bfloat16 and (why := prepacked.obstacle(dtype)):
        pytest.skip(why)
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((rows, 70), (93, 70), (93,)))
    packed = prepacked.pack(weight)
    for b in (None, bias):
        expected = functional.linear(x.double(), weight.double(), None if b is None else b.double())
        error = (prepacked.linear(x, packed, b).double() - expected).norm() / expected.norm()
        assert error < (1e-6 if dtype == torch.float32 else 4e-3)


class _Rows(TorchDispatchMode):
    """Notes the numbers of rows that oneDNN is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "_linear_pointwise" in str(func):
            self.seen.add(args[0].shape[0])
        return func(*args, **(kwargs or {}))


def test_a_few_numbers_of_rows_stand_for_all() -> None:
    """oneDNN keeps what it makes for each of them, so that a server would grow by every new one."""
    packed = prepacked.pack(torch.eye(16))
    with _Rows() as rows:
        for number in range(1, 200):
            x = torch.arange(number * 16, dtype=torch.float32).view(number, 16)
            assert torch.equal(prepacked.linear(x, packed), x)
    assert len(rows.seen) <= 28
    assert max(rows.seen) == 224


def test_what_is_not_packed_says_why() -> None:
    assert prepacked.obstacle("float16") == "weights of float16 stay as they are"
    assert prepacked.obstacle("bfloat16", "cuda") == "oneDNN computes on the CPU"
    assert prepacked.obstacle("bfloat16") == prepacked.obstacle(torch.bfloat16)


def logits(monkeypatch: pytest.MonkeyPatch, obstacle: str | None) -> tuple[ModelRunner, torch.Tensor]:
    """Of the toy model on a machine without a compiler, whose weights may or may not be packed."""
    monkeypatch.setattr(library, "compiler", lambda: None)
    monkeypatch.setattr(prepacked, "obstacle", lambda dtype, device="cpu": obstacle)
    checkpoint = open_checkpoint(locate("dummy"))
    resolved = resolve(EngineConfig(model_path="dummy", device="cpu", max_total_tokens=256), checkpoint.facts())
    assert (resolved.kernels, resolved.dtype) == ("torch", "float32")
    (why,) = (reason.why for reason in resolved.reasons if reason.field == "kernels")
    assert "there is no C++ compiler" in why
    runner = ModelRunner(checkpoint.build_model("float32", "cpu"), checkpoint.config, resolved)
    sample = SampleSpec(sampling=Sampling(), seed=0, position=0, output_ids=[])
    table = torch.arange(32, dtype=torch.int32).numpy()
    chunk = Chunk(sequence=0, token_ids=[72, 101, 108, 108], start=0, page_table=table, sample=sample)
    return runner, runner.forward(StepPlan(chunks=(chunk,)))


def test_a_model_without_a_compiler_computes_with_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, expected = logits(monkeypatch, "none here")
    packed, got = logits(monkeypatch, None)
    assert torch.allclose(got, expected, atol=1e-5)
    layouts = [
        {module.weight.layout for module in runner.model.modules() if isinstance(module, Linear)}
        for runner in (plain, packed)
    ]
    assert layouts == [{torch.strided}, {torch._mkldnn}]  # type: ignore[attr-defined]
    prepack(packed.model)  # another runner of the same model
