"""Paged attention in Triton: the step's plan as a few arrays on the device, and the kernels that read it.

Owns `PagedPlan` and the attention of every token of a step over its sequence's pages. Chunks of one token (decode) are
split along their context, so that few sequences still fill the device, and merged by a second kernel; longer chunks run
in blocks of queries. Same contract as `sgl.kernels.attention`: keys and values of the whole step are written before any
is read, and slots beyond a sequence's end are never read.

Shapes: T tokens of the step, B chunks of one token, Q blocks of queries, P pages of all chunks one after another, S
slots of the pool, H query heads, K key/value heads, G = H / K, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

BLOCK_QUERIES = 64
"""Queries of one chunk that one program computes."""
_BLOCK_KEYS = 64
_PROGRAMS = 528
"""Programs that fill a large device: four for each of 132 multiprocessors."""
_MAX_SPLITS = 128
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class PagedPlan:
    """Where the step's tokens are written and what each may read. Arrays are int32 and lie on the device."""

    positions: torch.Tensor
    """`[T]`, position of each token in its sequence."""
    write_slots: torch.Tensor
    """`[T]`, slot of each token of the step."""
    pages: torch.Tensor
    """`[P]`, page tables of all chunks."""
    single_rows: torch.Tensor
    """`[B]`, rows of the step that are chunks of one token."""
    single_pages: torch.Tensor
    """`[B]`, where each one's pages begin in `pages`."""
    single_lengths: torch.Tensor
    """`[B]`, keys that each one reads; 0 for a row that only fills the step up."""
    blocks: torch.Tensor
    """`[Q, 4]`, per block of queries of a longer chunk: first row in the step, number of queries, position of the first
    and where its pages begin."""
    num_splits: int
    """Parts that a single row's context is cut into, to be computed side by side."""
    page_size: int


class HostPlan:
    """A plan's arrays on the host, before they are copied; fields as in `PagedPlan`, and each token's position.

    Shapes: C chunks.
    """

    def __init__(
        self,
        starts: Sequence[int],
        lengths: Sequence[int],
        page_tables: Sequence[npt.NDArray[np.int32]],
        page_size: int,
    ) -> None:
        starts_C = np.array(starts, dtype=np.int32)
        lengths_C = np.array(lengths, dtype=np.int32)
        ends_C = starts_C + lengths_C
        num_pages_C = -(-ends_C // page_size)
        first_rows_C = _before(lengths_C)
        first_pages_C = _before(num_pages_C)
        tables = [table[:num_pages] for table, num_pages in zip(page_tables, num_pages_C.tolist(), strict=True)]
        self.pages = np.concatenate(tables) if tables else np.empty(0, dtype=np.int32)
        # Each token's place: how far it is into its sequence, and where that sequence's pages begin.
        positions_T = np.arange(lengths_C.sum(), dtype=np.int32) - np.repeat(first_rows_C - starts_C, lengths_C)
        pages_T = self.pages[np.repeat(first_pages_C, lengths_C) + positions_T // page_size]
        self.write_slots = pages_T * np.int32(page_size) + positions_T % page_size
        is_single = lengths_C == 1
        self.single_rows = first_rows_C[is_single]
        self.single_pages = first_pages_C[is_single]
        self.single_lengths = ends_C[is_single]
        self.blocks = np.array(
            [
                (first_row + offset, min(BLOCK_QUERIES, length - offset), start + offset, first_page)
                for first_row, length, start, first_page in zip(
                    *(array[~is_single].tolist() for array in (first_rows_C, lengths_C, starts_C, first_pages_C)),
                    strict=True,
                )
                for offset in range(0, length, BLOCK_QUERIES)
            ],
            dtype=np.int32,
        ).reshape(-1, 4)
        self.positions = positions_T


def _before(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """How many come before each."""
    return (np.cumsum(counts) - counts).astype(np.int32)


def num_splits(num_singles: int, num_kv_heads: int) -> int:
    """Into how many parts contexts are cut when there are that many single rows."""
    return max(1, min(_MAX_SPLITS, _PROGRAMS // max(1, num_singles * num_kv_heads)))


def plan_attention(
    starts: Sequence[int],
    lengths: Sequence[int],
    page_tables: Sequence[npt.NDArray[np.int32]],
    page_size: int,
    device: torch.device | str = "cuda",
    num_kv_heads: int = 8,
) -> PagedPlan:
    """As `sgl.kernels.attention.plan_attention`; the arrays are copied one by one."""
    host = HostPlan(starts, lengths, page_tables, page_size)
    arrays = {name: torch.from_numpy(array).to(device) for name, array in vars(host).items()}
    return PagedPlan(**arrays, num_splits=num_splits(len(host.single_rows), num_kv_heads), page_size=page_size)


@triton.jit
def _attend(
    query_MD,
    row_ids_M,
    keys,
    values,
    pages,
    first_page,
    begin,
    end,
    head,
    stride_slot,
    scale,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Softmax over keys `begin .. end` of one head, of which row `m` sees those at positions up to `row_ids_M[m]`.

    Returns the weighted values (not divided), the largest score (base 2) and the sum of weights.
    """
    ids_d = tl.arange(0, D)
    largest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    for first in range(begin, end, BLOCK_KEYS):
        positions = first + tl.arange(0, BLOCK_KEYS)
        inside = positions < end
        page = tl.load(pages + first_page + positions // PAGE, mask=inside, other=0)
        slot = page.to(tl.int64) * PAGE + positions % PAGE
        places = slot[:, None] * stride_slot + head * D + ids_d[None, :]
        key = tl.load(keys + places, mask=inside[:, None], other=0.0)
        scores = tl.dot(query_MD, tl.trans(key), input_precision=PRECISION) * scale
        visible = inside[None, :] & (positions[None, :] <= row_ids_M[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, axis=1))
        known = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(scores - known[:, None])
        shrink = tl.exp2(largest - known)
        value = tl.load(values + places, mask=inside[:, None], other=0.0)
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = tl.dot(weights.to(value.dtype), value, mixed * shrink[:, None], input_precision=PRECISION)
        largest = now
    return mixed, largest, total


@triton.jit
def _singles(
    query,
    keys,
    values,
    out,
    partial,
    sums,
    rows,
    row_pages,
    row_lengths,
    pages,
    stride_slot,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One part of one row's context, for the query heads that share a key head."""
    b = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(row_lengths + b)
    share = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_KEYS) * BLOCK_KEYS
    begin = split * share
    end = tl.minimum(begin + share, length)
    ids_g = tl.arange(0, BLOCK_G)
    ids_d = tl.arange(0, D)
    row = tl.load(rows + b).to(tl.int64)
    heads = (row * H + head * G + ids_g)[:, None] * D + ids_d[None, :]
    is_head = (ids_g < G)[:, None]
    query_GD = tl.load(query + heads, mask=is_head, other=0.0)
    limits = tl.full((BLOCK_G,), 2147483647, dtype=tl.int32)
    mixed, largest, total = _attend(
        query_GD, limits, keys, values, pages, tl.load(row_pages + b), begin, end, head, stride_slot, scale,
        PAGE, D, BLOCK_G, BLOCK_KEYS, PRECISION,
    )  # fmt: skip
    if SPLITS == 1:
        result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + heads, result.to(out.dtype.element_ty), mask=is_head)
    else:
        part = (b * SPLITS + split) * H + head * G + ids_g
        tl.store(partial + part[:, None].to(tl.int64) * D + ids_d[None, :], mixed, mask=is_head)
        tl.store(sums + part * 2, largest, mask=ids_g < G)
        tl.store(sums + part * 2 + 1, total, mask=ids_g < G)


@triton.jit
def _merge(
    partial, sums, out, rows, H: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr
):
    """Put one row's and head's parts together."""
    b = tl.program_id(0)
    head = tl.program_id(1)
    splits = tl.arange(0, BLOCK_SPLITS)
    ids_d = tl.arange(0, D)
    part = (b * SPLITS + splits) * H + head
    is_split = splits < SPLITS
    largest = tl.load(sums + part * 2, mask=is_split, other=float("-inf"))
    total = tl.load(sums + part * 2 + 1, mask=is_split, other=0.0)
    top = tl.max(largest, axis=0)
    weights = tl.exp2(largest - tl.where(top == float("-inf"), 0.0, top))
    mixed = tl.load(partial + part[:, None].to(tl.int64) * D + ids_d[None, :], mask=is_split[:, None], other=0.0)
    whole = tl.sum(weights * total, axis=0)
    result = tl.sum(mixed * weights[:, None], axis=0) / tl.where(whole == 0.0, 1.0, whole)
    row = tl.load(rows + b).to(tl.int64)
    tl.store(out + (row * H + head) * D + ids_d, result.to(out.dtype.element_ty))


@triton.jit
def _blocks(
    query,
    keys,
    values,
    out,
    blocks,
    pages,
    stride_slot,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of queries of one chunk and head, over all keys up to the last of them."""
    block = blocks + tl.program_id(0) * 4
    head = tl.program_id(1)
    first_row = tl.load(block).to(tl.int64)
    count = tl.load(block + 1)
    start = tl.load(block + 2)
    ids_m = tl.arange(0, BLOCK_M)
    ids_d = tl.arange(0, D)
    places = ((first_row + ids_m) * H + head)[:, None] * D + ids_d[None, :]
    is_query = (ids_m < count)[:, None]
    query_MD = tl.load(query + places, mask=is_query, other=0.0)
    mixed, _, total = _attend(
        query_MD, start + ids_m, keys, values, pages, tl.load(block + 3), 0, start + count, head // G, stride_slot,
        scale, PAGE, D, BLOCK_M, BLOCK_KEYS, PRECISION,
    )  # fmt: skip
    result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=is_query)


def paged_attention(
    query_THD: torch.Tensor,
    keys_SKD: torch.Tensor,
    values_SKD: torch.Tensor,
    plan: PagedPlan,
    scale: float,
) -> torch.Tensor:
    """Causal attention of every token of the step over its sequence's pages; `[T, H, D]`."""
    _, H, D = query_THD.shape
    K = keys_SKD.shape[1]
    out_THD = torch.empty_like(query_THD)
    precision = "ieee" if query_THD.dtype == torch.float32 else "tf32"
    shape = {"H": H, "G": H // K, "D": D, "PAGE": plan.page_size, "PRECISION": precision}
    scale = scale * _LOG2_E
    num_singles = len(plan.single_rows)
    if num_singles:
        splits = plan.num_splits
        partial = torch.empty(0, dtype=torch.float32, device=query_THD.device)
        sums = partial
        if splits > 1:
            partial = torch.empty(num_singles, splits, H, D, dtype=torch.float32, device=query_THD.device)
            sums = torch.empty(num_singles, splits, H, 2, dtype=torch.float32, device=query_THD.device)
        _singles[(num_singles, K, splits)](
            query_THD, keys_SKD, values_SKD, out_THD, partial, sums, plan.single_rows, plan.single_pages,
            plan.single_lengths, plan.pages, keys_SKD.stride(0), scale, **shape, SPLITS=splits,
            BLOCK_G=max(16, triton.next_power_of_2(H // K)), BLOCK_KEYS=_BLOCK_KEYS, num_warps=4, num_stages=3,
        )  # fmt: skip
        if splits > 1:
            _merge[(num_singles, H)](
                partial, sums, out_THD, plan.single_rows, H=H, D=D, SPLITS=splits,
                BLOCK_SPLITS=triton.next_power_of_2(splits), num_warps=2,
            )  # fmt: skip
    if len(plan.blocks):
        _blocks[(len(plan.blocks), H)](
            query_THD, keys_SKD, values_SKD, out_THD, plan.blocks, plan.pages, keys_SKD.stride(0), scale, **shape,
            BLOCK_M=BLOCK_QUERIES, BLOCK_KEYS=_BLOCK_KEYS, num_warps=4, num_stages=3,
        )  # fmt: skip
    return out_THD
