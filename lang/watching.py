"""Seeing the runs that other code makes: what `sgl explain FILE` does with a program file.

Owns a process-wide observer of `SglFunction.run` and `run_batch`. While one is set, each call from outside of a
program is handed to it instead; what programs run inside of it goes its way.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sgl.lang.function import SglFunction


@dataclass(frozen=True)
class Call:
    """A run that is about to be made.

    Attributes:
        function: the program.
        rows: the program's arguments, as `explain(rows=)` takes them.
        options: the arguments that `run` or `run_batch` takes for itself.
        go: makes the run; options given to it replace those of the call.
    """

    function: SglFunction[..., Any]
    rows: list[Any]
    options: dict[str, Any]
    go: Callable[..., Any]


Observer = Callable[[Call], Any]

_OPTIONS = frozenset(
    name
    for name, p in inspect.signature(SglFunction.run).parameters.items()
    if p.kind is inspect.Parameter.KEYWORD_ONLY
)


@contextmanager
def watching(observer: Observer) -> Iterator[None]:
    """Hand every run to `observer`, whose result is the run's.

    Example:
        >>> import sgl
        >>> @sgl.function
        ... def hello(s, name):
        ...     s += "Hello " + name + sgl.gen("rest")
        >>> with watching(lambda call: (call.rows, sorted(call.options))):
        ...     hello.run("Ada", temperature=0)
        ([{'name': 'Ada'}], ['temperature'])
    """
    run, run_batch = SglFunction.run, SglFunction.run_batch
    busy = threading.Event()

    def seen(call: Call) -> Any:
        busy.set()
        try:
            return observer(call)
        finally:
            busy.clear()

    @functools.wraps(run)
    def watched_run(self: SglFunction[..., Any], *args: Any, **kwargs: Any) -> Any:
        if busy.is_set():
            return run(self, *args, **kwargs)
        options = {name: kwargs.pop(name) for name in list(kwargs) if name in _OPTIONS}
        row = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        return seen(Call(self, [row], options, lambda **changed: run(self, *args, **kwargs, **{**options, **changed})))

    @functools.wraps(run_batch)
    def watched_batch(self: SglFunction[..., Any], batch_kwargs: Any, **options: Any) -> Any:
        if busy.is_set():
            return run_batch(self, batch_kwargs, **options)
        rows = list(batch_kwargs)
        return seen(Call(self, rows, options, lambda **changed: run_batch(self, rows, **{**options, **changed})))

    SglFunction.run, SglFunction.run_batch = watched_run, watched_batch  # type: ignore[method-assign]
    try:
        yield
    finally:
        SglFunction.run, SglFunction.run_batch = run, run_batch  # type: ignore[method-assign]
