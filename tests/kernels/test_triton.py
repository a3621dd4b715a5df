"""The Triton kernels against the torch references: in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from sgl.kernels import attention as reference
from sgl.kernels import elementwise as reference_elementwise
from sgl.kernels.triton import attention, elementwise, matmul

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
if HAS_GPU:
    pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of the relative error (norms) against float32; half types round inputs of later stages, too."""
# The interpreter multiplies the bit patterns of bfloat16.
dtypes = pytest.mark.parametrize("dtype", [d for d in TOLERANCE if HAS_GPU or d != torch.bfloat16], ids=str)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def check(ours: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert ours.shape == expected.shape
    error = (ours.double() - expected.double()).norm() / expected.double().norm()
    assert error < TOLERANCE[dtype]


def wide(function: Callable[..., torch.Tensor], *tensors: torch.Tensor, **rest: object) -> torch.Tensor:
    return function(*(tensor.float() for tensor in tensors), **rest)


@dtypes
@pytest.mark.parametrize("num_rows", [1, 2, 16])
@pytest.mark.parametrize("gated", [False, True])
def test_linear_rows(dtype: torch.dtype, num_rows: int, gated: bool) -> None:
    x, weight = draw(num_rows, 160, dtype=dtype), draw(56, 160, dtype=dtype) * 160**-0.5
    residual = draw(num_rows, 28 if gated else 56, dtype=dtype)
    products = x.float() @ weight.float().T
    if gated:
        products = reference_elementwise.silu_mul(*products.chunk(2, dim=-1))
    ours = matmul.linear_rows(x, weight, gated=gated, residual=residual)
    check(ours, residual.float() + products, dtype)
    check(matmul.linear_rows(x, weight), x.float() @ weight.float().T, dtype)


@dtypes
def test_norms_and_activation(dtype: torch.dtype) -> None:
    x, residual, weight = draw(5, 72, dtype=dtype), draw(5, 72, dtype=dtype, seed=1), draw(72, dtype=dtype)
    check(elementwise.rms_norm(x, weight, 1e-6), wide(reference_elementwise.rms_norm, x, weight, eps=1e-6), dtype)
    added = residual + x
    check(
        elementwise.add_rms_norm(x, residual, weight, 1e-6),
        wide(reference_elementwise.rms_norm, added, weight, eps=1e-6),
        dtype,
    )
    assert torch.equal(residual, added)
    gate_up = draw(3, 2 * 40, dtype=dtype)
    expected = wide(reference_elementwise.silu_mul, *gate_up.chunk(2, dim=-1))
    check(elementwise.silu_mul_packed(gate_up), expected, dtype)


@dtypes
def test_rotate_and_write(dtype: torch.dtype) -> None:
    num_tokens, heads, kv_heads, size = 3, 4, 2, 16
    qkv = draw(num_tokens, (heads + 2 * kv_heads) * size, dtype=dtype)
    angles = draw(num_tokens, size // 2)
    cos, sin = (torch.cat((part, part), dim=-1).to(dtype) for part in (angles.cos(), angles.sin()))
    keys, values = draw(9, kv_heads, size, dtype=dtype), draw(9, kv_heads, size, dtype=dtype, seed=1)
    before = keys.clone(), values.clone()
    slots = torch.tensor([7, 0, 4], device=DEVICE)
    query = elementwise.rotate_and_write(qkv, cos, sin, slots, keys, values, heads)
    parts = qkv.view(num_tokens, -1, size).split([heads, kv_heads, kv_heads], dim=1)
    check(query, wide(reference_elementwise.rotary, parts[0], cos, sin), dtype)
    check(keys[slots], wide(reference_elementwise.rotary, parts[1], cos, sin), dtype)
    assert torch.equal(values[slots], parts[2])
    others = [1, 2, 3, 5, 6, 8]
    assert torch.equal(keys[others], before[0][others])
    assert torch.equal(values[others], before[1][others])


@dtypes
@pytest.mark.parametrize(("page_size", "heads", "num_splits"), [(1, (2, 2), 3), (4, (6, 2), 3), (1, (6, 2), 1)])
def test_paged_attention(dtype: torch.dtype, page_size: int, heads: tuple[int, int], num_splits: int) -> None:
    """Decoding rows of very different lengths beside chunks with and without a prefix, on scattered pages full of NaN
    where nothing was written."""
    starts, lengths, size = [0, 130, 5, 63, 0], [1, 1, 70, 1, 3], 16
    needed = [-(-(start + length) // page_size) for start, length in zip(starts, lengths, strict=True)]
    pages = np.random.default_rng(0).permutation(sum(needed) + 5).astype(np.int32)
    tables = np.split(pages[: sum(needed)], np.cumsum(needed)[:-1])
    keys, values = (torch.full((len(pages) * page_size, heads[1], size), torch.nan, dtype=dtype) for _ in range(2))
    for start, length, table in zip(starts, lengths, tables, strict=True):
        slots = torch.from_numpy(reference.slots_of(table, page_size, 0, start + length))
        keys[slots] = draw(len(slots), heads[1], size, dtype=dtype, seed=start).cpu()
        values[slots] = draw(len(slots), heads[1], size, dtype=dtype, seed=length + 1).cpu()
    keys, values = keys.to(DEVICE), values.to(DEVICE)
    query = draw(sum(lengths), heads[0], size, dtype=dtype)
    plan = attention.plan_attention(starts, lengths, tables, page_size, DEVICE, heads[1])
    plan = replace(plan, num_splits=num_splits)
    ours = attention.paged_attention(query, keys, values, plan, size**-0.5)
    checked = reference.plan_attention(starts, lengths, tables, page_size, DEVICE)
    expected = wide(reference.paged_attention, query, keys, values, plan=checked, scale=size**-0.5)
    check(ours, expected, dtype)
    assert plan.write_slots.tolist() == checked.write_slots.tolist()


def test_rows_that_fill_up_read_nothing() -> None:
    keys = torch.full((4, 2, 16), torch.nan, device=DEVICE)
    plan = attention.plan_attention([0], [1], [np.array([1], dtype=np.int32)], 1, DEVICE, 2)
    for num_splits in (1, 2):
        empty = replace(plan, single_lengths=torch.zeros_like(plan.single_lengths), num_splits=num_splits)
        ours = attention.paged_attention(draw(1, 2, 16), keys, keys, empty, 1.0)
        assert torch.equal(ours, torch.zeros_like(ours))


def test_few_rows_are_split_and_many_are_not() -> None:
    assert attention.num_splits(1, 8) == 66
    assert attention.num_splits(16, 8) == 4
    assert attention.num_splits(64, 8) == attention.num_splits(256, 8) == 1
