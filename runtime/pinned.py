"""A pinned prefix, as who pinned it sees it.

Owns the handle that `Engine.pin` returns, and the asking for it (`sessions` asks without waiting). The pin itself lives
in the worker (`sgl.runtime.pins`) and ends with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress

from sgl.errors import EngineDead, InvalidParameter
from sgl.lang.graph import LONGEST_S, check_number, plain
from sgl.runtime.client import WorkerClient
from sgl.runtime.messages import Pin, Unpin


class PinnedPrefix:
    """A prefix that stays in the cache until `unpin`, the end of its lifetime, or that of a `with` block.

    Attributes:
        num_tokens: how many tokens are pinned: all of the prefix, less a last, partial page.
    """

    def __init__(self, client: WorkerClient, number: int, num_tokens: int) -> None:
        self._client = client
        self._number = number
        self.num_tokens = num_tokens

    def unpin(self) -> None:
        """Let the prefix go: it stays cached until its pages are needed. Idempotent."""
        with suppress(EngineDead):  # what died holds nothing
            self._client.send(Unpin(self._number))

    def __enter__(self) -> PinnedPrefix:
        return self

    def __exit__(self, *exception: object) -> None:
        self.unpin()


def pin(client: WorkerClient, prefix: str | Sequence[int], ttl_s: float | None, cache_salt: str) -> PinnedPrefix:
    """Ask the worker to pin, and wait until the prefix is computed (see `Engine.pin`)."""
    check_pin(ttl_s, cache_salt)
    if not isinstance(prefix, str):
        prefix = tuple(plain(id) for id in prefix) if isinstance(prefix, Iterable) else (None,)
        if any(type(id) is not int for id in prefix):
            raise InvalidParameter("prefix must be a string or a sequence of token ids", param="prefix")
    return request_pin(client, prefix, ttl_s, cache_salt).result()


def check_pin(ttl_s: float | None, cache_salt: str) -> None:
    """Raise `InvalidParameter` unless these are a lifetime and a salt."""
    if ttl_s is not None:
        check_number("ttl_s", ttl_s, low=0.0, high=LONGEST_S, open_low=True)
    if not isinstance(cache_salt, str):
        raise InvalidParameter(f"cache_salt is {cache_salt!r}; expected a string", param="cache_salt")


def request_pin(
    client: WorkerClient, prefix: str | tuple[int, ...], ttl_s: float | None, cache_salt: str
) -> Future[PinnedPrefix]:
    """Ask the worker to pin what was checked; the answer's future, which fails as `Engine.pin` raises."""
    numbers: list[int] = []
    answer: Future[PinnedPrefix] = Future()

    def message(number: int) -> Pin:
        numbers.append(number)
        return Pin(number, prefix, ttl_s, cache_salt)

    def answered(reply: Future[int]) -> None:
        if (error := reply.exception()) is not None:
            answer.set_exception(error)
        else:
            answer.set_result(PinnedPrefix(client, numbers[0], reply.result()))

    client.ask(message).add_done_callback(answered)
    return answer
