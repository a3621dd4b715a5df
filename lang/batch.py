"""Rows of one program: run beside each other, with their results as they are ready.

Owns `Batch`: how many rows are under way, what becomes of errors, progress, and the event stream of all rows. Bodies of
`def` programs run in a bounded pool of threads, those of `async def` programs as tasks on one event loop. A row is
started only while fewer than the bound are under way or wait to be looked at; how many sequences compute at the same
time is the engine's decision, by its own budget.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, cast

import msgspec

from sgl.errors import Cancelled, InvalidParameter, InvalidProgram
from sgl.lang.capture import waker
from sgl.lang.interpreter import Program
from sgl.lang.options import RunOptions
from sgl.lang.state import ProgramState
from sgl.lang.streams import EventReader, StreamEvent

if TYPE_CHECKING:
    from sgl.lang.function import SglFunction

R = TypeVar("R")
Row: TypeAlias = Mapping[str, Any] | Sequence[Any]

_WINDOW = 200
"""Rows that an iterator over a batch has under way, or ready and not yet looked at."""
_ASYNC_WINDOW = 1024
"""Rows of an async program that are under way: they cost no threads."""


@dataclass(frozen=True)
class RowResult(Generic[R]):
    """A row that has ended.

    Attributes:
        index: of the row.
        error: what it failed with, or `None`.
    """

    index: int
    ended: ProgramState[R] | None
    error: Exception | None = None

    @property
    def state(self) -> ProgramState[R]:
        """The row's state; raises what the row failed with."""
        if self.error is not None:
            raise self.error
        return cast("ProgramState[R]", self.ended)


def check_batch(on_result: object, on_error: object, num_threads: object) -> None:
    """Raise `InvalidParameter` for a wrong argument of a batch."""
    if on_result is not None and not callable(on_result):
        raise InvalidParameter(f"on_result is {on_result!r}; expected a function", param="on_result")
    if on_error not in ("raise", "return"):
        raise InvalidParameter(f"on_error is {on_error!r}; expected 'raise' or 'return'", param="on_error")
    if num_threads != "auto" and (isinstance(num_threads, bool) or not isinstance(num_threads, int) or num_threads < 1):
        raise InvalidParameter(f"num_threads is {num_threads!r}; expected 'auto' or >= 1", param="num_threads")


class Batch(Generic[R]):
    """Rows of one program that run while somebody iterates. Made by `SglFunction.batch`; can be iterated once.

    Example:
        >>> import sgl
        >>> @sgl.function
        ... def double(s, word):
        ...     s += word + sgl.gen("more")
        >>> batch = double.batch([["a"], ["b"]], backend=sgl.MockBackend(lambda prompt, node: prompt))
        >>> sorted(result.state.text() for result in batch), batch.num_done
        (['aa', 'bb'], 2)
    """

    def __init__(
        self,
        function: SglFunction[Any, R],
        rows: list[tuple[tuple[Any, ...], dict[str, Any]]],
        options: RunOptions,
        num_threads: int | Literal["auto"],
        on_result: Callable[[int, Any], None] | None,
    ) -> None:
        self._function = function
        self._rows = rows
        self._options = options
        threads = max(96, 16 * (os.cpu_count() or 1))
        auto = _ASYNC_WINDOW if function.is_async else threads
        self._most = min(auto if num_threads == "auto" else num_threads, max(1, len(rows)))
        self._on_result = on_result
        self._changed = threading.Condition()
        self._running: dict[int, Program] = {}
        self._ended: deque[RowResult[R]] = deque()
        self._fatal: BaseException | None = None  # an interrupt in a body
        self._num_started = 0
        self._num_unread = 0
        self._num_done = 0
        self._window = self._most
        self._stopped = False
        self._used = False
        self._threads: list[threading.Thread] = []
        self._listeners: set[Callable[[], None]] = set()
        self._opened: deque[tuple[int, Program]] | None = None  # programs whose events nobody reads yet
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_done(self) -> int:
        """Rows that have ended."""
        return self._num_done

    def cancel(self) -> None:
        """Stop the rows that run; those that have not begun never do."""
        with self._changed:
            self._stopped = True
            running = list(self._running.values())
            self._wake()
        for program in running:
            program.cancel()

    # --- running rows ---

    def _next_row(self) -> int | None:
        """The next row to start; `changed` is held. `None` while there is none to start."""
        if self._stopped or self._num_started == len(self._rows) or self._num_unread >= self._window:
            return None
        self._num_started += 1
        self._num_unread += 1
        return self._num_started - 1

    def _start_row(self, index: int) -> tuple[Program, ProgramState[R]]:
        program = self._options.row(index).start()
        with self._changed:
            if self._stopped:
                raise Cancelled(f"row {index} was not run: the batch was stopped")
            self._running[index] = program
            if self._opened is not None:
                self._opened.append((index, program))
            self._wake()
        return program, ProgramState(program)

    def _end_row(self, index: int, state: ProgramState[R] | None, error: BaseException | None) -> None:
        if error is not None:
            error.add_note(f"in row {index} of {len(self._rows)}")
        with self._changed:
            self._running.pop(index, None)
            if error is not None and not isinstance(error, Exception):
                self._fatal = error
            else:
                self._ended.append(RowResult(index, state, error))
            self._num_done += 1
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        for listener in tuple(self._listeners):
            listener()

    def _work(self) -> None:
        """A thread of the pool: rows of a `def` program, one after the other."""
        while True:
            with self._changed:
                while (index := self._next_row()) is None:
                    if self._stopped or self._num_started == len(self._rows):
                        return
                    self._changed.wait()
            state: ProgramState[R] | None = None
            try:
                program, state = self._start_row(index)
                self._function._run_here(program, state, self._rows[index])
                self._function._finish(program)
            except BaseException as error:  # noqa: BLE001 - it is the row's result
                self._end_row(index, state, error)
            else:
                self._end_row(index, state, None)

    async def _run_task(self, index: int) -> None:
        """One row of an `async def` program."""
        state: ProgramState[R] | None = None
        try:
            program, state = self._start_row(index)
            await self._function._run_to_end(program, state, self._rows[index])
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError)
            self._end_row(index, state, Cancelled(f"row {index} was cancelled") if cancelled else error)
            if cancelled:
                raise
        else:
            self._end_row(index, state, None)

    def _start_tasks(self) -> None:
        """Start what may be started, on the loop that runs here."""
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                index = self._next_row()
            if index is None:
                return
            task = loop.create_task(self._run_task(index))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self) -> None:
        """Rows of an `async def` program on a loop of their own, until all have ended or the batch is stopped."""
        wake, woken = waker()
        self._listeners.add(wake)
        try:
            while not self._stopped and self._num_done < len(self._rows):
                woken.clear()
                self._start_tasks()
                await woken.wait()
        finally:
            self._listeners.discard(wake)
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _open(self, window: int | None) -> None:
        """Begin. `window` bounds the rows that are ready and not yet looked at; `None` does not."""
        if self._used:
            raise InvalidProgram("a batch can be iterated once", hint="make another with program.batch(...)")
        self._used = True
        self._window = len(self._rows) if window is None else max(window, self._most)

    def _open_threads(self, window: int | None) -> None:
        self._open(window)
        if self._function.is_async:
            targets: list[Callable[[], None]] = [lambda: asyncio.run(self._serve())]
        else:
            targets = [self._work] * self._most
        for number, target in enumerate(targets):
            context = contextvars.copy_context()  # bodies see the caller's, as those of a run do
            thread = threading.Thread(target=context.run, args=(target,), name=f"sgl-batch-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _close(self) -> None:
        """The consumer is done, or has had enough."""
        if self._num_done < len(self._rows):
            self.cancel()
        for thread in self._threads:
            thread.join()

    def _take(self) -> RowResult[R] | None:
        """A result that is ready; `changed` is held."""
        if self._fatal is not None:
            raise self._fatal
        if not self._ended:
            return None
        self._num_unread -= 1
        self._wake()
        return self._ended.popleft()

    def _told(self, result: RowResult[R]) -> RowResult[R]:
        if self._on_result is not None:
            self._on_result(result.index, result.error if result.error is not None else result.ended)
        return result

    # --- for consumers ---

    def __iter__(self) -> Iterator[RowResult[R]]:
        """Results as rows end. What is left is cancelled when the iterator is closed."""
        yield from self._completed(_WINDOW)

    def _completed(self, window: int | None) -> Iterator[RowResult[R]]:
        self._open_threads(window)
        try:
            for _ in range(len(self._rows)):
                with self._changed:
                    while (result := self._take()) is None:
                        if self._stopped and not self._running:
                            return
                        self._changed.wait()
                yield self._told(result)
        finally:
            self._close()

    async def __aiter__(self) -> AsyncIterator[RowResult[R]]:
        """Results as rows end; `async def` bodies run as tasks of this event loop."""
        wake, woken = waker()
        self._listeners.add(wake)
        if self._function.is_async:
            self._open(_WINDOW)
        else:
            self._open_threads(_WINDOW)
        try:
            for _ in range(len(self._rows)):
                while True:
                    woken.clear()
                    if self._function.is_async:
                        self._start_tasks()
                    with self._changed:
                        result = self._take()
                    if result is not None or (self._stopped and not self._running):
                        break
                    await woken.wait()
                if result is None:
                    return
                yield self._told(result)
        finally:
            if self._num_done < len(self._rows):
                self.cancel()
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for thread in self._threads:
                await asyncio.to_thread(thread.join)

    def events(self) -> Iterator[StreamEvent]:
        """Everything that happens in all rows, as it happens; `row` says where.

        Raises:
            Exception: what a row failed with, after what came before it; the other rows are cancelled.
        """
        options = self._options
        self._options = replace(options, program=msgspec.structs.replace(options.program, stream=True))
        news = threading.Event()
        self._listeners.add(news.set)
        self._opened = deque()
        readers: list[tuple[int, EventReader]] = []
        num_told = 0
        self._open_threads(None)
        try:
            while True:
                news.clear()
                with self._changed:
                    ended = len(self._ended) == len(self._rows)
                    failed = self._fatal or next((result.error for result in self._ended if result.error), None)
                    opened = [self._opened.popleft() for _ in range(len(self._opened))]
                    over = list(islice(self._ended, num_told, None))
                    num_told += len(over)
                for index, program in opened:
                    program.listen(news.set, on=True)
                    readers.append((index, EventReader(program, None, flush=False)))
                events = [replace(event, row=index) for index, reader in readers for event in reader.ready()]
                yield from events
                for result in over:
                    self._told(result)
                if failed is not None:
                    raise failed
                if ended and not events:
                    return
                if not events:
                    news.wait()
        finally:
            self._close()

    # --- for run_batch ---

    def all(self, progress_bar: bool, on_error: str, stop_on_error: bool) -> list[Any]:
        """Every row's result, in order."""
        results: list[Any] = [None] * len(self._rows)
        first: Exception | None = None
        completed = self._completed(None)
        with _bar(len(self._rows), progress_bar) as advance:
            try:
                for result in completed:
                    advance()
                    results[result.index] = result.error if result.error is not None else result.ended
                    if result.error is not None and on_error == "raise":
                        first = first if first is not None else result.error
                        if stop_on_error:
                            raise first
            finally:
                completed.close()  # type: ignore[attr-defined]
        if first is not None:
            raise first
        return results

    def in_order(self, progress_bar: bool, on_error: str, stop_on_error: bool) -> Iterator[Any]:
        """Results in the order of the rows, with a bounded number of rows under way or waiting for one before them."""
        first: Exception | None = None
        completed = self._ordered()
        with _bar(len(self._rows), progress_bar) as advance:
            try:
                for result in completed:
                    advance()
                    if first is None and result.error is not None and on_error == "raise":
                        first = result.error
                        if stop_on_error:
                            raise first
                    if first is None:
                        yield result.error if result.error is not None else result.ended
            finally:
                completed.close()  # type: ignore[attr-defined]
        if first is not None:
            raise first

    def _ordered(self) -> Iterator[RowResult[R]]:
        """Results in the order of the rows; the window counts until a row's turn."""
        self._open_threads(_WINDOW)
        waiting: dict[int, RowResult[R]] = {}
        try:
            for index in range(len(self._rows)):
                with self._changed:
                    while index not in waiting:
                        if self._fatal is not None:
                            raise self._fatal
                        while self._ended:
                            result = self._ended.popleft()
                            waiting[result.index] = result
                        if index not in waiting:
                            self._changed.wait()
                    self._num_unread -= 1
                    self._wake()
                yield self._told(waiting.pop(index))
        finally:
            self._close()


class _bar:
    """A progress bar on standard error, or nothing."""

    def __init__(self, total: int, shown: bool) -> None:
        self._total = total
        self._shown = shown
        self._progress: Any = None

    def __enter__(self) -> Callable[[], None]:
        if not self._shown:
            return lambda: None
        from rich.console import Console
        from rich.progress import Progress

        self._progress = Progress(console=Console(stderr=True))
        self._progress.start()
        task = self._progress.add_task("rows", total=self._total)
        return lambda: self._progress.advance(task)

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
