"""What a client may ask of the cache itself: to forget it, and to keep a prefix.

Owns the flushes that wait for an idle engine, and the translation of a pin's text and lifetime. The core makes one and
calls `tick` in every step; the worker passes messages on to it. Every answer goes to the `done` given with the
question, exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from sgl.errors import EmptyPrompt, EngineBusy, InvalidParameter, SglError, Unsupported
from sgl.runtime.cache_key import CacheKey
from sgl.runtime.scheduler import Scheduler
from sgl.runtime.text.tokenizer import Piece, Tokenizer

Done = Callable[[int, SglError | None], None]
"""Gets a number (pages, or tokens), or why there is none."""


class CacheControl:
    """Flushes and pins.

    Args:
        scheduler: owns the pages.
        tokenizer: encodes the text of pins.
        now: seconds of the engine's clock.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer, now: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._now = now
        self._flushes: list[tuple[float, Done]] = []

    def flush(self, wait_s: float, done: Done) -> None:
        """Drop every cached page that no live state and no pin holds; `done` gets how many there were.

        While requests run or wait, what they share would go as well as what nobody needs, so a busy engine refuses
        with `EngineBusy`: at once, or when it was never idle for `wait_s` seconds.
        """
        self._flushes.append((self._now() + wait_s, done))
        self._answer(self._now())

    def pin(self, id: int, prefix: str | Sequence[int], ttl_s: float | None, salt: str, done: Done) -> None:
        """Compute a prefix unless it is cached, and keep it until `unpin(id)`, or for `ttl_s` seconds from now."""
        try:
            if self._scheduler.config.disable_radix_cache:
                raise Unsupported(
                    "disable_radix_cache is set: no program would ever find a pinned prefix",
                    hint="start the engine without it",
                )
            ids = self._tokenizer.encode_pieces([Piece(prefix)]) if isinstance(prefix, str) else list(prefix)
            if not ids:
                raise EmptyPrompt("the prefix is empty", hint="pin some text, or at least one token id")
            last = self._tokenizer.vocab_size - 1
            if min(ids) < 0 or max(ids) > last:
                raise InvalidParameter(f"a token id is outside of 0 to {last}, this model's vocabulary", param="prefix")
            expires_at = math.inf if ttl_s is None else self._now() + ttl_s
            self._scheduler.pins.pin(id, CacheKey(salt=salt), ids, done, expires_at)
        except SglError as error:
            done(0, error)

    def unpin(self, id: int) -> None:
        """Let a prefix go. Unknown and expired ones are no error."""
        self._scheduler.pins.unpin(id)

    def tick(self) -> None:
        """Do what time, or an engine that became idle, asks for."""
        now = self._now()
        self._scheduler.pins.expire(now)
        self._answer(now)

    def next_deadline(self) -> float:
        """When `tick` has something to do though nothing else happens; infinite when never."""
        return min(self._scheduler.pins.next_expiry(), *(deadline for deadline, _ in self._flushes), math.inf)

    def _answer(self, now: float) -> None:
        """Answer the flushes whose time has come."""
        if not self._flushes:
            return
        if not self._scheduler.has_work:
            waiting, self._flushes = self._flushes, []
            for _, done in waiting:
                done(self._scheduler.flush(), None)
            return
        late = [done for deadline, done in self._flushes if deadline <= now]
        self._flushes = [(deadline, done) for deadline, done in self._flushes if deadline > now]
        for done in late:
            done(0, busy(self._scheduler))


def busy(scheduler: Scheduler) -> EngineBusy:
    """Why the cache of a busy engine is not flushed."""
    running, waiting = len(scheduler.running), len(scheduler.waiting)
    return EngineBusy(
        f"the cache cannot be flushed while {running} requests run and {waiting} wait",
        hint="wait for them, or give wait_s to let the engine wait",
        num_running=running,
        num_waiting=waiting,
    )
