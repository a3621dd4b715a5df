"""A read that is to be awaited, in `async def` programs.

Owns `Pending`, and `Nothing` for what does not wait. A `Pending` is a coroutine, so tasks and `gather` take it; used as
if it were the value it raises, with the program's line, where a bare coroutine would be false, unequal, or text that
nobody meant.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from sgl.errors import InvalidProgram
from sgl.lang.capture import user_location

T_co = TypeVar("T_co", covariant=True)


class Nothing:
    """What may be awaited, and is done."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, None]:
        yield from ()


class Pending(Coroutine[Any, Any, T_co]):
    """The value of `what`, once it is awaited.

    Example:
        >>> async def value():
        ...     return 3
        >>> pending = Pending(value(), "s['x']")
        >>> try:
        ...     pending == 3
        ... except InvalidProgram as error:
        ...     print(error.message)
        s['x'] has to be awaited before a comparison
    """

    __slots__ = ("_inner", "_what")

    def __init__(self, inner: Coroutine[Any, Any, T_co], what: str) -> None:
        self._inner = inner
        self._what = what

    def __await__(self) -> Generator[Any, Any, T_co]:
        return self._inner.__await__()

    def send(self, value: Any) -> Any:
        """As of a coroutine."""
        return self._inner.send(value)

    def throw(self, typ: Any, val: BaseException | object = None, tb: TracebackType | None = None) -> Any:
        """As of a coroutine."""
        return self._inner.throw(typ) if val is None else self._inner.throw(typ, val, tb)

    def close(self) -> None:
        """As of a coroutine."""
        self._inner.close()

    def refuse(self, does: str) -> NoReturn:
        """Raise: it was used as if it were its value."""
        self._inner.close()
        raise InvalidProgram(
            f"{self._what} has to be awaited before {does}", hint=f"write await {self._what}", location=user_location()
        )

    def __repr__(self) -> str:
        return f"<pending {self._what}>"

    __hash__ = object.__hash__

    def __str__(self) -> str:
        self.refuse("it is text")

    def __format__(self, spec: str) -> str:
        self.refuse("it is text")

    def __bool__(self) -> bool:
        self.refuse("an if")

    def __eq__(self, other: object) -> bool:
        self.refuse("a comparison")

    def __lt__(self, other: object) -> bool:
        self.refuse("a comparison")

    __le__ = __gt__ = __ge__ = __lt__

    def __add__(self, other: object) -> Any:
        self.refuse("it is added")

    __radd__ = __add__

    def __getitem__(self, key: object) -> Any:
        self.refuse("a part of it is taken")

    def __iter__(self) -> Any:
        self.refuse("a loop over it")

    def __len__(self) -> int:
        self.refuse("its length is taken")
