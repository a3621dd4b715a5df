"""A program on the engine as asyncio sees it: its events in order, within bounds.

Owns `Running`, the one bridge between the engine's thread and the event loop. Every route that generates goes through
it, so that the same holds for all: a client that goes away cancels its program; one that does not read loses it once
the backlog is full, and memory stays bounded; an ending program is cancelled before its request is answered. What an
encoder computes has no events, and is a `Computation`.

A `Running` is a context manager: leaving it cancels what still runs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

from sgl.errors import SglError, SlowReader
from sgl.lang.backend import Backend, Session
from sgl.lang.graph import DoneEvent, Event, FailedEvent, Graph, ProgramOptions
from sgl.runtime.failures import internal_error

T = TypeVar("T")


class Computation(Generic[T]):
    """Work that has a result and no events, and begins at once."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._task = asyncio.ensure_future(work)
        self._failure: SglError | None = None

    def fail(self, error: SglError) -> None:
        """Stop it for a reason that whoever waits for it is told."""
        self._failure = self._failure or error
        self._task.cancel()

    async def result(self) -> T:
        """What came of it, or the reason why it was stopped. Who is cancelled while waiting here cancels it."""
        try:
            return await self._task
        except asyncio.CancelledError:
            if self._failure is None:
                raise
            raise self._failure from None


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
        self._mailbox = _Mailbox.of(asyncio.get_running_loop())
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

    def submit_apart(self, graph: Graph) -> None:
        """Send a whole program that is large, on a thread; what is wrong with it is a failure of the program."""
        loop = asyncio.get_running_loop()

        def send() -> None:
            try:
                self._session.submit(graph, finish=True)
            except SglError as error:
                loop.call_soon_threadsafe(self.fail, error)
            except Exception as error:  # noqa: BLE001 - nobody else would hear of it, and the reader would wait
                loop.call_soon_threadsafe(self.fail, internal_error("the program could not be sent", error))

        loop.run_in_executor(None, send)

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
            while (event := self.take(failures=failures)) is not None:
                yield event
                if isinstance(event, (DoneEvent, FailedEvent)):
                    return
            self._woken.clear()
            await self._woken.wait()

    def take(self, *, failures: bool = False) -> Event | None:
        """The next event, if it has come; raises as `events`."""
        if self._waiting:
            event = self._waiting.popleft()
            if isinstance(event, FailedEvent) and not failures:
                raise SglError.from_info(event.error)
            return event
        if self._failure is None:
            return None
        if not failures:
            raise self._failure
        return FailedEvent(error=self._failure.to_info())

    def wake(self, woken: asyncio.Event) -> None:
        """Let `woken` be set when there is something to take, in place of the event behind `events`."""
        self._woken = woken

    def _on_event(self, event: Event) -> None:
        """On the engine's thread."""
        self._watch(event)
        self._mailbox.put(self, event)

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
    left = dict(enumerate(programs))
    woken = asyncio.Event()
    for program in left.values():
        program.wake(woken)
    while left:
        is_idle = True
        for index, program in tuple(left.items()):
            while (event := program.take(failures=failures)) is not None:
                is_idle = False
                yield index, event
                if isinstance(event, (DoneEvent, FailedEvent)):
                    del left[index]
                    break
        if is_idle:  # nothing was yielded since the first look, so nothing came meanwhile
            woken.clear()
            await woken.wait()


class _Mailbox:
    """Takes events from the engine's thread to a loop: one wake-up for all that came since the last one.

    A step of the engine has an event for each of its sequences; waking the loop for each would cost a system call and a
    turn of the loop for each.
    """

    _of: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox]] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self._waiting: deque[tuple[Running, Event]] = deque()
        self._is_called = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Mailbox:
        """That of a loop."""
        return cls._of.setdefault(loop, _Mailbox(loop))

    def put(self, program: Running, event: Event) -> None:
        """On the engine's thread."""
        self._waiting.append((program, event))
        loop = self._loop()
        if self._is_called or loop is None:
            return
        self._is_called = True
        try:
            loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed: nobody reads any more
            self._waiting.clear()

    def _deliver(self) -> None:
        self._is_called = False  # first: who puts something now calls again
        while self._waiting:
            program, event = self._waiting.popleft()
            program._take(event)
