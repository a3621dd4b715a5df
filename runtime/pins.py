"""Prefixes that stay in the cache because somebody said so.

Owns the pins of an engine: their ids, their expiry, and the budget (`max_pinned_tokens`) that they share. The scheduler
makes one of these and tells it which requests ended; the core expires them. A pin whose prefix is not cached computes
it first, as a request like any other; it counts against the budget from the start. Whole pages are pinned, so with a
page size above 1 the tokens of a last, partial page are not.

What is pinned is locked in the tree and never evicted. So that nothing waits for room that will never be there, a pin
that would leave too little for a live request is refused, and requests are admitted by what pins leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from sgl.errors import Cancelled, ErrorInfo, InvalidParameter, PinBudgetExceeded, SglError
from sgl.runtime.cache_key import CacheKey
from sgl.runtime.paging import Paging
from sgl.runtime.radix import RadixNode
from sgl.runtime.sequence import Request

Done = Callable[[int, SglError | None], None]
"""Called once, with the number of tokens that are pinned, or with why none are."""


class Queue(Protocol):
    """What pins ask of the scheduler."""

    def add(self, request: Request) -> None:
        """Queue a request; raises when it is refused."""

    def abort(self, requests: Iterable[Request]) -> None:
        """Take requests out."""

    def largest_need(self) -> int:
        """Pages that the largest live request needs, alone."""


class _Pin:
    """One pinned prefix; `node` stands once it is computed, `request` until then."""

    __slots__ = ("done", "expires_at", "namespace", "node", "num_pages", "request", "token_ids")

    def __init__(self, namespace: CacheKey, token_ids: list[int], expires_at: float, done: Done) -> None:
        self.namespace = namespace
        self.token_ids = token_ids
        self.expires_at = expires_at
        self.done: Done | None = done
        self.num_pages = 0  # reserved while it is not computed
        self.node: RadixNode | None = None
        self.request: Request | None = None


class Pins:
    """The pinned prefixes.

    Args:
        paging: holds the pages.
        queue: the scheduler.
        max_tokens: the budget.
        num_pages: of the pool.
    """

    def __init__(self, paging: Paging, queue: Queue, *, max_tokens: int, num_pages: int) -> None:
        self._paging = paging
        self._queue = queue
        self._max_tokens = max_tokens
        self._num_pages = num_pages
        self._pins: dict[int, _Pin] = {}
        self._by_sequence: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_pages(self) -> int:
        """Pages that are pinned, or reserved for a pin that is being computed."""
        return self._paging.tree.num_pinned + sum(pin.num_pages for pin in self._pins.values())

    def shared_pages(self, namespace: CacheKey, token_ids: list[int]) -> int:
        """Pinned pages at the beginning of `token_ids`."""
        return self._paging.tree.pinned_pages(namespace, np.array(token_ids, dtype=np.int32))

    def pin(self, id: int, namespace: CacheKey, token_ids: list[int], done: Done, expires_at: float = math.inf) -> None:
        """Pin a prefix; `done` is called when it is computed.

        Raises:
            InvalidParameter: less than a page.
            PinBudgetExceeded: over the budget, or no room would be left for a request that is queued or runs.
            PromptTooLong, NeverFits, QueueFull: it cannot be computed.
        """
        page_size = self._paging.page_size
        if len(token_ids) < page_size:
            raise InvalidParameter(
                f"the prefix has {len(token_ids)} tokens, less than one page of {page_size}",
                hint="pin a longer prefix, or use a smaller page_size",
                param="prefix",
            )
        needed = len(token_ids) // page_size - self.shared_pages(namespace, token_ids)
        pinned = self.num_pages
        most = min(self._max_tokens // page_size, self._num_pages - self._queue.largest_need())
        if pinned + needed > most:
            raise PinBudgetExceeded(
                f"{needed * page_size} tokens cannot be pinned beside the {pinned * page_size} that are: at most "
                f"{most * page_size} may be now (max_pinned_tokens is {self._max_tokens})",
                hint="unpin something, pin a shorter prefix, or raise max_pinned_tokens",
                needed_tokens=needed * page_size,
                pinned_tokens=pinned * page_size,
                max_pinned_tokens=self._max_tokens,
            )
        pin = _Pin(namespace, token_ids, expires_at, done)
        self._compute(id, pin)
        pin.num_pages = needed
        self._pins[id] = pin

    def unpin(self, id: int) -> None:
        """Let a prefix go: it stays cached until its pages are needed. Unknown and expired pins are no error."""
        pin = self._pins.pop(id, None)
        if pin is None:
            return
        if pin.node is not None:
            self._paging.tree.unpin(pin.node)
        if pin.request is not None:
            del self._by_sequence[pin.request.sequence.id]
            self._queue.abort([pin.request])
            self._paging.release(pin.request.sequence)
        if pin.done is not None:
            pin.done(0, Cancelled("the prefix was unpinned before it was computed"))

    def expire(self, now: float) -> None:
        """Let go of the pins whose time is over."""
        for id in [id for id, pin in self._pins.items() if pin.expires_at <= now]:
            self.unpin(id)

    def next_expiry(self) -> float:
        """When the next pin expires; infinite when none does."""
        return min((pin.expires_at for pin in self._pins.values()), default=math.inf)

    def ended(self, request: Request) -> None:
        """A request ended; if it computed a pin's prefix, that is pinned now."""
        id = self._by_sequence.pop(request.sequence.id, None)
        if id is None:
            return
        pin, sequence = self._pins[id], request.sequence
        pin.request, pin.num_pages = None, 0
        error: SglError | None = None
        if request.failed is not None:
            error = SglError.from_info(ErrorInfo(code=request.failed[0], message=request.failed[1]))
        elif sequence.num_computed < request.prompt_len:
            error = Cancelled("the prefix was not computed to its end")
        if error is None and sequence.node is not None:
            pin.node = sequence.node
            self._paging.tree.pin(pin.node)
        elif error is not None:
            del self._pins[id]
        self._paging.release(sequence)
        if pin.done is not None:
            pin.done(pin.node.end if pin.node is not None else 0, error)
            pin.done = None

    def lose(self, *, unpin: bool) -> None:
        """The pages are about to be dropped. `unpin` is False when the tree itself goes."""
        for pin in self._pins.values():
            if pin.node is not None and unpin:
                self._paging.tree.unpin(pin.node)
            pin.num_pages += len(pin.token_ids) // self._paging.page_size if pin.node is not None else 0
            pin.node = None

    def recompute(self) -> None:
        """Queue what was lost again. A pin that cannot be queued is gone."""
        for id, pin in list(self._pins.items()):
            if pin.request is None:
                try:
                    self._compute(id, pin)
                except SglError:
                    del self._pins[id]

    def _compute(self, id: int, pin: _Pin) -> None:
        sequence = self._paging.new(pin.namespace, pin.token_ids)
        request = Request(sequence)
        try:
            self._queue.add(request)
        except SglError:
            self._paging.release(sequence)
            raise
        pin.request = request
        self._by_sequence[sequence.id] = id
