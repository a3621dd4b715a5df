"""`@function`, and what type checkers make of it.

Owns the decorator with its overloads: a plain function or a method, `def` or `async def`, with options or without. What
it makes is a `function.SglFunction` in each case.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from sgl.lang.async_state import AsyncProgramState
from sgl.lang.function import SglFunction
from sgl.lang.state import ProgramState

P = ParamSpec("P")
R = TypeVar("R")

if TYPE_CHECKING:

    class SglMethod(Generic[P, R]):
        """What type checkers see of `@function` on a method."""

        def __get__(self, instance: Any, owner: type | None = None) -> SglFunction[P, R]: ...

    class _Decorator:
        """What `@function(...)` with options gives: for type checkers, `function` itself."""

        @overload
        def __call__(
            self, func: Callable[Concatenate[AsyncProgramState, P], Coroutine[Any, Any, R]]
        ) -> SglFunction[P, R]: ...
        @overload
        def __call__(self, func: Callable[Concatenate[ProgramState[Any], P], R]) -> SglFunction[P, R]: ...
        @overload
        def __call__(
            self, func: Callable[Concatenate[Any, AsyncProgramState, P], Coroutine[Any, Any, R]]
        ) -> SglMethod[P, R]: ...
        @overload
        def __call__(self, func: Callable[Concatenate[Any, ProgramState[Any], P], R]) -> SglMethod[P, R]: ...
        def __call__(self, func: Callable[..., Any]) -> Any: ...


@overload
def function(
    func: Callable[Concatenate[AsyncProgramState, P], Coroutine[Any, Any, R]], num_api_spec_tokens: int | None = None
) -> SglFunction[P, R]: ...
@overload
def function(
    func: Callable[Concatenate[ProgramState[Any], P], R], num_api_spec_tokens: int | None = None
) -> SglFunction[P, R]: ...
@overload
def function(
    func: Callable[Concatenate[Any, AsyncProgramState, P], Coroutine[Any, Any, R]],
    num_api_spec_tokens: int | None = None,
) -> SglMethod[P, R]: ...
@overload
def function(
    func: Callable[Concatenate[Any, ProgramState[Any], P], R], num_api_spec_tokens: int | None = None
) -> SglMethod[P, R]: ...
@overload
def function(func: None = None, num_api_spec_tokens: int | None = None) -> _Decorator: ...
def function(func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None) -> Any:
    """Make a program of a function whose first parameter (after `self`, in a class) is the prompt state.

    Of an `async def`, reads of values are awaited: `await s["x"]`. Annotate the state (`s: sgl.ProgramState`, or
    `sgl.AsyncProgramState`) and type checkers know the program's arguments and what it returns.

    Raises:
        InvalidParameter: the function has no parameter.

    Example:
        >>> import sgl
        >>> @sgl.function
        ... def hello(s, name):
        ...     s += f"Hello {name}, " + sgl.gen("rest")
        >>> hello.run("Ada", backend=sgl.MockBackend(["nice to meet you."])).text()
        'Hello Ada, nice to meet you.'
    """
    if func is None:
        return lambda func: SglFunction(func, num_api_spec_tokens)
    return SglFunction(func, num_api_spec_tokens)
