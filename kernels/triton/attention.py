"""Paged attention in Triton: the step's plan as a few arrays on the device, and what is launched for it.

Owns `PagedPlan` and the attention of every token of a step over its sequence's pages (`paged.py` has the kernels).
Chunks of one token (decode) are split along their context, so that few sequences still fill the device, and merged by a
second kernel; so are chunks of a few tokens (verification) when there are no longer ones; these run in blocks of
queries, those with most keys first. What rows of one token have in common at the beginning
(`sgl.kernels.prefix_groups`) is read once for all of them by a kernel of its own, before the rows' own keys, and joined
with these. Same contract as `sgl.kernels.attention`: keys and values of the whole step are written before any is read,
slots beyond a sequence's end are never read, and the last tokens of a chunk may be a tree.

Shapes: T tokens of the step, B chunks of one token, Q blocks of queries, P pages of all chunks one after another, S
slots of the pool, H query heads, K key/value heads, G = H / K, D head size, N, R items and rows of groups, M tokens of
trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton

from sgl.kernels.attention import Ancestors, chunk_positions, seen_in_tree
from sgl.kernels.prefix_groups import TILE_QUERIES, Cascade, PrefixGroup
from sgl.kernels.triton.chaining import chained
from sgl.kernels.triton.paged import (
    attend_blocks,
    attend_groups,
    attend_runs,
    attend_singles,
    merge_runs,
    merge_splits,
)

_PROGRAMS = 528
"""Programs that fill a large device: four for each of 132 multiprocessors."""
_MAX_SPLITS = 128
_MERGED = 16
"""Partial results that are put together at a time."""
_LOG2_E = 1.4426950408889634
_NO_TREE = 2**31 - 1


class Tile(NamedTuple):
    """How a kernel cuts its work: queries and keys of a program's step, warps, and blocks of keys on their way."""

    queries: int
    keys: int
    warps: int
    stages: int


DECODE = Tile(16, 64, 4, 3)
"""Of rows of one token; queries are the heads that share a key head, at least."""
_FEW, _MANY = 4, 128
"""Rows of one token up to which, and from which on, other tiles are quicker."""
OWN = Tile(16, 64, 4, 2)
"""Of what rows read beside a group's prefix: small enough to run beside a program of the group."""
PREFILL = Tile(64, 64, 4, 3)
RUN = Tile(16, 64, 4, 3)
"""Of chunks of few tokens; queries are heads times tokens, at least."""
MOST_OF_RUN = 64
"""Queries, heads times tokens, up to which a chunk is one of few tokens."""
SHARED = Tile(TILE_QUERIES, 64, 8, 3)
"""Of the prefix of a group; queries are heads times rows."""


def rows_per_tile(num_heads: int, num_kv_heads: int) -> int:
    """Rows of a group that one program takes together.

    Example:
        >>> rows_per_tile(32, 8)
        32
    """
    return max(1, TILE_QUERIES // (num_heads // num_kv_heads))


def shared_tile(num_rows: int, group: int) -> Tile:
    """For groups among so many rows, whose key heads have `group` query heads each: no larger than they can fill.

    Example:
        >>> shared_tile(64, 4).queries, shared_tile(6, 4).queries, shared_tile(2, 1).queries
        (128, 32, 16)
    """
    queries = max(16, triton.next_power_of_2(num_rows * group))
    return SHARED if queries >= SHARED.queries else Tile(queries, SHARED.keys, 4, SHARED.stages)


def decode_tile(num_rows: int, head_bytes: int, page_size: int = 1) -> Tile:
    """Of rows of one token, for keys of `head_bytes` each; what was quickest on an H200 (`kernels/README.md`).

    Example:
        >>> decode_tile(1, 256).warps, decode_tile(64, 256).warps, decode_tile(256, 256).keys
        (8, 4, 128)
    """
    if num_rows <= _FEW:
        return DECODE._replace(warps=8)
    if num_rows >= _MANY and page_size == 1 and head_bytes <= 256 and _fits_wide_tiles():
        return DECODE._replace(keys=128)
    return DECODE


@cache
def _fits_wide_tiles() -> bool:
    """Whether a multiprocessor of the GPU holds three blocks of 128 keys and values; no GPU minds."""
    if not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability() in ((9, 0), (10, 0), (10, 3))


@dataclass(frozen=True)
class PagedPlan:
    """Where the step's tokens are written and what each may read. Arrays are int32 and lie on the device."""

    positions: torch.Tensor
    """`[T]`, position of each token in its text."""
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
    """`[Q, 6]`, per block of queries of a longer chunk: first row in the step, number of queries, place of the first in
    its sequence, where its pages begin, place at which a tree begins, and which row of `trees` the first query would
    have."""
    num_splits: int
    """Parts that a single row's context is cut into, to be computed side by side."""
    page_size: int
    trees: torch.Tensor | None = None
    """`[M, 2]`, what each token of a tree sees of it, the low and the high 32 bits; `None` when there is no tree."""
    cascade: DeviceCascade | None = None
    """What single rows have in common; `None` when nothing is read together."""
    prefill: Tile = PREFILL
    """Of which `blocks` were made."""
    most_queries: int = PREFILL.queries
    """Queries of a block at most, where that is known to be less."""
    fills_up: bool = False
    """Whether there are tokens that belong to no chunk; their results are zero."""


@dataclass(frozen=True)
class DeviceCascade:
    """`Cascade` on the device."""

    shared: torch.Tensor
    parts: torch.Tensor
    rows: torch.Tensor
    items: torch.Tensor
    num_parts: int

    @classmethod
    def of(cls, cascade: Cascade, device: torch.device | str) -> DeviceCascade:
        """The arrays, copied one by one."""
        return cls.there([torch.from_numpy(array).to(device) for array in cascade.arrays], cascade.num_parts)

    @classmethod
    def there(cls, arrays: Sequence[torch.Tensor], num_parts: int) -> DeviceCascade:
        """Of `Cascade.arrays` that are on the device."""
        shared, parts, rows, items = arrays
        return cls(shared=shared, parts=parts, rows=rows, items=items, num_parts=num_parts)


class HostPlan:
    """A plan's arrays on the host, before they are copied; fields as in `PagedPlan`, and each token's position.

    Args:
        first_pages: `[C]`, where each table begins among pages that are on the device already; `pages` is empty then.

    Shapes: C chunks.
    """

    def __init__(
        self,
        starts: Sequence[int],
        lengths: Sequence[int],
        page_tables: Sequence[npt.NDArray[np.int32]],
        page_size: int,
        *,
        block_queries: int = PREFILL.queries,
        first_pages: npt.NDArray[np.int32] | None = None,
    ) -> None:
        starts_C = np.array(starts, dtype=np.int32)
        lengths_C = np.array(lengths, dtype=np.int32)
        ends_C = starts_C + lengths_C
        num_pages_C = -(-ends_C // page_size)
        first_rows_C = _before(lengths_C)
        counts = num_pages_C.tolist()
        if first_pages is None:
            tables = [table[:count] for table, count in zip(page_tables, counts, strict=True)]
            self.pages = np.concatenate(tables) if tables else np.empty(0, dtype=np.int32)
            first_pages_C = _before(num_pages_C)
        else:
            self.pages = np.empty(0, dtype=np.int32)
            first_pages_C = first_pages
        # Each token's place: how far it is into its sequence, and which of the pages that its chunk writes it is on.
        written_C = starts_C // page_size
        written = [
            table[first:count] for table, first, count in zip(page_tables, written_C.tolist(), counts, strict=True)
        ]
        positions_T = np.arange(lengths_C.sum(), dtype=np.int32) - np.repeat(first_rows_C - starts_C, lengths_C)
        first_written_C = _before(num_pages_C - written_C) - written_C
        pages_T = np.concatenate(written or [self.pages])[
            np.repeat(first_written_C, lengths_C) + positions_T // page_size
        ]
        self.write_slots = pages_T * np.int32(page_size) + positions_T % page_size
        is_single = lengths_C == 1
        self.single_rows = first_rows_C[is_single]
        self.single_pages = first_pages_C[is_single]
        self.single_lengths = ends_C[is_single]
        blocks = np.array(
            [
                (first_row + offset, min(block_queries, length - offset), start + offset, first_page, _NO_TREE, 0)
                for first_row, length, start, first_page in zip(
                    *(array[~is_single].tolist() for array in (first_rows_C, lengths_C, starts_C, first_pages_C)),
                    strict=True,
                )
                for offset in range(0, length, block_queries)
            ],
            dtype=np.int32,
        ).reshape(-1, 6)
        # What is left at the end is short when the longest come first.
        self.blocks = blocks[np.argsort(-blocks[:, 2], kind="stable")]
        self.positions = positions_T

    @property
    def most_queries(self) -> int:
        """Of a block."""
        return int(self.blocks[:, 1].max(initial=0))


def _before(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """How many come before each."""
    return (np.cumsum(counts) - counts).astype(np.int32)


def plant_trees(
    host: HostPlan, starts: Sequence[int], lengths: Sequence[int], ancestors: Sequence[Ancestors | None]
) -> npt.NDArray[np.int32]:
    """Enter the trees at the ends of chunks into a plan on the host; what the plan's `trees` are.

    Raises:
        InternalError: see `seen_in_tree`.
    """
    bits: list[npt.NDArray[np.int32]] = []
    num_tokens, first_row = 0, 0
    for start, length, tree in zip(starts, lengths, ancestors, strict=True):
        if tree is not None and length > 1:
            seen_in_tree(tree, length)
            host.positions[first_row : first_row + length] = chunk_positions(start, length, tree)
            first_place = start + length - len(tree)
            own = (host.blocks[:, 0] >= first_row) & (host.blocks[:, 0] < first_row + length)
            host.blocks[own, 4] = first_place
            host.blocks[own, 5] = num_tokens + host.blocks[own, 2] - first_place
            bits.append(np.ascontiguousarray(tree, dtype="<u8").view(np.int32).reshape(-1, 2))
            num_tokens += len(tree)
        first_row += length
    return np.concatenate(bits) if bits else np.empty((0, 2), dtype=np.int32)


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
    *,
    ancestors: Sequence[Ancestors | None] | None = None,
    groups: Sequence[PrefixGroup] = (),
    num_heads: int | None = None,
    prefill: Tile = PREFILL,
) -> PagedPlan:
    """As `sgl.kernels.attention.plan_attention`; the arrays are copied one by one.

    Args:
        groups: of rows of one token, read together.
        num_heads: query heads, which `groups` want; as many as key heads by default.
    """
    host = HostPlan(starts, lengths, page_tables, page_size, block_queries=prefill.queries)
    trees = None if ancestors is None else plant_trees(host, starts, lengths, ancestors)
    arrays = {name: torch.from_numpy(array).to(device) for name, array in vars(host).items()}
    cascade = None
    if groups:
        tile = rows_per_tile(num_heads or num_kv_heads, num_kv_heads)
        cascade = DeviceCascade.of(Cascade.of(groups, len(host.single_rows), tile, num_kv_heads), device)
    return PagedPlan(
        **arrays,
        num_splits=num_splits(len(host.single_rows), num_kv_heads),
        page_size=page_size,
        trees=None if trees is None or not len(trees) else torch.from_numpy(trees).to(device),
        cascade=cascade,
        prefill=prefill,
        most_queries=host.most_queries,
        fills_up=False,
    )


def paged_attention(
    query_THD: torch.Tensor,
    keys_SKD: torch.Tensor,
    values_SKD: torch.Tensor,
    plan: PagedPlan,
    scale: float,
    *,
    decode: Tile | None = None,
    shared: Tile | None = None,
    apart: bool = True,
) -> torch.Tensor:
    """Causal attention of every token of the step over its sequence's pages; `[T, H, D]`.

    Args:
        decode, shared: how the kernels cut their work, for measurements of other ways; by default `decode_tile` (`OWN`
            beside groups) and `shared_tile` of the rows of the step.
        apart: what groups read is joined by a kernel behind both, so that rows' own keys are read beside the groups';
            otherwise by the kernel of the rows, which waits for the groups.
    """
    out_THD = torch.zeros_like(query_THD) if plan.fills_up else torch.empty_like(query_THD)
    common = _Common(query_THD, keys_SKD, values_SKD, out_THD, plan, scale * _LOG2_E)
    if len(plan.single_rows):
        group = query_THD.shape[1] // keys_SKD.shape[1]
        rows, head_bytes = len(plan.single_rows), query_THD.shape[2] * query_THD.itemsize
        own = OWN if plan.cascade is not None else decode_tile(rows, head_bytes, plan.page_size)
        _attend_singles(common, decode or own, shared or shared_tile(rows, group), apart=apart)
    if len(plan.blocks):
        group = query_THD.shape[1] // keys_SKD.shape[1]
        most = triton.next_power_of_2(plan.most_queries)
        if most * group <= MOST_OF_RUN and plan.most_queries < plan.prefill.queries:
            _attend_runs(common, RUN, most)
        else:
            _attend_blocks(common, plan.prefill)
    return out_THD


def cascade_attention(
    query_THD: torch.Tensor, keys_SKD: torch.Tensor, values_SKD: torch.Tensor, plan: PagedPlan, scale: float
) -> torch.Tensor:
    """As `sgl.kernels.attention.cascade_attention`: the plan says what is read together."""
    return paged_attention(query_THD, keys_SKD, values_SKD, plan, scale)


class _Common(NamedTuple):
    """What all launches of a layer are given."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor
    plan: PagedPlan
    scale: float

    @property
    def shape(self) -> dict[str, Any]:
        """Sizes that the kernels are compiled for, and how they are launched."""
        _, H, D = self.query.shape
        return {
            "H": H,
            "G": H // self.keys.shape[1],
            "D": D,
            "PAGE": self.plan.page_size,
            "PRECISION": "ieee" if self.query.dtype == torch.float32 else "tf32",
            **chained(self.query.device),
        }

    def room(self, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for partial results, and for their largest scores and sums of weights."""
        _, H, D = self.query.shape
        device = self.query.device
        mixed = torch.empty(parts, H, D, dtype=torch.float32, device=device)
        return mixed, torch.empty(parts, H, 2, dtype=torch.float32, device=device)


def _attend_singles(common: _Common, decode: Tile, shared: Tile, *, apart: bool) -> None:
    query, keys, values, out, plan, scale = common
    H, K, D = query.shape[1], keys.shape[1], query.shape[2]
    shape, stride = common.shape, keys.stride(0)
    num_singles, splits, cascade = len(plan.single_rows), plan.num_splits, plan.cascade
    shared_partial, shared_sums = common.room(cascade.num_parts if cascade else 0)
    row_shared, row_parts = (cascade.shared, cascade.parts) if cascade else (plan.single_lengths, plan.single_lengths)
    if cascade:
        attend_groups[(len(cascade.items), K)](
            query, keys, values, shared_partial, shared_sums, plan.single_rows, plan.single_pages, plan.pages,
            cascade.rows, cascade.items, stride, scale, **shape,
            BLOCK_M=shared.queries, BLOCK_KEYS=shared.keys, num_warps=shared.warps, num_stages=shared.stages,
        )  # fmt: skip
    apart = splits > 1 or (apart and cascade is not None)
    partial, sums = common.room(num_singles * splits if apart else 0)
    attend_singles[(num_singles, K, splits)](
        query, keys, values, out, partial, sums, plan.single_rows, plan.single_pages, plan.single_lengths, plan.pages,
        row_shared, row_parts, shared_partial, shared_sums, stride, scale, **shape, SPLITS=splits,
        SHARED=cascade is not None, APART=apart, BLOCK_G=max(decode.queries, triton.next_power_of_2(H // K)),
        BLOCK_KEYS=decode.keys, num_warps=decode.warps, num_stages=decode.stages,
    )  # fmt: skip
    if apart:
        merge_splits[(num_singles, H)](
            partial, sums, out, plan.single_rows, plan.single_lengths, row_shared, row_parts, shared_partial,
            shared_sums, H=H, D=D, SPLITS=splits, SHARED=cascade is not None, BLOCK_KEYS=decode.keys,
            BLOCK_PARTS=_MERGED, num_warps=2, **chained(query.device),
        )  # fmt: skip


def _attend_blocks(common: _Common, tile: Tile) -> None:
    query, keys, values, out, plan, scale = common
    has_trees = plan.trees is not None
    attend_blocks[(len(plan.blocks), query.shape[1])](
        query, keys, values, out, plan.blocks, plan.pages, plan.trees if has_trees else plan.blocks, keys.stride(0),
        scale, **common.shape, HAS_TREES=has_trees,
        BLOCK_M=tile.queries, BLOCK_KEYS=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _attend_runs(common: _Common, tile: Tile, most: int) -> None:
    query, keys, values, out, plan, scale = common
    H, K, D = query.shape[1], keys.shape[1], query.shape[2]
    num_runs, has_trees = len(plan.blocks), plan.trees is not None
    splits = num_splits(num_runs, K)
    partial, sums = common.room(num_runs * splits * most if splits > 1 else 0)
    attend_runs[(num_runs, K, splits)](
        query, keys, values, out, partial, sums, plan.blocks, plan.pages, plan.trees if has_trees else plan.blocks,
        keys.stride(0), scale, **common.shape, QUERIES=most, SPLITS=splits, HAS_TREES=has_trees,
        BLOCK_M=max(tile.queries, triton.next_power_of_2(most * (H // K))), BLOCK_KEYS=tile.keys, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        merge_runs[(num_runs, most, H)](
            partial, sums, out, plan.blocks, H=H, D=D, QUERIES=most, SPLITS=splits, BLOCK_KEYS=tile.keys,
            BLOCK_PARTS=_MERGED, num_warps=2, **chained(query.device),
        )  # fmt: skip
