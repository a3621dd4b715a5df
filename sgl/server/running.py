"""A program on the engine as asyncio sees it: its events in order, within bounds.

Owns `Running`, the one bridge between the engine's thread and the event loop. Every route that generates goes through
it, so that the same holds for all: a client that goes away cancels its program; one that does not read loses it once
the backlog is full, and memory stays bounded; an ending program is cancelled before its request is answered.

A `Running` is a context manager: leaving it cancels what still runs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from types import TracebackType

from sgl.errors import SglError, SlowReader
from sgl.lang.backend import Backend, Session
from sgl.lang.graph import DoneEvent, Event, FailedEvent, Graph, ProgramOptions


class Running:
    """One program that runs for one request.

    Args:
        backend: the engine.
        options: of the program.
        backlog: events that may wait for the reader.
        watch: sees every event as it comes.

    Example (inside a coroutine):
        with Running(engine, ProgramOptions(), 1024) as program:
            program.submit(graph, finish=True)
            async for event in program.events():
                ...
    """

    def __init__(
        self,
        backend: Backend,
        options: ProgramOptions,
        backlog: int,
        watch: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._backlog = backlog
        self._waiting: deque[Event] = deque()
        self._woken = asyncio.Event()
        self._watch = watch
        self._ended = False
        self._failure: SglError | None = None
        self._session: Session = backend.open(self._on_event, options)

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def submit(self, graph: Graph, *, finish: bool = True) -> None:
        """Send a whole program, or a fragment of it.

        Raises:
            SglError: it cannot be taken; nothing was started.
        """
        self._session.submit(graph, finish=finish)

    @property
    def session(self) -> Session:
        """The program on the engine."""
        return self._session

    def cancel(self) -> None:
        """Stop it, unless it has ended."""
        if not self._ended:
            self._ended = True
            self._session.cancel()

    def fail(self, error: SglError) -> None:
        """Stop it for a reason that its reader is told."""
        self._failure = self._failure or error
        self.cancel()
        self._woken.set()

    async def events(self, *, failures: bool = False) -> AsyncGenerator[Event, None]:
        """Its events as they come, `DoneEvent` last.

        Args:
            failures: a failure is an event, too, and the last one, instead of raised.

        Raises:
            SglError: it failed.
            SlowReader: events came faster than they were taken, for too long.
        """
        while True:
            while self._waiting:
                event = self._waiting.popleft()
                if isinstance(event, FailedEvent) and not failures:
                    raise SglError.from_info(event.error)
                yield event
                if isinstance(event, (DoneEvent, FailedEvent)):
                    return
            if self._failure is not None:
                if not failures:
                    raise self._failure
                yield FailedEvent(error=self._failure.to_info())
                return
            self._woken.clear()
            await self._woken.wait()

    def _on_event(self, event: Event) -> None:
        """On the engine's thread."""
        self._watch(event)
        try:
            self._loop.call_soon_threadsafe(self._take, event)
        except RuntimeError:  # the loop is closed: nobody reads any more
            return

    def _take(self, event: Event) -> None:
        if isinstance(event, (DoneEvent, FailedEvent)):
            self._ended = True
        elif len(self._waiting) >= self._backlog:
            self._waiting.clear()
            self.fail(
                SlowReader(
                    f"the reader of this stream is {self._backlog} events behind; its request was aborted",
                    hint="read faster, or raise --stream-backlog",
                )
            )
        if self._failure is None:
            self._waiting.append(event)
        self._woken.set()


async def merged(programs: Iterable[Running], *, failures: bool = False) -> AsyncGenerator[tuple[int, Event], None]:
    """Events of several programs as they come, each with the index of its program; ends when all are done.

    Args:
        failures: as for `Running.events`.

    Raises:
        SglError: of the first one that fails.
    """
    queue: asyncio.Queue[tuple[int, Event | None, BaseException | None]] = asyncio.Queue(1)

    async def pump(index: int, program: Running) -> None:
        try:
            async for event in program.events(failures=failures):
                await queue.put((index, event, None))
            await queue.put((index, None, None))
        except SglError as error:
            await queue.put((index, None, error))

    tasks = [asyncio.create_task(pump(index, program)) for index, program in enumerate(programs)]
    left = len(tasks)
    try:
        while left:
            index, event, error = await queue.get()
            if error is not None:
                raise error
            if event is None:
                left -= 1
            else:
                yield index, event
    finally:
        for task in tasks:
            task.cancel()
