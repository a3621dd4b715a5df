"""Products and attention of deterministic mode on a GPU: the bits of a row follow from the row and its context alone.

Owns the one path of that mode in Triton, as `sgl.kernels.deterministic` does for torch on a CPU. Two things make a sum
differ between steps: another order of addition, and other instructions for another number of rows. So:

* A product is cut into blocks of `_ROWS` rows however many there are (rows that are missing are zeros), and its columns
  are added block after block by one program; how it is cut further follows from the matrix.
* Attention takes keys in blocks of `_KEYS`, and these in parts, both counted from the sequence's beginning; a part's
  length follows from the query's place. Blocks are added one after another, parts too. Few queries have their parts
  computed side by side and put together by a second kernel (flash-decoding), many by one program, in the same order by
  the same operations, none of them fused with another.

Kernels are compiled once for all numbers of rows, and launched plainly. Contracts are those of `attention.py` and of
`torch.nn.functional.linear`.

Shapes: T rows, N outputs, K inputs of a product; of attention as in `attention.py`, with M queries of a program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sgl.kernels.triton.attention import PagedPlan, num_splits
from sgl.kernels.triton.paged import attend

_ROWS = 64
"""Of every product: what the matrix units of Hopper take at once. Heads times tokens of a program of attention."""
_KEYS = 64
_MAX_PARTS = tl.constexpr(32)
_SHORTEST_PART = tl.constexpr(256)
_LOG2_E = 1.4426950408889634
# How much of a block of keys each query sees; see `paged.py`.
_CAUSAL = tl.constexpr(2)
_TREE = tl.constexpr(3)


class _Cut(NamedTuple):
    """Columns and rows of a matrix that a program takes at a time, and how many such blocks are on their way."""

    block_n: int
    block_k: int
    stages: int


def _cut(N: int, dtype: torch.dtype) -> _Cut:
    """Narrow where a matrix has few outputs, so that there are programs for all of the device."""
    narrow = 32 if N <= 2048 else 64
    if dtype == torch.float32:
        return _Cut(narrow, 32, 3)
    if N <= 2048:
        return _Cut(narrow, 256, 4)
    return _Cut(narrow, 128, 4) if N <= 8192 else _Cut(128, 64, 4)


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x,
    weight,
    bias,
    out,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of outputs of one block of rows. Programs of `TOGETHER` blocks of rows go through the weights together,
    so that these are read from memory once for them all."""
    program = tl.program_id(0)
    num_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    num_m = tl.cdiv(num_rows, BLOCK_M)
    group = program // (TOGETHER * num_n)
    members = tl.minimum(num_m - group * TOGETHER, TOGETHER)
    within = program % (TOGETHER * num_n)
    ids_m = (group * TOGETHER + within % members) * BLOCK_M + tl.arange(0, BLOCK_M)
    ids_n = within // members * BLOCK_N + tl.arange(0, BLOCK_N)
    ids_k = tl.arange(0, BLOCK_K)
    is_m = ids_m < num_rows
    is_n = ids_n < N
    x_rows = x + ids_m[:, None].to(tl.int64) * K
    w_rows = weight + ids_n[:, None].to(tl.int64) * K
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = (k + ids_k < K)[None, :]
        x_tile = tl.load(x_rows + k + ids_k[None, :], mask=is_m[:, None] & inside, other=0.0)
        w_tile = tl.load(w_rows + k + ids_k[None, :], mask=is_n[:, None] & inside, other=0.0)
        sums = tl.dot(x_tile, tl.trans(w_tile), sums, input_precision=PRECISION)
    if BIAS:
        sums += tl.load(bias + ids_n, mask=is_n, other=0.0).to(tl.float32)[None, :]
    places = ids_m[:, None].to(tl.int64) * N + ids_n[None, :]
    tl.store(out + places, sums.to(out.dtype.element_ty), mask=is_m[:, None] & is_n[None, :])


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`, `[T, N]`, summed in float32 (of float32 without TF32)."""
    num_rows, K = x_TK.shape
    N = len(weight_NK)
    out = torch.empty(num_rows, N, dtype=x_TK.dtype, device=x_TK.device)
    cut = _cut(N, x_TK.dtype)
    if num_rows:
        _linear[(triton.cdiv(num_rows, _ROWS) * triton.cdiv(N, cut.block_n),)](
            x_TK.contiguous(), weight_NK, weight_NK if bias_N is None else bias_N, out, num_rows, N=N, K=K,
            BIAS=bias_N is not None, BLOCK_M=_ROWS, BLOCK_N=cut.block_n,
            BLOCK_K=min(cut.block_k, triton.next_power_of_2(max(K, 16))), TOGETHER=16,
            PRECISION=_precision(x_TK.dtype), num_warps=4, num_stages=cut.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit
def _part_len(place):
    """Keys of each part of the context of a query at `place`: the shortest power of two of which there are few enough.
    The same for all places of a program, which begins at a multiple of as many as it has."""
    length = place * 0 + _SHORTEST_PART
    for _ in tl.static_range(16):
        length = tl.where(length * _MAX_PARTS < place + 1, length * 2, length)
    return length


@triton.jit
def _add_part(mixed, largest, total, part, top, weight):
    """Put one more part beside what there is; one in which nothing is seen leaves that as it is, to the bit."""
    now = tl.maximum(largest, top)
    known = tl.where(now == float("-inf"), 0.0, now)
    fade = tl.exp2(largest - known)
    share = tl.exp2(top - known)
    return mixed * fade[:, None] + part * share[:, None], now, total * fade + weight * share


@triton.jit(do_not_specialize=["pieces", "queries"])
def _attend(
    query,
    keys,
    values,
    out,
    partial,
    sums,
    rows,
    row_pages,
    row_lengths,
    blocks,
    pages,
    trees,
    stride_slot,
    scale,
    pieces,
    queries,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SINGLE: tl.constexpr,
    HAS_TREES: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Up to `TOKENS` tokens of a chunk, at places from a multiple of that on, and the query heads that share a key
    head: every part of their context, or (`SPLIT`) every so many-th, which are left for `_merge`.

    A chunk is a row of one token (`SINGLE`), or a block of `PagedPlan.blocks`, of which a program takes one of
    `pieces`."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    tree = 0
    own_bits = trees
    if SINGLE:
        first_row = tl.load(rows + block).to(tl.int64)
        count = 1
        start = tl.load(row_lengths + block) - 1
        first = start
        own_pages = pages + tl.load(row_pages + block)
    else:
        piece = block % pieces
        block = block // pieces
        entry = blocks + block * 6
        first_row = tl.load(entry).to(tl.int64)
        count = tl.load(entry + 1)
        start = tl.load(entry + 2)
        first = (start // TOKENS + piece) * TOKENS
        own_pages = pages + tl.load(entry + 3)
        if HAS_TREES:
            tree = tl.load(entry + 4)
            own_bits = trees + tl.load(entry + 5) * 2
    if first < start + count:
        ids_m = tl.arange(0, BLOCK_M)
        ids_d = tl.arange(0, D)
        place = first + ids_m // G
        token = place - start
        of_head = head * G + ids_m % G
        is_query = (ids_m < TOKENS * G) & (token >= 0) & (token < count)
        heads = ((first_row + token) * H + of_head)[:, None] * D + ids_d[None, :]
        query_MD = tl.load(query + heads, mask=is_query[:, None], other=0.0)
        low_M = ids_m
        high_M = ids_m
        if HAS_TREES:
            in_tree = is_query & (place >= tree)
            low_M = tl.load(own_bits + token * 2, mask=in_tree, other=-1)
            high_M = tl.load(own_bits + token * 2 + 1, mask=in_tree, other=-1)
        end = tl.minimum(first + TOKENS, start + count)
        length = _part_len(first)
        if not SPLIT:
            largest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
            total = tl.zeros((BLOCK_M,), dtype=tl.float32)
            mixed = tl.zeros((BLOCK_M, D), dtype=tl.float32)
            for begin in range(0, end, length):
                part, top, weight = attend(
                    query_MD, tl.zeros((BLOCK_M, D), dtype=tl.float32),
                    tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32), tl.zeros((BLOCK_M,), dtype=tl.float32),
                    keys + head * D, values + head * D, own_pages, begin, tl.minimum(begin + length, end), stride_slot,
                    scale, place, tree, low_M, high_M, _TREE if HAS_TREES else _CAUSAL, PAGE, D, BLOCK_KEYS, PRECISION,
                )  # fmt: skip
                mixed, largest, total = _add_part(mixed, largest, total, part, top, weight)
            result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(out + heads, result.to(out.dtype.element_ty), mask=is_query[:, None])
        else:
            for i in range(tl.program_id(2), tl.cdiv(end, length), tl.num_programs(2)):
                begin = i * length
                part, top, weight = attend(
                    query_MD, tl.zeros((BLOCK_M, D), dtype=tl.float32),
                    tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32), tl.zeros((BLOCK_M,), dtype=tl.float32),
                    keys + head * D, values + head * D, own_pages, begin, tl.minimum(begin + length, end), stride_slot,
                    scale, place, tree, low_M, high_M, _TREE if HAS_TREES else _CAUSAL, PAGE, D, BLOCK_KEYS, PRECISION,
                )  # fmt: skip
                where = ((block * queries + token) * _MAX_PARTS + i) * H + of_head
                tl.store(partial + where[:, None].to(tl.int64) * D + ids_d[None, :], part, mask=is_query[:, None])
                tl.store(sums + where * 2, top, mask=is_query)
                tl.store(sums + where * 2 + 1, weight, mask=is_query)


@triton.jit(do_not_specialize=["queries"])
def _merge(
    partial,
    sums,
    out,
    rows,
    row_lengths,
    blocks,
    queries,
    H: tl.constexpr,
    D: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """Put the parts of one token and head together, from the first to the last."""
    block = tl.program_id(0)
    token = tl.program_id(1)
    head = tl.program_id(2)
    if SINGLE:
        row = tl.load(rows + block).to(tl.int64)
        count = 1
        place = tl.load(row_lengths + block) - 1
    else:
        entry = blocks + block * 6
        row = tl.load(entry).to(tl.int64) + token
        count = tl.load(entry + 1)
        place = tl.load(entry + 2) + token
    if token < count:
        ids_d = tl.arange(0, D)
        ids_1 = tl.arange(0, 1)
        largest = tl.full((1,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((1,), dtype=tl.float32)
        mixed = tl.zeros((1, D), dtype=tl.float32)
        first = (block * queries + token) * _MAX_PARTS * H + head
        for i in range(tl.cdiv(place + 1, _part_len(place))):
            where = first + i * H + ids_1
            part = tl.load(partial + where[:, None].to(tl.int64) * D + ids_d[None, :])
            top = tl.load(sums + where * 2)
            weight = tl.load(sums + where * 2 + 1)
            mixed, largest, total = _add_part(mixed, largest, total, part, top, weight)
        result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        to = (row * H + head) * D + ids_1[:, None] + ids_d[None, :]
        tl.store(out + to, result.to(out.dtype.element_ty))


def paged_attention(
    query_THD: torch.Tensor,
    keys_SKD: torch.Tensor,
    values_SKD: torch.Tensor,
    plan: PagedPlan,
    scale: float,
    *,
    workers: int | None = None,
) -> torch.Tensor:
    """As `sgl.kernels.triton.attention.paged_attention`, each row for itself: what a plan says is read together is not.

    Args:
        workers: programs for the parts of a context; by default as many as fill the device. Bits do not depend on it.
    """
    out_THD = torch.empty_like(query_THD)
    if len(plan.single_rows):
        _launch(query_THD, keys_SKD, values_SKD, out_THD, plan, scale, workers, is_single=True)
    if len(plan.blocks):
        _launch(query_THD, keys_SKD, values_SKD, out_THD, plan, scale, workers, is_single=False)
    return out_THD


def _launch(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    plan: PagedPlan,
    scale: float,
    workers: int | None,
    *,
    is_single: bool,
) -> None:
    """Rows of one token, or blocks of queries."""
    (_, H, D), K = query.shape, keys.shape[1]
    tokens = _tokens(H // K)
    # A block of queries begins anywhere.
    pieces = 1 if is_single else triton.cdiv(plan.most_queries, tokens) + 1
    num_blocks = len(plan.single_rows if is_single else plan.blocks)
    queries = 1 if is_single else triton.next_power_of_2(plan.most_queries)
    workers = min(workers or num_splits(num_blocks * queries, K), _MAX_PARTS.value)
    parts = num_blocks * queries * _MAX_PARTS.value if workers > 1 else 0
    partial = torch.empty(parts, H, D, dtype=torch.float32, device=query.device)
    sums = torch.empty(parts, H, 2, dtype=torch.float32, device=query.device)
    shape: dict[str, Any] = {"H": H, "D": D, "SINGLE": is_single, "enable_fp_fusion": False}
    has_trees = plan.trees is not None and not is_single
    _attend[(num_blocks * pieces, K, workers)](
        query, keys, values, out, partial, sums, plan.single_rows, plan.single_pages, plan.single_lengths, plan.blocks,
        plan.pages, plan.trees if has_trees else plan.pages, keys.stride(0), scale * _LOG2_E, pieces, queries,
        **shape, G=H // K, PAGE=plan.page_size, HAS_TREES=has_trees, TOKENS=tokens, SPLIT=workers > 1,
        BLOCK_M=max(_ROWS, triton.next_power_of_2(H // K)), BLOCK_KEYS=_KEYS, PRECISION=_precision(query.dtype),
        num_warps=4, num_stages=3 if D * query.itemsize <= 256 else 2,
    )  # fmt: skip
    if workers > 1:
        _merge[(num_blocks, queries, H)](
            partial, sums, out, plan.single_rows, plan.single_lengths, plan.blocks, queries, **shape, num_warps=2
        )


def _tokens(group: int) -> int:
    """Tokens of a program of attention whose key head has `group` query heads: a power of two, as a part's length is.

    Example:
        >>> _tokens(4), _tokens(3), _tokens(1), _tokens(128)
        (16, 16, 64, 1)
    """
    return 2 ** max(0, (_ROWS // group).bit_length() - 1)


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"
