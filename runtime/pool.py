"""Pages of the KV cache as numbers.

Owns which pages are free. Does not own what a page holds (the radix tree and the sequences do) nor the memory itself
(the model runner does). Only `paging` calls it. A page that is freed twice, or was never handed out, raises
`InternalError` at once: a silent double free would let two sequences write one page.
"""

from __future__ import annotations

from collections.abc import Iterable

from sgl.errors import InternalError


class PagePool:
    """Free list over pages `0 .. num_pages - 1`.

    Example:
        >>> pool = PagePool(3)
        >>> pool.allocate(2), pool.num_free
        ([0, 1], 1)
        >>> pool.free([0]); pool.num_free
        2
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._used = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        """Pages that can be handed out."""
        return len(self._free)

    def allocate(self, num_pages: int) -> list[int]:
        """Hand out `num_pages` pages; the caller has made sure that they are there."""
        if num_pages > len(self._free):
            raise InternalError(f"allocation of {num_pages} pages with {len(self._free)} free")
        rest = len(self._free) - num_pages
        pages = self._free[rest:][::-1]
        del self._free[rest:]
        for page in pages:
            self._used[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Take pages back."""
        for page in pages:
            if not self._used[page]:
                raise InternalError(f"page {page} was freed while it was free")
            self._used[page] = 0
            self._free.append(page)
