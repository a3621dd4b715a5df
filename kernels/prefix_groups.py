"""Rows of a decode step that begin with the same pages, and how their prefix is cut into work for a GPU.

Owns `PrefixGroup` and `Cascade`. `sgl.runtime.shared_prefixes` finds the groups; a plan carries what is made of them
here. Attention of a group reads its prefix once, for all of its rows together, and each row's own keys as ever; the
parts are joined by their sums of weights (cascade attention, Ye et al. 2024; Hydragen, Juravsky et al. 2024). A row is
in one group at most, and always has a key of its own behind the prefix. No torch here.

Shapes: B rows of one token, N items, R rows that are in groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

MULTIPROCESSORS = 132
"""Programs that the items of a step, times key heads, should fill in one go: those of a large device."""
BLOCK_KEYS = 64
"""Parts of a prefix are multiples of so many keys."""
MIN_PART = 2 * BLOCK_KEYS
TILE_QUERIES = 128
"""Queries that a program takes together: heads that share a key head, times rows."""
MAX_GROUPS = 8
"""Groups of a step, those that save most."""


@dataclass(frozen=True)
class PrefixGroup:
    """Rows whose contexts begin alike.

    Attributes:
        rows: which rows of one token of the step, in its order of them.
        num_keys: how many keys they have in common at the beginning, whole pages.
    """

    rows: tuple[int, ...]
    num_keys: int

    @property
    def saved(self) -> int:
        """Keys that need not be read because the prefix is read once.

        Example:
            >>> PrefixGroup((0, 2, 5), 100).saved
            200
        """
        return (len(self.rows) - 1) * self.num_keys


@dataclass(frozen=True)
class Cascade:
    """The groups of a step as arrays for a kernel. A tile is some rows of one group, an item one part of a tile's keys;
    an item leaves a part of a result for each of its rows.

    Attributes:
        shared: `[B]`, keys of each row that its group reads.
        parts: `[B, 3]`, where a row's first part is, how far apart they are, and how many.
        rows: `[R]`, the rows of all tiles, one tile after another.
        items: `[N, 6]`, where the item's rows begin in `rows`, how many they are, the row whose pages are read, first
            and last key, and where its parts go. One without rows is there to fill up.
        num_parts: parts of all items.
        num_saved: keys that rows need not read for themselves.
    """

    shared: Ids
    parts: Ids
    rows: Ids
    items: Ids
    num_parts: int
    num_saved: int

    @property
    def arrays(self) -> tuple[Ids, Ids, Ids, Ids]:
        """`shared`, `parts`, `rows` and `items`."""
        return self.shared, self.parts, self.rows, self.items

    @classmethod
    def of(cls, groups: Sequence[PrefixGroup], num_rows: int, rows_per_tile: int, num_kv_heads: int) -> Cascade:
        """The arrays for groups among `num_rows` rows of one token.

        Example:
            >>> cascade = Cascade.of([PrefixGroup((0, 2, 3), 256)], 4, rows_per_tile=2, num_kv_heads=33)
            >>> cascade.shared.tolist(), cascade.rows.tolist(), cascade.num_parts
            ([256, 0, 256, 256], [0, 2, 3], 6)
            >>> cascade.items.tolist()
            [[0, 2, 0, 0, 128, 0], [0, 2, 0, 128, 256, 2], [2, 1, 3, 0, 128, 4], [2, 1, 3, 128, 256, 5]]
            >>> cascade.parts.tolist()
            [[0, 2, 2], [0, 0, 0], [1, 2, 2], [4, 1, 2]]
        """
        share = _share(groups, rows_per_tile, max(1, MULTIPROCESSORS // num_kv_heads))
        shared = np.zeros(num_rows, dtype=np.int32)
        parts = np.zeros((num_rows, 3), dtype=np.int32)
        rows: list[int] = []
        items: list[tuple[int, ...]] = []
        num_parts = 0
        for group in groups:
            for first in range(0, len(group.rows), rows_per_tile):
                tile = list(group.rows[first : first + rows_per_tile])
                begins = range(0, group.num_keys, share)
                shared[tile] = group.num_keys
                parts[tile, 0] = np.arange(num_parts, num_parts + len(tile))
                parts[tile, 1:] = len(tile), len(begins)
                for begin in begins:
                    end = min(begin + share, group.num_keys)
                    items.append((len(rows), len(tile), tile[0], begin, end, num_parts))
                    num_parts += len(tile)
                rows.extend(tile)
        return cls(
            shared=shared,
            parts=parts,
            rows=np.array(rows, dtype=np.int32),
            items=np.array(items, dtype=np.int32).reshape(-1, 6),
            num_parts=num_parts,
            num_saved=sum(group.saved for group in groups),
        )


def most_items(num_rows: int, rows_per_tile: int, num_kv_heads: int, max_groups: int = MAX_GROUPS) -> int:
    """Items that the groups of a step of `num_rows` rows have at most, when they are no more than `max_groups`.

    Example:
        >>> most_items(64, rows_per_tile=32, num_kv_heads=8)
        26
    """
    return max(1, MULTIPROCESSORS // num_kv_heads) + num_rows // rows_per_tile + max_groups


def _share(groups: Sequence[PrefixGroup], rows_per_tile: int, wanted: int) -> int:
    """Keys of an item: as few as give no more than `wanted` items, so that all run at once and end together."""
    tiles = [-(-len(group.rows) // rows_per_tile) for group in groups]
    keys = sum(count * group.num_keys for count, group in zip(tiles, groups, strict=True))
    longest = max((group.num_keys for group in groups), default=1)
    share = max(MIN_PART, -(-keys // (wanted * BLOCK_KEYS)) * BLOCK_KEYS)

    def items(share: int) -> int:
        return sum(count * -(-group.num_keys // share) for count, group in zip(tiles, groups, strict=True))

    while share < longest and items(share) > wanted:
        share += BLOCK_KEYS
    return share
