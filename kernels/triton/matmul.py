"""Products of 1 to 16 rows with a weight matrix, in Triton: what a decode step of few sequences is made of.

Such a product only reads the weights, so all that counts is to keep enough of them on their way: each program takes a
few rows of the weights and walks along them, all rows of `x` at once. What comes after in a decoder layer happens in
the same pass: the gated activation of two products, the residual that is added. (The norm that comes before does not:
done by every program again it costs more than a pass of its own.)

Shapes: T rows, N outputs, K inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

MAX_ROWS = 16
"""Rows that one pass over the weights serves."""


@triton.jit
def _rows(
    x,
    weight,
    residual,
    out,
    num_rows,
    N,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    USE_DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Outputs `BLOCK_N` of all rows. `weight` is `[N, K]`, gated `[2 N, K]`: all gates, then all ups."""
    ids_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ids_t = tl.arange(0, BLOCK_T)
    ids_k = tl.arange(0, BLOCK_K)
    is_n = ids_n < N
    is_t = ids_t < num_rows
    first = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    second = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    x_rows = x + ids_t[:, None].to(tl.int64) * K
    w_rows = weight + ids_n[:, None].to(tl.int64) * K
    up_rows = weight + (ids_n + N)[:, None].to(tl.int64) * K
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = (k + ids_k < K)[None, :]
        w = tl.load(w_rows + k + ids_k[None, :], mask=is_n[:, None] & inside, other=0.0, eviction_policy="evict_first")
        x_tile = tl.load(x_rows + k + ids_k[None, :], mask=is_t[:, None] & inside, other=0.0)
        first = _add_products(first, x_tile, w, USE_DOT, PRECISION)
        if GATED:
            up = tl.load(
                up_rows + k + ids_k[None, :],
                mask=is_n[:, None] & inside,
                other=0.0,
                eviction_policy="evict_first",
            )
            second = _add_products(second, x_tile, up, USE_DOT, PRECISION)
    if GATED:
        first = first / (1.0 + tl.exp(-first)) * second
    places = ids_t[:, None].to(tl.int64) * N + ids_n[None, :]
    inside_out = is_t[:, None] & is_n[None, :]
    if RESIDUAL:
        first += tl.load(residual + places, mask=inside_out, other=0.0).to(tl.float32)
    tl.store(out + places, first.to(out.dtype.element_ty), mask=inside_out)


@triton.jit
def _add_products(sums, x_tile, w, USE_DOT: tl.constexpr, PRECISION: tl.constexpr):
    """`sums + x_tile @ w.T`, summed in float32."""
    if USE_DOT:
        sums = tl.dot(x_tile, tl.trans(w), sums, input_precision=PRECISION)
    else:
        products = x_tile.to(tl.float32)[:, None, :] * w.to(tl.float32)[None, :, :]
        sums += tl.sum(products, axis=2)
    return sums


def linear_rows(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """`residual + activation(x @ weight.T)`, `[T, N]`, for at most `MAX_ROWS` rows.

    Args:
        residual: `[T, N]`, added to the products.
        gated: `weight` is `[2 N, K]`, gates over ups; the output is `silu(gate) * up`.
    """
    num_rows, K = x_TK.shape
    N = weight_NK.shape[0] // 2 if gated else weight_NK.shape[0]
    out = torch.empty(num_rows, N, dtype=x_TK.dtype, device=x_TK.device)
    shape = _tile(num_rows, N, K, gated)
    _rows[(triton.cdiv(N, shape["BLOCK_N"]),)](
        x_TK, weight_NK, x_TK if residual is None else residual, out, num_rows, N,
        K=K, GATED=gated, RESIDUAL=residual is not None, num_warps=4,
        PRECISION="ieee" if x_TK.dtype == torch.float32 else "tf32", **shape,
    )  # fmt: skip
    return out


def _tile(num_rows: int, N: int, K: int, gated: bool) -> dict[str, Any]:
    """Block sizes that came out best on an H200 among some eighty, for matrices of 4,096 columns and more.

    One row is multiplied without the matrix units, in long strips; more rows are padded to the 16 that they take.
    """
    if num_rows == 1:
        block_t, block_n, block_k, stages = 1, 8 if K > 8192 else 4, 2048, 3
    elif gated:
        block_t, block_n, block_k, stages = MAX_ROWS, 32, 128, 3
    elif N <= 4096:
        block_t, block_n, block_k, stages = MAX_ROWS, 32, 512, 4
    else:
        block_t, block_n, block_k, stages = MAX_ROWS, 64, 256 if N < 65536 else 128, 4
    return {
        "BLOCK_T": block_t,
        "BLOCK_N": block_n,
        "BLOCK_K": min(block_k, triton.next_power_of_2(max(K, 16))),
        "STAGES": stages,
        "USE_DOT": num_rows > 1,
    }
