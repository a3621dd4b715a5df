"""Ops that only some models need, against float64: windows and soft caps of attention, experts, Gemma's norm and
activation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sgl.kernels import registry, workspace
from sgl.kernels.attention import plan_attention
from sgl.kernels.native import library
from sgl.kernels.native.weights import PackedWeight
from sgl.kernels.registry import OpFacts
from sgl.runtime.loading.facts import load_native_kernels


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def seen(
    query_HD: torch.Tensor, keys_LKD: torch.Tensor, values_LKD: torch.Tensor, window: int, softcap: float
) -> torch.Tensor:
    """The last position of a context, head by head in float64."""
    group = query_HD.shape[0] // keys_LKD.shape[1]
    first = max(0, len(keys_LKD) - window) if window else 0
    rows = []
    for head, query in enumerate(query_HD.double()):
        scores = keys_LKD[first:, head // group].double() @ query * 0.4
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        rows.append(torch.softmax(scores, dim=0) @ values_LKD[first:, head // group].double())
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["torch", "fixed_blocks"])
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (5, 0.0), (70, 0.0), (0, 0.7), (5, 0.7), (70, 0.7)])
def test_attention_with_windows_and_soft_caps(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, name: str, window: int, softcap: float
) -> None:
    """Decode behind contexts shorter and longer than the window, a prompt, and a chunk behind a prefix."""
    monkeypatch.setattr(workspace, "CAPPED_SCORES", 60)  # scores of a span in several groups
    starts, lengths, heads, kv_heads, dim = [3, 150, 0, 90], [1, 1, 9, 80], 4, 2, 8
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    tables = [np.arange(end, dtype=np.int32)[::-1] + sum(ends[:i]) for i, end in enumerate(ends)]
    keys, values = torch.randn(2, sum(ends), kv_heads, dim, generator=generator)
    query = torch.randn(sum(lengths), heads, dim, generator=generator)
    plan = plan_attention(starts, lengths, tables, 1)
    attend = registry.get("paged_attention", OpFacts(deterministic=True), name)
    got = attend(query, keys, values, plan, 0.4, window=window, softcap=softcap)
    row = 0
    for table, start, end in zip(tables, starts, ends, strict=True):
        for position in range(start, end):
            slots = torch.from_numpy(table[: position + 1].astype(np.int64))
            expected = seen(query[row], keys[slots], values[slots], window, softcap)
            assert torch.allclose(got[row].double(), expected, atol=1e-5), f"position {position} of {end}"
            row += 1


def test_attention_over_a_pool_of_another_dtype(generator: torch.Generator) -> None:
    """Queries of the native kernels' models are float32, whatever keys and values are kept in."""
    keys, values = torch.randn(2, 6, 1, 8, generator=generator).bfloat16()
    query = torch.randn(4, 2, 8, generator=generator)
    plan = plan_attention([5, 0], [1, 3], [np.arange(6, dtype=np.int32)] * 2, 1)
    got = registry.get("paged_attention")(query, keys, values, plan, 0.4, window=2, softcap=0.5)
    assert got.dtype == torch.float32
    assert torch.allclose(got[0].double(), seen(query[0], keys, values, 2, 0.5), atol=1e-5)


def test_who_says_why_it_cannot() -> None:
    for facts, why in (
        (OpFacts(native=True, window=512), "layers of this model at 512 tokens"),
        (OpFacts(native=True, softcap=50.0), "it has no soft caps"),
        (OpFacts(device="cuda", triton=True, softcap=50.0), "it has no soft caps"),
    ):
        choice = next(choice for choice in registry.explain(facts) if choice.op == "paged_attention")
        assert choice.chosen == "torch"
        reasons = dict(choice.rejected)
        assert why in reasons["native" if facts.native else "triton"]
        plan = next(choice for choice in registry.explain(facts) if choice.op == "plan_attention")
        assert plan.chosen == "torch"  # a plan goes with its attention


class Layer:
    """Random experts and a routed step."""

    def __init__(self, generator: torch.Generator, num_tokens: int, count: int = 6, per_token: int = 3) -> None:
        self.x = torch.randn(num_tokens, 32, generator=generator)
        self.gate, self.up = torch.randn(2, count, 24, 32, generator=generator) * 32**-0.5
        self.down = torch.randn(count, 32, 24, generator=generator) * 24**-0.5
        # The last expert is nobody's.
        self.ids = torch.stack([torch.randperm(count - 1, generator=generator)[:per_token] for _ in range(num_tokens)])
        self.shares = torch.rand(num_tokens, per_token, generator=generator)

    def expected(self) -> torch.Tensor:
        """Token by token in float64."""
        rows = []
        for x, ids, shares in zip(self.x.double(), self.ids.tolist(), self.shares.double(), strict=True):
            total = torch.zeros(32, dtype=torch.float64)
            for expert, share in zip(ids, shares, strict=True):
                gate, up = self.gate[expert].double() @ x, self.up[expert].double() @ x
                total += share * (self.down[expert].double() @ (gate / (1 + torch.exp(-gate)) * up))
            rows.append(total)
        return torch.stack(rows)

    def computed(self, name: str, rows: slice = slice(None)) -> torch.Tensor:
        op = registry.get("experts", OpFacts(deterministic=True, native=True), name)
        matrices = [self.gate, self.up, self.down]
        if name == "native":
            matrices = [{e: PackedWeight.of_tensor(m) for e, m in enumerate(part)} for part in matrices]  # type: ignore[misc]
        got: torch.Tensor = op(
            self.x[rows], self.ids[rows], self.shares[rows], *matrices, registry.get("silu_mul", name="torch")
        )
        return got


@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize("name", ["torch", "fixed_rows", "native"])
def test_experts(generator: torch.Generator, name: str, num_tokens: int) -> None:
    if name == "native":
        if library.compiler() is None:
            pytest.skip("there is no C++ compiler")
        load_native_kernels()
    layer = Layer(generator, num_tokens)
    assert torch.allclose(layer.computed(name).double(), layer.expected(), atol=1e-5)


def test_experts_of_a_row_have_the_same_bits_in_every_step(generator: torch.Generator) -> None:
    layer = Layer(generator, 48)
    together = layer.computed("fixed_rows")
    for first in range(0, 48, 16):
        rows = slice(first, first + 16)
        assert torch.equal(layer.computed("fixed_rows", rows), together[rows])


def test_gelu_tanh_mul(generator: torch.Generator) -> None:
    gate, up = torch.randn(2, 6, 16, generator=generator)
    wide = gate.double()
    expected = 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))) * up.double()
    assert torch.allclose(registry.get("gelu_tanh_mul")(gate, up).double(), expected, atol=1e-6)


def test_a_norm_is_scaled_in_the_dtype_of_its_weight(generator: torch.Generator) -> None:
    """Gemma's are float32 beside 16-bit activations: one rounding, at the end."""
    x = torch.randn(5, 32, generator=generator).bfloat16()
    weight = 1 + torch.randn(32, generator=generator) * 0.01
    got = registry.get("rms_norm")(x, weight, 1e-6)
    wide = x.double()
    expected = wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert got.dtype == torch.bfloat16
    assert float(((got.double() - expected) / expected).abs().max()) < 2**-8
