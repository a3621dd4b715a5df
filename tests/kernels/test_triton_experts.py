"""Experts in Triton against the torch reference: in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from sgl.kernels import elementwise, moe
from sgl.kernels.triton import experts

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
if HAS_GPU:
    pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Of the relative error (norms) against float32."""
# The interpreter multiplies the bit patterns of bfloat16.
DTYPES = [dtype for dtype in TOLERANCE if HAS_GPU or dtype != torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 10, 40])
def test_experts(dtype: torch.dtype, num_tokens: int) -> None:
    """Steps that are grouped and steps that are not; sizes that fill no tile; an expert that nobody picks."""
    count, per_token, hidden, inner = 6, 3, 72, 40
    generator = torch.Generator().manual_seed(num_tokens)
    gate, up, down, x = (
        torch.randn(*shape, generator=generator).to(DEVICE, dtype)
        for shape in ((count, inner, hidden), (count, inner, hidden), (count, hidden, inner), (num_tokens, hidden))
    )
    gate, up, down = gate * hidden**-0.5, up * hidden**-0.5, down * inner**-0.5
    ids = torch.stack([torch.randperm(count - 1, generator=generator)[:per_token] for _ in range(num_tokens)])
    shares = torch.rand(num_tokens, per_token, generator=generator)
    ids, shares = ids.to(DEVICE), shares.to(DEVICE)
    ours = experts.experts(x, ids, shares, gate, up, down, elementwise.silu_mul)
    assert (ours.dtype, ours.shape) == (dtype, x.shape)
    wide = moe.experts(x.float(), ids, shares, gate.float(), up.float(), down.float(), elementwise.silu_mul)
    assert float((ours.float() - wide).norm() / wide.norm()) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "sizes", [[0, 100, 0, 1, 17, 16], [40, 0, 0, 0, 0, 0], [7, 7, 7, 7, 7, 7], [0, 0, 0, 0, 0, 300]]
)
def test_blocks_hold_every_pair_once(sizes: list[int]) -> None:
    ids = torch.arange(6).repeat_interleave(torch.tensor(sizes))
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))].to(DEVICE)
    blocks = experts.blocks_of(ids[:, None], 6)
    pairs = []
    for expert, first, end in zip(
        *(each.tolist() for each in (blocks.experts_B, blocks.first_B, blocks.end_B)), strict=True
    ):
        own = blocks.order_P[first : min(end, first + blocks.num_rows)].tolist() if first < end else []
        assert all(int(ids[pair]) == expert for pair in own)
        pairs += own
    assert sorted(pairs) == list(range(sum(sizes)))
