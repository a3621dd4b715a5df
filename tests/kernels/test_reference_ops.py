"""The torch references against the same mathematics in float64, written another way (loops, complex numbers)."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from sgl.kernels import registry, workspace
from sgl.kernels.attention import plan_attention


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def test_every_op_has_a_torch_reference_that_is_listed_without_importing_torch() -> None:
    code = (
        "import sys, sgl.kernels.registry as r;"
        "print(sorted(r.ops()), [r.implementations(o)[-1].name for o in r.ops()]);"
        "print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert out == [
        "['apply_bitmask', 'argmax', 'cascade_attention', 'experts', 'gelu_tanh_mul', 'kv_write', 'paged_attention', "
        "'plan_attention', 'rms_norm', 'rotary', 'silu_mul', 'top_k'] " + str(["torch"] * 12),
        "False",
    ]


def test_argmax() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [-1.0, -2.0, float("-inf")], [float("nan"), 9.0, 1.0]])
    assert registry.get("argmax")(logits).tolist() == [1, 0, -1]
    words = torch.tensor([[0b101], [0b100], [-1]], dtype=torch.int32)
    assert registry.get("argmax")(logits, words).tolist() == [2, -1, -1]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_rms_norm(generator: torch.Generator, dtype: torch.dtype, tolerance: float) -> None:
    x = torch.randn(5, 32, generator=generator).to(dtype)
    weight = torch.randn(32, generator=generator).to(dtype)
    wide = x.double()
    expected = torch.stack([row / (row.pow(2).sum() / 32 + 1e-5).sqrt() for row in wide]) * weight.double()
    got = registry.get("rms_norm")(x, weight, 1e-5)
    assert got.dtype == dtype
    assert torch.allclose(got.double(), expected, atol=tolerance, rtol=tolerance)


def test_rotary_is_a_rotation_of_pairs_half_a_head_apart(generator: torch.Generator) -> None:
    x = torch.randn(4, 3, 8, generator=generator, dtype=torch.float64)
    angles = torch.rand(4, 4, generator=generator, dtype=torch.float64) * 6
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    both = angles.repeat(1, 2)
    got = registry.get("rotary")(x.float(), both.cos().float(), both.sin().float())
    assert torch.allclose(got.double(), expected, atol=1e-6)


def test_silu_mul(generator: torch.Generator) -> None:
    gate, up = torch.randn(2, 6, 16, generator=generator)
    expected = gate.double() / (1 + torch.exp(-gate.double())) * up.double()
    assert torch.allclose(registry.get("silu_mul")(gate, up).double(), expected, atol=1e-6)


def attend_one(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One query `[H, D]` over its context `[L, K, D]`, head by head in float64."""
    group = query.shape[0] // keys.shape[1]
    rows = []
    for head in range(query.shape[0]):
        scores = keys[:, head // group].double() @ query[head].double() * query.shape[1] ** -0.5
        weights = torch.exp(scores - scores.max())
        rows.append(weights @ values[:, head // group].double() / weights.sum())
    return torch.stack(rows)


@pytest.mark.parametrize("gathered_slots", [1, 30, workspace.GATHERED_SLOTS])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_paged_attention_over_a_mixed_step(
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    page_size: int,
    heads: int,
    kv_heads: int,
    gathered_slots: int,
) -> None:
    """Decode, prefill from nothing, prefill after a prefix, and two chunks that read what others of the step write."""
    monkeypatch.setattr(workspace, "GATHERED_SLOTS", gathered_slots)  # single tokens in groups of 1, of 2, all at once
    dim, num_pages = 8, 64
    order = torch.randperm(num_pages, generator=generator).numpy().astype(np.int32)
    pages_of = [order[0:20], order[20:40], order[40:50], np.concatenate([order[40:41], order[50:60]])]
    # Sequence 3 shares its first page with sequence 2, which computes it in this very step.
    starts = [13, 5, 0, page_size, page_size + 1]
    lengths = [1, 6, page_size, 1, 1]
    owners = [0, 1, 2, 3, 3]
    if page_size == 1:
        starts[3:], lengths[2] = [1, 2], 1

    slots_total = num_pages * page_size
    keys = torch.full((slots_total, kv_heads, dim), torch.nan)
    values = torch.full((slots_total, kv_heads, dim), torch.nan)

    def slot(sequence: int, position: int) -> int:
        return int(pages_of[sequence][position // page_size]) * page_size + position % page_size

    for sequence, start in ((0, 13), (1, 5)):  # computed in earlier steps
        for position in range(start):
            keys[slot(sequence, position)] = torch.randn(kv_heads, dim, generator=generator)
            values[slot(sequence, position)] = torch.randn(kv_heads, dim, generator=generator)

    total = sum(lengths)
    query = torch.randn(total, heads, dim, generator=generator)
    key, value = torch.randn(2, total, kv_heads, dim, generator=generator)
    plan = plan_attention(starts, lengths, [pages_of[owner] for owner in owners], page_size)
    registry.get("kv_write")(keys, values, key, value, plan.write_slots)
    got = registry.get("paged_attention")(query, keys, values, plan, dim**-0.5)

    row = 0
    for owner, start, length in zip(owners, starts, lengths, strict=True):
        for position in range(start, start + length):
            context = [slot(owner, p) for p in range(position + 1)]
            expected = attend_one(query[row], keys[context], values[context])
            assert torch.allclose(got[row].double(), expected, atol=1e-5), f"sequence {owner}, position {position}"
            row += 1
    assert row == total


def test_nan_of_one_sequence_stays_in_its_row(generator: torch.Generator) -> None:
    keys, values = torch.full((2, 12, 1, 4), torch.nan)
    keys[:3], values[:3] = torch.randn(2, 3, 1, 4, generator=generator)
    tables = [np.arange(0, 3, dtype=np.int32), np.arange(3, 12, dtype=np.int32)]
    plan = plan_attention([2, 8], [1, 1], tables, 1)
    got = registry.get("paged_attention")(torch.ones(2, 1, 4), keys, values, plan, 0.5)
    assert got[0].isfinite().all()
    assert got[1].isnan().all()
