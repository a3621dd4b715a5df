"""Experts' products in Triton: many small matrices, each for the rows that were routed to it, in one launch.

Owns the op `experts` on a GPU. A step's pairs of token and expert are grouped by expert and cut into blocks of rows,
each of one expert; a program computes one block for some columns of that expert's matrix. How many blocks an expert has
is decided on the device, and as many are launched as there could be, so that a step has the same launches whatever was
routed where, and may be recorded in a CUDA graph. Steps of few pairs are not grouped: every pair is a block.

Shapes: T tokens of the step, E experts, K experts of a token, P = T K pairs, B blocks, N columns of the products, C
columns that are summed over (the input's).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

UNGROUPED = 32
"""Pairs up to which two of one expert read its matrices twice: grouping would cost more."""
_MIN_ROWS = 16
"""Rows that the matrix units take at once."""
_INVARIANT_ROWS = 64
"""Of every block in deterministic mode."""


class Blocks(NamedTuple):
    """The pairs by expert; arrays are int64 and lie on the device."""

    order_P: torch.Tensor
    """Pairs in the order of their experts."""
    experts_B: torch.Tensor
    """The expert of each block."""
    first_B: torch.Tensor
    """Where in that order each block begins."""
    end_B: torch.Tensor
    """Where its expert's pairs end; no more than `first_B` for a block that there is not."""
    num_rows: int
    """Of a block, at most."""


def blocks_of(ids_TK: torch.Tensor, num_experts: int, num_rows: int | None = None) -> Blocks:
    """Cut a routed step into blocks. Nothing is asked of the device.

    Args:
        num_rows: of each block; by default as the number of pairs suggests.
    """
    ids_P = ids_TK.reshape(-1)
    num_pairs, device = len(ids_P), ids_P.device
    every_P = torch.arange(num_pairs, device=device)
    if num_rows is None:
        if num_pairs <= UNGROUPED:
            return Blocks(every_P, ids_P, every_P, every_P + 1, _MIN_ROWS)
        num_rows = _block_rows(num_pairs, num_experts)
    order_P = ids_P.argsort(stable=True)
    sizes_E = torch.zeros(num_experts, dtype=torch.int64, device=device).scatter_add_(0, ids_P, torch.ones_like(ids_P))
    ends_E = sizes_E.cumsum(0)
    counts_E = (sizes_E + num_rows - 1) // num_rows
    last_E = counts_E.cumsum(0)
    # An expert's last block is not full, so there are at most this many in all.
    most = (num_pairs + min(num_experts, num_pairs) * (num_rows - 1)) // num_rows
    every_B = torch.arange(most, device=device)
    experts_B = torch.searchsorted(last_E, every_B, right=True).clamp_(max=num_experts - 1)
    within_B = every_B - (last_E - counts_E)[experts_B]
    first_B = (ends_E - sizes_E)[experts_B] + within_B * num_rows
    return Blocks(order_P, experts_B, first_B, ends_E[experts_B], num_rows)


def _block_rows(num_pairs: int, num_experts: int) -> int:
    """Rows of a block: about as many as an expert has."""
    share = num_pairs // num_experts
    return 16 if share <= 16 else 64 if share <= 128 else 128


@triton.jit
def _products(
    x,
    first_weight,
    second_weight,
    first_out,
    second_out,
    sources,
    targets,
    experts,
    firsts,
    ends,
    N,
    C: tl.constexpr,
    TWO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rows of one block times columns of its expert's matrix, or of two matrices."""
    block = tl.program_id(0)
    first = tl.load(firsts + block)
    end = tl.load(ends + block)
    if first < end:
        ids_m = first + tl.arange(0, BLOCK_M)
        ids_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        ids_c = tl.arange(0, BLOCK_C)
        is_m = ids_m < end
        is_n = ids_n < N
        x_rows = x + tl.load(sources + ids_m, mask=is_m, other=0)[:, None] * C
        columns = (tl.load(experts + block) * N + ids_n)[:, None] * C
        first_sum = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        second_sum = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for c in range(0, C, BLOCK_C):
            inside = (c + ids_c < C)[None, :]
            x_tile = tl.load(x_rows + c + ids_c[None, :], mask=is_m[:, None] & inside, other=0.0)
            w_mask = is_n[:, None] & inside
            w_tile = tl.load(first_weight + columns + c + ids_c[None, :], mask=w_mask, other=0.0)
            first_sum = tl.dot(x_tile, tl.trans(w_tile), first_sum, input_precision=PRECISION)
            if TWO:
                w_tile = tl.load(second_weight + columns + c + ids_c[None, :], mask=w_mask, other=0.0)
                second_sum = tl.dot(x_tile, tl.trans(w_tile), second_sum, input_precision=PRECISION)
        places = tl.load(targets + ids_m, mask=is_m, other=0)[:, None] * N + ids_n[None, :]
        is_place = is_m[:, None] & is_n[None, :]
        tl.store(first_out + places, first_sum.to(first_out.dtype.element_ty), mask=is_place)
        if TWO:
            tl.store(second_out + places, second_sum.to(second_out.dtype.element_ty), mask=is_place)


@triton.jit
def _combine(rows, shares, out, N, K: tl.constexpr, BLOCK_N: tl.constexpr):
    """A token's results, weighted, in the order of its ids."""
    token = tl.program_id(0).to(tl.int64)
    ids_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_n = ids_n < N
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for k in range(K):
        share = tl.load(shares + token * K + k)
        total += share * tl.load(rows + (token * K + k) * N + ids_n, mask=is_n, other=0.0).to(tl.float32)
    tl.store(out + token * N + ids_n, total.to(out.dtype.element_ty), mask=is_n)


def experts(
    x_TN: torch.Tensor,
    ids_TK: torch.Tensor,
    shares_TK: torch.Tensor,
    gate_EIN: torch.Tensor,
    up_EIN: torch.Tensor,
    down_ENI: torch.Tensor,
    activate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    block_rows: int | None = None,
) -> torch.Tensor:
    """As `sgl.kernels.moe.experts`; sums are float32 until a token's experts are added up.

    Args:
        block_rows: see `blocks_of`.
    """
    num_tokens, per_token = ids_TK.shape
    blocks = blocks_of(ids_TK, len(gate_EIN), block_rows)
    every_P = torch.arange(num_tokens * per_token, device=x_TN.device)
    tokens_P = blocks.order_P // per_token
    gate_PI, up_PI = _multiply(x_TN.contiguous(), (gate_EIN, up_EIN), tokens_P, every_P, blocks)
    inner_PI = activate(gate_PI, up_PI).contiguous()
    (out_PN,) = _multiply(inner_PI, (down_ENI,), every_P, blocks.order_P, blocks)
    total_TN = torch.empty_like(x_TN, memory_format=torch.contiguous_format)
    size = out_PN.shape[1]
    _combine[(num_tokens, triton.cdiv(size, 1024))](
        out_PN, shares_TK.contiguous(), total_TN, size, K=per_token, BLOCK_N=1024
    )
    return total_TN


experts_invariant = partial(experts, block_rows=_INVARIANT_ROWS)
"""As `experts`, a token's result to the bit the same whoever shares its experts: a product's instructions and the order
of its sums are the same however many rows there are."""


def _multiply(
    x: torch.Tensor, weights: tuple[torch.Tensor, ...], sources_P: torch.Tensor, targets_P: torch.Tensor, blocks: Blocks
) -> list[torch.Tensor]:
    """Row `sources[p]` of `x` times the matrix of its block's expert, as row `targets[p]`, for one weight or two."""
    num_pairs, (_, size, columns) = len(sources_P), weights[0].shape
    outs = [torch.empty(num_pairs, size, dtype=x.dtype, device=x.device) for _ in weights]
    tile = _tile(blocks.num_rows, x.dtype)
    _products[(len(blocks.experts_B), triton.cdiv(size, tile["BLOCK_N"]))](
        x, weights[0], weights[-1], outs[0], outs[-1], sources_P, targets_P, blocks.experts_B, blocks.first_B,
        blocks.end_B, size, C=columns, TWO=len(weights) == 2, BLOCK_M=blocks.num_rows,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", **tile,
    )  # fmt: skip
    return outs


def _tile(num_rows: int, dtype: torch.dtype) -> dict[str, int]:
    """Sizes of a program's tile: long strips of the weights where there are few rows, which wait for memory only."""
    wide = dtype == torch.float32
    if num_rows == _MIN_ROWS:
        return {"BLOCK_N": 32, "BLOCK_C": 64 if wide else 128, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_N": 64, "BLOCK_C": 32 if wide else 64, "num_warps": 4 if num_rows == 64 else 8, "num_stages": 3}
