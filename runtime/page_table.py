"""The pages of one sequence, in order.

Owns the array that a plan hands to the model as a chunk's page table. `paging` makes, grows and cuts one for each
sequence. A `view` stays what it was when it was taken: tables grow behind it, and everything else that changes one
begins a new array. So a step costs what it adds, not a copy of every running sequence's table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]


class PageTable:
    """Page numbers, int32.

    Example:
        >>> table = PageTable([4, 7])
        >>> before = table.view
        >>> table.extend([9])
        >>> table.cut(1).tolist(), table.view.tolist(), before.tolist()
        ([7, 9], [4], [4, 7])
    """

    __slots__ = ("_array", "_length")

    def __init__(self, pages: Sequence[int] | Pages = ()) -> None:
        self._array: Pages = np.array(pages, dtype=np.int32)
        self._length = len(pages)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return int(self.view[index])

    @property
    def view(self) -> Pages:
        """All pages, without copying them."""
        return self._array[: self._length]

    def extend(self, pages: Sequence[int] | Pages) -> None:
        """Add pages at the end."""
        length = self._length + len(pages)
        if length > len(self._array):
            grown = np.empty(max(length, 2 * len(self._array), 16), dtype=np.int32)
            grown[: self._length] = self.view
            self._array = grown
        self._array[self._length : length] = pages
        self._length = length

    def cut(self, length: int) -> Pages:
        """Keep the first `length` pages; the others."""
        rest = self.view[length:]
        if len(rest):
            self._array = self._array[:length].copy()
            self._length = length
        return rest

    def replace(self, first: int, pages: Pages) -> None:
        """Put `pages` in the place of those from `first` on, as many."""
        last = first + len(pages)
        if not np.array_equal(self._array[first:last], pages):
            self._array = self._array.copy()
            self._array[first:last] = pages
