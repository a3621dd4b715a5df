"""Products and attention of deterministic mode in Triton: right, and a row's bits the same whatever is beside it. In
Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sgl.kernels import attention as reference
from sgl.kernels import elementwise
from sgl.kernels.triton import attention, experts, invariant

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
if HAS_GPU:
    pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of the relative error (norms) against float32."""
# The interpreter multiplies the bit patterns of bfloat16.
dtypes = pytest.mark.parametrize("dtype", [d for d in TOLERANCE if HAS_GPU or d != torch.bfloat16], ids=str)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def check(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.shape == expected.shape
    error = (ours.double() - expected.double()).norm() / expected.double().norm()
    assert error < TOLERANCE[ours.dtype]


@dtypes
@pytest.mark.parametrize("with_bias", [False, True])
def test_products(dtype: torch.dtype, with_bias: bool) -> None:
    sizes = ((4096, 6144), (1024, 256), (512, 9000)) if HAS_GPU else ((160, 72),)
    for inner, outputs in sizes:
        x = draw(1100 if HAS_GPU else 70, inner, dtype=dtype)
        weight = draw(outputs, inner, dtype=dtype) * inner**-0.5
        bias = draw(outputs, dtype=dtype) if with_bias else None
        whole = invariant.linear(x, weight, bias)
        check(whole, torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double()))
        for rows in (slice(0, 1), slice(3, 5), slice(64, 70), slice(60, 70), slice(0, 65)):
            assert torch.equal(invariant.linear(x[rows], weight, bias), whole[rows])


@dtypes
def test_experts(dtype: torch.dtype) -> None:
    count, per_token, hidden, inner = 6, 3, 72, 40
    gate, up, down, x = (
        draw(*shape, dtype=dtype, seed=seed)
        for seed, shape in enumerate(
            ((count, inner, hidden), (count, inner, hidden), (count, hidden, inner), (40, hidden))
        )
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(count, generator=generator)[:per_token] for _ in range(len(x))]).to(DEVICE)
    shares = torch.rand(len(x), per_token, generator=generator).to(DEVICE)

    def compute(rows: slice) -> torch.Tensor:
        return experts.experts_invariant(x[rows], ids[rows], shares[rows], gate, up, down, elementwise.silu_mul)

    whole = compute(slice(None))
    check(whole.float(), experts.experts(x, ids, shares, gate, up, down, elementwise.silu_mul).float())
    for rows in (slice(0, 1), slice(7, 9), slice(20, 40)):
        assert torch.equal(compute(rows), whole[rows])


class Sequence:
    """A context on scattered pages of its own, of which everything beyond is NaN."""

    def __init__(self, length: int, page_size: int, heads: tuple[int, int], size: int, dtype: torch.dtype) -> None:
        num_pages = -(-length // page_size)
        self.page_size = page_size
        self.table = np.random.default_rng(length).permutation(num_pages + 2)[:num_pages].astype(np.int32)
        self.keys = torch.full(((num_pages + 2) * page_size, heads[1], size), torch.nan, dtype=dtype)
        self.values = self.keys.clone()
        slots = torch.from_numpy(reference.slots_of(self.table, page_size, 0, length))
        self.keys[slots] = draw(length, heads[1], size, dtype=dtype).cpu()
        self.values[slots] = draw(length, heads[1], size, dtype=dtype, seed=1).cpu()
        self.query = draw(length, heads[0], size, dtype=dtype, seed=2)


@dtypes
@pytest.mark.parametrize(("page_size", "heads"), [(1, (2, 2)), (4, (6, 2)), (16, (8, 1))])
def test_attention(dtype: torch.dtype, page_size: int, heads: tuple[int, int]) -> None:
    """The last queries of contexts of up to three parts: each by itself, and in chunks of any cut beside each other."""
    size = 16
    lengths = (1, 70, 600) if heads != (8, 1) else (300,)
    sequences = [Sequence(length, page_size, heads, size, dtype) for length in lengths]
    before = np.cumsum([0, *(len(each.keys) // page_size for each in sequences)])
    tables = [each.table + np.int32(first) for each, first in zip(sequences, before, strict=False)]
    keys = torch.cat([each.keys for each in sequences]).to(DEVICE)
    values = torch.cat([each.values for each in sequences]).to(DEVICE)

    def attend(cuts: list[tuple[int, int, int]], workers: int) -> list[torch.Tensor]:
        """Of chunks of (sequence, start, end)."""
        starts, ends = [cut[1] for cut in cuts], [cut[2] for cut in cuts]
        sizes = [end - start for start, end in zip(starts, ends, strict=True)]
        plan = attention.plan_attention(starts, sizes, [tables[cut[0]] for cut in cuts], page_size, DEVICE, heads[1])
        query = torch.cat([sequences[i].query[start:end] for i, start, end in cuts])
        out = invariant.paged_attention(query, keys, values, plan, size**-0.5, workers=workers)
        checked = reference.plan_attention(starts, sizes, [tables[cut[0]] for cut in cuts], page_size, DEVICE)
        wide = (each.float() for each in (query, keys, values))
        check(out, reference.paged_attention(*wide, plan=checked, scale=size**-0.5))
        return list(out.split(sizes))

    tails = [(i, max(0, length - 40), length) for i, length in enumerate(lengths)]
    whole = attend(tails, workers=1)
    for cuts, workers in (
        ([(i, end - 1, end) for i, _, end in tails], 1),
        ([(i, end - 1, end) for i, _, end in tails], 3),
        ([(i, max(0, end - 3), end) for i, _, end in tails], 2),
        ([(i, max(0, end - 21), end) for i, _, end in tails[::-1]], 1),
        (tails[-1:], 8),
        ([(len(lengths) - 1, lengths[-1] - 30, lengths[-1] - 1), (len(lengths) - 1, lengths[-1] - 1, lengths[-1])], 2),
    ):
        for (i, start, end), ours in zip(cuts, attend(cuts, workers), strict=True):
            first = tails[i][1]
            assert torch.equal(ours, whole[i][start - first : end - first]), (i, start, end, workers)


def test_a_chain_of_drafts_has_the_bits_of_a_chunk_and_a_tree_sees_its_branches() -> None:
    heads, size, length = (4, 2), 16, 290
    sequence = Sequence(length, 1, heads, size, torch.float32)
    keys, values = sequence.keys.to(DEVICE), sequence.values.to(DEVICE)
    query = sequence.query[-7:]

    def attend(parents: list[int] | None) -> torch.Tensor:
        ancestors = None if parents is None else [reference.ancestors_of(parents)]
        args = ([length - 7], [7], [sequence.table], 1, DEVICE)
        plan = attention.plan_attention(*args, heads[1], ancestors=ancestors)
        out = invariant.paged_attention(query, keys, values, plan, size**-0.5)
        checked = reference.plan_attention(*args, ancestors)
        check(out, reference.paged_attention(query, keys, values, checked, size**-0.5))
        return out

    chain = attend(None)
    assert torch.equal(attend([-1, 0, 1, 2]), chain)
    assert not torch.equal(attend([-1, 0, 0, 1]), chain)


def test_rows_that_fill_up_read_nothing() -> None:
    keys = torch.full((4, 2, 16), torch.nan, device=DEVICE)
    plan = attention.plan_attention([0], [1], [np.array([1], dtype=np.int32)], 1, DEVICE, 2)
    empty = replace(plan, single_lengths=torch.zeros_like(plan.single_lengths))
    for workers in (1, 2):
        ours = invariant.paged_attention(draw(1, 2, 16, dtype=torch.float32), keys, keys, empty, 1.0, workers=workers)
        assert torch.equal(ours, torch.zeros_like(ours))


def test_parts_grow_with_the_place_and_are_few() -> None:
    """Contexts whose parts are of 256, 512 and 1,024 keys; where they change, a program has places of one length."""
    ends = (8192, 8193, 16_400) if HAS_GPU else (8193,)
    for end in ends:
        sequence = Sequence(end, 16, (1, 1), 16, torch.float32)
        keys, values = sequence.keys.to(DEVICE), sequence.values.to(DEVICE)
        plans = [attention.plan_attention([end - count], [count], [sequence.table], 16, DEVICE, 1) for count in (1, 4)]
        single, chunk = (
            invariant.paged_attention(sequence.query[end - count :], keys, values, plan, 0.25, workers=workers)
            for count, plan, workers in ((1, plans[0], 4), (4, plans[1], 1))
        )
        assert torch.equal(single, chunk[-1:])
        checked = reference.plan_attention([end - 4], [4], [sequence.table], 16, DEVICE)
        check(chunk, reference.paged_attention(sequence.query[end - 4 :], keys, values, checked, 0.25))
