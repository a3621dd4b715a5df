"""The page tables of sequences, kept on the device: a step sends what is new in them.

Owns which part of one array on the device each sequence's table has, and how much of it is there. Asked once per step
by `gpu_steps.py`, which sends the entries that are missing together with the step's other integers. A decoding step of
256 rows and 1,024 pages each sends 256 entries, not a quarter of a million.

A table that grew is told from one that changed by its array (`page_table.py`: tables grow behind a view, and everything
else begins a new array); the array is held here, so that no other can be taken for it, and of a changed table only what
lies behind the first difference is sent. Parts are given one after another, with room to grow; when the end is reached,
all are given anew, to the tables of the step at hand. What is written to a part follows, on the device, whatever still
reads what was there before.

Imports no torch. Shapes: C chunks, U new entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sgl.runtime.plan import Chunk

Ids = npt.NDArray[np.int32]

_ROOM = 64
"""Entries that a part has beyond its table, at least; a quarter of a long table's."""


class Placed(NamedTuple):
    """Where a step's tables lie.

    Attributes:
        first: `[C]`, where each begins.
        targets, values: `[U]`, entries to write before the step reads.
    """

    first: Ids
    targets: Ids
    values: Ids


class _Part:
    """Of the array: the table's own array, where it lies, how much of it is there, and what it has room for."""

    __slots__ = ("array", "first", "length", "room")

    def __init__(self, array: Ids, first: int, room: int) -> None:
        self.array = array
        self.first = first
        self.length = 0
        self.room = room

    def take(self, array: Ids, table: Ids) -> None:
        """The sequence has another table now: what it has in common with the one before is there, as when the pages of
        wrong guesses were cut off."""
        both = min(self.length, len(table))
        differing = np.flatnonzero(self.array[:both] != table[:both])
        self.array = array
        self.length = int(differing[0]) if len(differing) else both


class DevicePages:
    """Parts of an array of `size` entries.

    Example:
        >>> chunk = Chunk(sequence=1, token_ids=[5], start=2, page_table=np.array([7, 8, 9], dtype=np.int32))
        >>> pages = DevicePages(1000)
        >>> [array.tolist() for array in pages.place([chunk], [3])]
        [[0], [0, 1, 2], [7, 8, 9]]
        >>> len(pages.place([chunk], [3]).targets)
        0
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.forget()

    def forget(self) -> None:
        """Nothing is there: a step that should have written it has failed."""
        self._parts: dict[int, _Part] = {}
        self._end = 0

    def place(self, chunks: Sequence[Chunk], counts: Sequence[int]) -> Placed | None:
        """Where the first `counts` pages of each chunk's table are once the entries are written; `None` when there is
        no room for all of them together."""
        placed = self._placed(chunks, counts)
        if placed is None:
            self.forget()
            placed = self._placed(chunks, counts)
            if placed is None:
                self.forget()
        return placed

    def _placed(self, chunks: Sequence[Chunk], counts: Sequence[int]) -> Placed | None:
        """As `place`; `None` when the end is reached, and the parts are to be given anew."""
        parts = self._parts
        first: list[int] = []
        targets: list[int] = []  # of tables that have one new entry, as while they decode
        values: list[int] = []
        grown: list[tuple[int, Ids]] = []
        for chunk, count in zip(chunks, counts, strict=True):
            table = chunk.page_table
            array = table if table.base is None else table.base
            part = parts.get(chunk.sequence)
            if part is not None and part.array is not array and count <= part.room:
                part.take(array, table[:count])
            elif part is None or count > part.room:
                room = count + max(_ROOM, count // 4)
                if self._end + room > self._size:
                    return None
                part = parts[chunk.sequence] = _Part(array, self._end, room)
                self._end += room
            known = part.length
            if count == known + 1:
                targets.append(part.first + known)
                values.append(table.item(known))
                part.length = count
            elif count > known:
                grown.append((part.first + known, table[known:count]))
                part.length = count
            first.append(part.first)
        return Placed(np.array(first, dtype=np.int32), *_joined(targets, values, grown))


def _joined(targets: list[int], values: list[int], grown: list[tuple[int, Ids]]) -> tuple[Ids, Ids]:
    """All new entries, where they go and what they are."""
    single = np.array(targets, dtype=np.int32), np.array(values, dtype=np.int32)
    if not grown:
        return single
    ranges = [np.arange(first, first + len(pages), dtype=np.int32) for first, pages in grown]
    return np.concatenate([single[0], *ranges]), np.concatenate([single[1], *(pages for _, pages in grown)])
