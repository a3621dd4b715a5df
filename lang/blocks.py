"""`with` blocks of a program: turns, scopes, copies.

Owns `block`, the decorator behind them. None of them waits, so `async with` does what `with` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from functools import wraps
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Block(AbstractContextManager[T, None], AbstractAsyncContextManager[T, None], Generic[T]):
    """A context manager for `with` and for `async with`."""

    def __init__(self, inner: AbstractContextManager[T, bool | None]) -> None:
        self._inner = inner

    def __enter__(self) -> T:
        return self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inner.__exit__(kind, error, traceback)

    async def __aenter__(self) -> T:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)


def block(make: Callable[P, Iterator[T]]) -> Callable[P, Block[T]]:
    """A generator function with one `yield` as a `with` block.

    Example:
        >>> @block
        ... def doubled(number):
        ...     yield 2 * number
        >>> with doubled(2) as four:
        ...     print(four)
        4
    """
    managed = contextmanager(make)

    @wraps(make)
    def begin(*args: P.args, **kwargs: P.kwargs) -> Block[T]:
        return Block(managed(*args, **kwargs))

    return begin
