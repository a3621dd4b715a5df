"""Products of 1 to 16 rows with a weight matrix, in Triton: what a decode step of few sequences is made of.

Such a product only reads the weights, so all that counts is to keep enough of them on their way. Two kernels do that.
`_walk`: each program takes a few rows of the weights and walks along them, all rows of `x` at once. `_stream`, for one
row of `x`: as many programs as fill the device hold all of `x` and go through the weights row by row, so that the next
rows are on their way while one is summed, and nothing begins or ends in between. Both fetch their first weights before
they wait for the kernel that makes `x` (`chaining.py`).

What comes after in a decoder layer happens in the same pass: the gated activation of two products, the residual that is
added. (The norm that comes before does not: done by every program again it costs more than a pass of its own.)

Shapes: T rows, N outputs, K inputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

from sgl.kernels.triton.chaining import UNCHAINED, chained

MAX_ROWS = 16
"""Rows that one pass over the weights serves."""
_SHORTEST_STREAM, _LONGEST_STREAM = 2048, 16384
"""Inputs that are worth a program of `_stream`, and those that it can hold."""
_HEAD = 65536
"""Outputs from which on a matrix is a model's head: so many programs that their start and end count for nothing."""
_SHARED_BYTES = 200_000
"""Of a multiprocessor, for what is on its way; of Hopper's 227 KiB."""


class Tile(NamedTuple):
    """How a product is cut.

    Attributes:
        kernel: `walk` or `stream`.
        block_n, block_k: rows and columns of the weights that are on their way together; `stream` takes whole rows.
        stages: such blocks on their way at a time.
        programs: of `stream`, per multiprocessor.
        chained: launched so that it begins while the kernel before it ends. Large grids of `walk` lose by it: all but
            their first programs fetch ahead of nothing. `stream` fills the multiprocessors, which keeps the kernels
            behind it out: a step of one row took 4.96 ms with it and 4.39 without.
    """

    kernel: Literal["walk", "stream"]
    block_n: int
    block_k: int = 0
    stages: int = 3
    warps: int = 4
    programs: int = 2
    chained: bool = True


@triton.jit
def _fetch(places, inside):
    """Have lines of memory brought to the cache that all multiprocessors share, without waiting for them. A line is 64
    numbers of 16 bits; of wider ones some are left out."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [places.to(tl.int64), inside.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _walk(
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
    PDL: tl.constexpr,
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
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        lines = tl.arange(0, BLOCK_K // 64) * 64
        is_line = is_n[:, None] & (lines < K)[None, :]
        _fetch(w_rows + lines[None, :], is_line)
        if GATED:
            _fetch(up_rows + lines[None, :], is_line)
        tl.extra.cuda.gdc_wait()
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


@triton.jit
def _stream(
    x,
    weight,
    residual,
    out,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Blocks of `BLOCK_N` outputs of one row, every so many-th. `weight` as for `_walk`; `BLOCK_K` is at least K."""
    ids_n = tl.arange(0, BLOCK_N)
    ids_k = tl.arange(0, BLOCK_K)
    first = tl.program_id(0) * BLOCK_N
    step = tl.num_programs(0) * BLOCK_N
    inside = (ids_k < K)[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        lines = tl.arange(0, BLOCK_K // 64) * 64
        is_line = (first + ids_n < N)[:, None] & (lines < K)[None, :]
        rows = weight + (first + ids_n)[:, None].to(tl.int64) * K + lines[None, :]
        _fetch(rows, is_line)
        if GATED:
            _fetch(weight + (first + ids_n + N)[:, None].to(tl.int64) * K + lines[None, :], is_line)
        tl.extra.cuda.gdc_wait()
    x_tile = tl.load(x + ids_k, mask=ids_k < K, other=0.0).to(tl.float32)[None, :]
    for begin in tl.range(first, N, step, num_stages=STAGES):
        ids = begin + ids_n
        is_n = ids < N
        w_rows = weight + ids[:, None].to(tl.int64) * K + ids_k[None, :]
        w = tl.load(w_rows, mask=is_n[:, None] & inside, other=0.0, eviction_policy="evict_first")
        sums = tl.sum(x_tile * w.to(tl.float32), axis=1)
        if GATED:
            up_rows = weight + (ids + N)[:, None].to(tl.int64) * K + ids_k[None, :]
            up = tl.load(up_rows, mask=is_n[:, None] & inside, other=0.0, eviction_policy="evict_first")
            sums = sums / (1.0 + tl.exp(-sums)) * tl.sum(x_tile * up.to(tl.float32), axis=1)
        if RESIDUAL:
            sums += tl.load(residual + ids, mask=is_n, other=0.0).to(tl.float32)
        tl.store(out + ids, sums.to(out.dtype.element_ty), mask=is_n)


def linear_rows(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    tile: Tile | None = None,
) -> torch.Tensor:
    """`residual + activation(x @ weight.T)`, `[T, N]`, for at most `MAX_ROWS` rows.

    Args:
        residual: `[T, N]`, added to the products.
        gated: `weight` is `[2 N, K]`, gates over ups; the output is `silu(gate) * up`.
        tile: how it is cut; what came out best on an H200 by default.
    """
    num_rows, K = x_TK.shape
    N = weight_NK.shape[0] // 2 if gated else weight_NK.shape[0]
    tile = tile or best_tile(num_rows, N, K, gated=gated)
    if x_TK.dtype == torch.float32 and num_rows > 1:
        tile = tile._replace(block_k=tile.block_k // 2)  # a block's numbers take twice the room
    out = torch.empty(num_rows, N, dtype=x_TK.dtype, device=x_TK.device)
    added = x_TK if residual is None else residual
    block_k = triton.next_power_of_2(max(K, 64))
    shape: dict[str, Any] = {"K": K, "GATED": gated, "RESIDUAL": residual is not None, "num_warps": tile.warps}
    shape |= {"BLOCK_N": tile.block_n, "STAGES": tile.stages, **(chained(x_TK.device) if tile.chained else UNCHAINED)}
    if tile.kernel == "stream":
        programs = min(triton.cdiv(N, tile.block_n), tile.programs * _multiprocessors(x_TK.device))
        _stream[(programs,)](x_TK, weight_NK, added, out, N, BLOCK_K=block_k, **shape)
        return out
    _walk[(triton.cdiv(N, tile.block_n),)](
        x_TK, weight_NK, added, out, num_rows, N,
        BLOCK_T=1 if num_rows == 1 else MAX_ROWS, BLOCK_K=min(tile.block_k, block_k), USE_DOT=num_rows > 1,
        PRECISION="ieee" if x_TK.dtype == torch.float32 else "tf32", **shape,
    )  # fmt: skip
    return out


def best_tile(num_rows: int, N: int, K: int, *, gated: bool) -> Tile:
    """What came out best on an H200 in `sgl bench gpu --part products`, for matrices of 4,096 columns and more
    (`kernels/README.md` has the rates).

    One row is multiplied without the matrix units; more rows are padded to the 16 that they take.
    """
    is_head = N >= _HEAD
    if num_rows == 1:
        if is_head or not _SHORTEST_STREAM <= K <= _LONGEST_STREAM:
            return Tile("walk", 8 if K > 8192 else 4, 2048, chained=not is_head)
        return Tile("stream", 1, stages=3, warps=8, programs=3, chained=False)
    if gated:
        return Tile("walk", 32, 128, chained=False)
    if N <= 4096:
        return Tile("walk", 32, 512, stages=4)
    return Tile("walk", 64, 128 if is_head else 256, stages=4, chained=False)


def tiles_to_compare(num_rows: int, N: int, K: int, *, gated: bool) -> list[Tile]:
    """What a measurement compares, the one in use first."""
    in_use = best_tile(num_rows, N, K, gated=gated)
    if num_rows == 1:
        row_bytes = 2 * triton.next_power_of_2(K) * (2 if gated else 1)
        others = [
            *(Tile("walk", n, k, stages=s, warps=w) for n, k, s, w in _WALKS),
            *(
                Tile("stream", n, stages=s, warps=w, programs=p)
                for n, s, w, p in _STREAMS
                if K <= _LONGEST_STREAM and n * (s - 1) * row_bytes <= _SHARED_BYTES
            ),
        ]
    else:
        others = [Tile("walk", n, k, stages=s, warps=w) for n, k, s, w in _DOTS]
    return list(dict.fromkeys([in_use, in_use._replace(chained=not in_use.chained), *others]))


_WALKS = ((4, 2048, 3, 4), (8, 2048, 3, 4), (2, 2048, 4, 4), (8, 1024, 4, 4))
_STREAMS = ((1, 3, 8, 3), (1, 3, 8, 2), (1, 2, 8, 4), (1, 3, 4, 4), (1, 4, 8, 3), (2, 4, 4, 3))
_DOTS = ((16, 512, 4, 4), (32, 256, 4, 4), (64, 128, 5, 4), (16, 1024, 3, 4))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
