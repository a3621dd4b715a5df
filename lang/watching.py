"""Seeing the runs that other code makes: what `sgl explain FILE` does with a program file.

Owns a process-wide observer of every way to run a program. While one is set, each call from outside of a program is
handed to it instead; what programs run inside of it goes its way.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sgl.errors import InvalidProgram
from sgl.lang.compile import CompiledProgram
from sgl.lang.function import SglFunction


@dataclass(frozen=True)
class Call:
    """A run that is about to be made.

    Attributes:
        function: the program.
        rows: the program's arguments, as `explain(rows=)` takes them.
        options: the arguments that `run` or `run_batch` takes for itself.
        go: makes the run; options given to it replace those of the call.
        way: the method that was called: `run`, `run_async` (whose `go` gives an awaitable), `start_async`, `run_batch`
            or `batch`.
    """

    function: SglFunction[..., Any]
    rows: list[Any]
    options: dict[str, Any]
    go: Callable[..., Any]
    way: str = "run"


Observer = Callable[[Call], Any]

_OPTIONS = frozenset(
    name
    for name, p in inspect.signature(SglFunction.run).parameters.items()
    if p.kind is inspect.Parameter.KEYWORD_ONLY
)


_WATCHED = ("run", "run_async", "start_async", "run_batch", "batch")
_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("sgl_watched", default=False)
"""A run is being looked at here: what programs run inside of it goes its way."""


@contextmanager
def watching(observer: Observer) -> Iterator[None]:
    """Hand every run to `observer`, whose result is the run's.

    Runs of compiled programs are refused meanwhile: their functions are what can be explained.

    Example:
        >>> import sgl
        >>> @sgl.function
        ... def hello(s, name):
        ...     s += "Hello " + name + sgl.gen("rest")
        >>> with watching(lambda call: (call.rows, sorted(call.options))):
        ...     hello.run("Ada", temperature=0)
        ([{'name': 'Ada'}], ['temperature'])
    """
    ways = {name: getattr(SglFunction, name) for name in _WATCHED}
    compiled = {name: getattr(CompiledProgram, name) for name in ("run", "run_batch")}
    for name, way in ways.items():
        setattr(SglFunction, name, _watched(name, way, observer))
    for name in compiled:
        setattr(CompiledProgram, name, _refused)
    try:
        yield
    finally:
        for name, way in ways.items():
            setattr(SglFunction, name, way)
        for name, way in compiled.items():
            setattr(CompiledProgram, name, way)


def _watched(name: str, way: Callable[..., Any], observer: Observer) -> Callable[..., Any]:
    """One of the ways to run a program, under observation."""

    def call_of(function: SglFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        if name in ("run_batch", "batch"):
            (rows,) = args or (kwargs.pop("batch_kwargs", None) or kwargs.pop("rows", None),)
            rows = list(rows)
            return Call(function, rows, kwargs, lambda **more: way(function, rows, **{**kwargs, **more}), name)
        options = {key: kwargs.pop(key) for key in list(kwargs) if key in _OPTIONS}
        row = {**dict(zip(function.arg_names, args, strict=False)), **kwargs}
        return Call(
            function, [row], options, lambda **more: way(function, *args, **kwargs, **{**options, **more}), name
        )

    def looked(function: SglFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        token = _inside.set(True)
        try:
            return observer(call_of(function, args, kwargs))
        finally:
            _inside.reset(token)

    @functools.wraps(way)
    def watched(self: SglFunction[..., Any], *args: Any, **kwargs: Any) -> Any:
        return way(self, *args, **kwargs) if _inside.get() else looked(self, args, kwargs)

    @functools.wraps(way)
    async def watched_async(self: SglFunction[..., Any], *args: Any, **kwargs: Any) -> Any:
        if _inside.get():
            return await way(self, *args, **kwargs)
        result = looked(self, args, kwargs)
        if not inspect.isawaitable(result):
            return result
        token = _inside.set(True)
        try:
            return await result
        finally:
            _inside.reset(token)

    return watched_async if name == "run_async" else watched


def _refused(self: CompiledProgram, *args: Any, **kwargs: Any) -> Any:
    raise InvalidProgram(
        f"{self.name!r} is compiled; its runs are not explained", hint="explain the function that it was compiled from"
    )
