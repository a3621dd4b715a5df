"""Which rows of a decode step begin with the same pages, found from step to step at little cost.

Owns the search, what it remembers of the step before, and when reading together pays. Called by `gpu_steps.py`.
Pages are compared, not tokens: rows share what lies in one place, whoever put it there (forks, rows of a batch, prompts
that found each other in the tree). Rows of one group are those for which most reading is saved when each is in one
group at most; groups that save little are left out.

A page table grows in place, and a changed one is a new array (`page_table.py`). So two tables whose arrays are those
of the step before begin as they did, and a step in which no row came or went costs one look at each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl.kernels.prefix_groups import MAX_GROUPS, TILE_QUERIES, Cascade, PrefixGroup, most_items

Pages = npt.NDArray[np.int32]

MIN_SAVED_BYTES = 2**25
"""What a group must save in a layer: reading together costs a kernel and its partial results, some microseconds."""
STEADY_STEPS = 4
"""Steps in a row that read together before one is recorded for that."""


class SharedPrefixes:
    """Finds groups.

    Args:
        page_size: tokens of a page.
        min_saved: keys that a group must save to be one.

    Example:
        >>> tables = [np.array(pages, dtype=np.int32) for pages in ([1, 2, 3], [1, 2, 4], [7, 8], [1, 2, 5])]
        >>> SharedPrefixes(16, min_saved=10).groups(tables)
        (PrefixGroup(rows=(0, 1, 3), num_keys=32),)
    """

    def __init__(self, page_size: int, min_saved: int) -> None:
        self._page_size = page_size
        self._min_saved = min_saved
        self._arrays: list[Any] = []
        self._groups: tuple[PrefixGroup, ...] = ()
        self._common: dict[tuple[int, int], int] = {}
        self.searches = 0
        """How often the groups were looked for anew."""

    def groups(self, tables: Sequence[Pages]) -> tuple[PrefixGroup, ...]:
        """Groups among rows that read these pages, each of which has more than its whole pages to itself: the last
        page of a row that decodes is its own. The same object as before when nothing has changed."""
        arrays = [table if table.base is None else table.base for table in tables]
        before = self._arrays
        if len(arrays) != len(before) or any(map(_differ, arrays, before)):
            # The arrays are held, so that no other gets the number of one of them.
            held = {id(array) for array in arrays}
            self._common = {pair: n for pair, n in self._common.items() if pair[0] in held and pair[1] in held}
            self._arrays = arrays
            self._groups = self._find(tables)
            self.searches += 1
        return self._groups

    def _find(self, tables: Sequence[Pages]) -> tuple[PrefixGroup, ...]:
        found: list[PrefixGroup] = []
        for rows in _by_page(tables, range(len(tables)), 0):
            found.extend(self._best(tables, rows, 0)[1])
        found = [group for group in found if group.saved >= self._min_saved]
        return tuple(sorted(found, key=lambda group: -group.saved)[:MAX_GROUPS])

    def _best(self, tables: Sequence[Pages], rows: Sequence[int], known: int) -> tuple[int, list[PrefixGroup]]:
        """Keys saved, and the groups that save them, of rows that have the first `known` pages in common: all of them
        as one group, or those that go on alike as groups of their own."""
        if len(rows) < 2:
            return 0, []
        leader = rows[0]
        common = min(self._common_pages(tables, leader, row, known) for row in rows[1:])
        whole = PrefixGroup(tuple(rows), common * self._page_size)
        saved, parts = 0, list[PrefixGroup]()
        for each in _by_page(tables, rows, common):
            if len(each) < len(rows):
                more, inner = self._best(tables, each, common)
                saved, parts = saved + more, parts + inner
        return (saved, parts) if saved > whole.saved else (whole.saved, [whole])

    def _common_pages(self, tables: Sequence[Pages], one: int, other: int, known: int) -> int:
        pair = (id(self._arrays[one]), id(self._arrays[other]))
        if pair not in self._common:
            # The last page of each is being written, by its own sequence.
            length = min(len(tables[one]), len(tables[other])) - 1
            differing = tables[one][known:length] != tables[other][known:length]
            first = int(differing.argmax()) if length > known else 0
            is_different = length > known and bool(differing[first])
            self._common[pair] = known + first if is_different else max(known, length)
        return self._common[pair]


def _differ(one: Any, other: Any) -> bool:
    return one is not other


def _by_page(tables: Sequence[Pages], rows: Sequence[int], place: int) -> list[list[int]]:
    """Rows that have the same page at `place`, together; those that end before stand alone."""
    together: dict[int, list[int]] = {}
    for row in rows:
        page = int(tables[row][place]) if place < len(tables[row]) else -1 - row
        together.setdefault(page, []).append(row)
    return list(together.values())


class SharedReading:
    """What the rows of one step after another read together, as arrays for the kernels.

    Args:
        num_heads, num_kv_heads: of the model's attention.
        bytes_per_key: of one layer's keys and values, all heads.

    Example:
        >>> reading = SharedReading(1, num_heads=4, num_kv_heads=2, bytes_per_key=2**20)
        >>> tables = [np.array([*range(100), 100 + row], dtype=np.int32) for row in range(2)]
        >>> reading.of(tables).shared.tolist(), reading.of(tables[:1])
        ([100, 100], None)
    """

    def __init__(self, page_size: int, *, num_heads: int, num_kv_heads: int, bytes_per_key: int) -> None:
        self._finder = SharedPrefixes(page_size, max(1, MIN_SAVED_BYTES // bytes_per_key))
        self._num_kv_heads = num_kv_heads
        self.rows_per_tile = max(1, TILE_QUERIES // (num_heads // num_kv_heads))
        self._groups: tuple[PrefixGroup, ...] = ()
        self._cascade: Cascade | None = None
        self._lasted = 0

    def of(self, tables: Sequence[Pages]) -> Cascade | None:
        """For the rows of one token of a step, by the pages that each reads; `None` when reading together saves too
        little. The same object as before when nothing has changed."""
        groups = self._finder.groups(tables)
        if groups is not self._groups or (self._cascade and len(self._cascade.shared) != len(tables)):
            self._groups = groups
            self._cascade = Cascade.of(groups, len(tables), self.rows_per_tile, self._num_kv_heads) if groups else None
        self._lasted = self._lasted + 1 if groups else 0
        return self._cascade

    @property
    def lasts(self) -> bool:
        """Whether steps have read together for so long that it is worth to record one."""
        return self._lasted >= STEADY_STEPS

    def most_items(self, num_rows: int) -> int:
        """Items of a step of so many rows at most."""
        return most_items(num_rows, self.rows_per_tile, self._num_kv_heads)
