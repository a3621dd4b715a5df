"""One running program: buffers nodes, submits them as fragments, and keeps what comes back.

Owns the session with the backend, what is buffered for it, and everything that waits. States append to it; nothing is
sent until a value is needed (`wait`, `read_state`) or the body ends (`finish`). A fragment is everything that was
buffered on all branches since the last one (`fragments`).

Events arrive on a thread of the backend and only fill captures and wake waiters, which block (`wait`) or await
(`wait_async`). Every wait ends: by its value, by the program's failure (raised with the line of the program), by its
deadline, or by its end. Thread-safe.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import msgspec

from sgl.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidProgram,
    SglError,
    SourceLocation,
    StateLost,
)
from sgl.lang.backend import Backend, Session
from sgl.lang.capture import Capture as Capture
from sgl.lang.capture import UnknownName as UnknownName
from sgl.lang.capture import user_location as user_location
from sgl.lang.capture import waker
from sgl.lang.fragments import Buffered, Fragments
from sgl.lang.graph import (
    MAIN_BRANCH,
    DeltaEvent,
    DoneEvent,
    Event,
    FailedEvent,
    HandlesEvent,
    JoinedEvent,
    Node,
    ProgramOptions,
    Sampling,
    StateText,
    TextEvent,
    ValueEvent,
)
from sgl.lang.record import RunRecord

DEADLINE_GRACE_S = 2.0
"""How long after its deadline a program waits for the backend to say so, before it says so itself."""


class Program:
    """A program while it runs, and what is left of it afterwards.

    Args:
        backend: executes it; opened at the first submission.
        options: of the whole program.
        sampling: what holds for generations that say nothing else.
        seed: of the whole program; each generation without a seed has one derived from it and from its place.
        key: under what its record is found as the last one; none without it.
    """

    def __init__(
        self,
        backend: Backend,
        options: ProgramOptions,
        sampling: Sampling,
        seed: int | None = None,
        key: str | None = None,
    ) -> None:
        self.options = options
        self.sampling = sampling
        self.seed = seed
        self.started_at = time.monotonic()
        self.changed = threading.Condition()
        self.body_open = False  # a body runs beside whoever started it
        self.body_thread: int | None = None
        self.body_task: asyncio.Task[None] | None = None
        self.returned: Any = None  # by the body
        self.body_error: BaseException | None = None
        self.version = 0  # counts wake-ups, so that a reader of streams misses none
        self.record = RunRecord(options.name, backend, key)
        self.stream: list[tuple[float, Event]] = []  # with the time since the start; of streaming programs only
        self.backend = backend
        self._session: Session | None = None
        self._submitting = threading.RLock()
        self._buffer: list[Buffered] = []
        self._fragments = Fragments()
        self._next_branch = MAIN_BRANCH + 1
        self._next_unnamed = 0
        self._finished = False
        self._cancelled = False
        self._failed: FailedEvent | None = None
        self._fault: SglError | None = None
        self._done: DoneEvent | None = None
        self._listeners: set[Callable[[], None]] = set()
        self._waiters: dict[Capture, list[Callable[[], None]]] = {}

    # --- building ---

    def append(self, node: Node, capture: Capture | None = None) -> None:
        """Buffer a node; its id is given at submission.

        Raises:
            SglError: the program has failed, or ended.
        """
        with self.changed:
            self._raise_if_failed(node.location)
            if self._finished:
                raise InvalidProgram(
                    "the program has ended; nothing can be appended",
                    hint="append inside its body",
                    location=node.location,
                )
            self._buffer.append((node, capture))

    def new_branches(self, num: int) -> tuple[int, ...]:
        """Numbers for the children of a fork."""
        with self.changed:
            first = self._next_branch
            self._next_branch += num
        return tuple(range(first, first + num))

    def unnamed(self) -> str:
        """A key for a generation without a name."""
        with self.changed:
            self._next_unnamed += 1
            return f"_{self._next_unnamed}"

    def abandon(self, branch: int) -> None:
        """The branch is used no more: it is released with the next fragment. Safe in a finalizer: takes no lock."""
        self._fragments.abandon(branch)

    # --- submitting ---

    def flush(self, *, finish: bool = False) -> None:
        """Submit what is buffered; with `finish`, nothing follows and the state is released.

        Raises:
            SglError: it could not be submitted. The program has failed: every later read raises the same.
            InternalError: the backend raised something that is not an `SglError`; that is its cause.
        """
        with self._submitting:
            try:
                with self.changed:
                    if self._failed is not None or self._fault is not None or self._finished or self._cancelled:
                        self._finished = self._finished or finish
                        return
                    buffered, self._buffer = self._buffer, []
                    if not buffered and not finish:
                        return
                    graph = self._fragments.make(buffered, finish=finish)
                    self._finished = finish
                session = self._session
                if session is None:
                    session = self.backend.open(self._on_event, self._options_left())
                    self._session = session
                self.record.sent(graph.nodes)
                session.submit(graph, finish=finish)
            except BaseException as error:
                self._submission_failed(error)
                raise
            with self.changed:
                self._fragments.submitted()
                cancelled = self.cancelled
            if cancelled:
                session.cancel()

    def _options_left(self) -> ProgramOptions:
        """The options as they are now: a body that took its time has less of it left."""
        left = self._time_left()
        if left is not None and left <= 0:
            raise self._late()
        return self.options if left is None else msgspec.structs.replace(self.options, deadline_s=left)

    def _time_left(self) -> float | None:
        if self.options.deadline_s is None:
            return None
        return self.started_at + self.options.deadline_s - time.monotonic()

    def _submission_failed(self, error: BaseException) -> None:
        """What was buffered is lost, so no read may wait for it: the program has failed."""
        if isinstance(error, SglError):
            fault = error
        elif isinstance(error, Exception):
            fault = InternalError(
                f"the backend could not take program {self.options.name!r}: {type(error).__name__}: {error}",
                hint="see the cause",
            )
        else:  # an interrupt, on its way out
            fault = _cancelled(self.options.name)
        with self.changed:
            self._fault = self._fault or fault
            session = self._session
            self._wake()
        if session is not None:
            session.cancel()
        if isinstance(fault, InternalError) and fault is not error:
            raise fault from error

    def cancel(self) -> None:
        """Stop the program on the backend; waits end with `Cancelled`. No effect after its end."""
        with self.changed:
            if self._done is not None:
                return
            self._cancelled = True
            session = self._session
            if session is None and self._done is None:
                self._fault = self._fault or _cancelled(self.options.name)
            self._wake()
        if session is not None:
            session.cancel()

    # --- events ---

    def _on_event(self, event: Event) -> None:
        with self.changed:
            self.record.came(event)
            if self.options.stream and not isinstance(event, HandlesEvent):
                self.stream.append((time.monotonic() - self.started_at, event))
            match event:
                case ValueEvent():
                    capture = self._fragments.take_value(event)
                    for wake in self._waiters.pop(capture, ()) if capture is not None else ():
                        wake()
                case JoinedEvent():
                    self._fragments.passed(event.node)
                case TextEvent() | DeltaEvent():
                    pass
                case HandlesEvent():
                    self._fragments.take_handles(event)
                case FailedEvent():
                    self._failed = event
                case DoneEvent():
                    self._done = event
            self._wake()

    def _wake(self) -> None:
        self.version += 1
        self.changed.notify_all()
        for listener in tuple(self._listeners):
            listener()
        if self._waiters and (self.ended or self._cancelled):
            waiting, self._waiters = self._waiters, {}
            for wake in (wake for wakes in waiting.values() for wake in wakes):
                wake()

    def listen(self, listener: Callable[[], None], *, on: bool) -> None:
        """Call `listener` (which must not block) at every event, or no more."""
        with self.changed:
            (self._listeners.add if on else self._listeners.discard)(listener)

    # --- waiting ---

    @property
    def ended(self) -> bool:
        """Nothing more will come."""
        return self._failed is not None or self._fault is not None or self._done is not None

    @property
    def done(self) -> DoneEvent | None:
        """The end of a program that succeeded."""
        return self._done

    @property
    def cancelled(self) -> bool:
        """`cancel` was called."""
        return self._cancelled

    @property
    def closing(self) -> bool:
        """The body has ended: everything is submitted."""
        return self._finished

    @property
    def body_running(self) -> bool:
        """The body runs somewhere else: on another thread than the caller's, or as a task."""
        return self.body_open and not self.in_body

    @property
    def in_body(self) -> bool:
        """The caller is the body, running on a thread of its own."""
        return self.body_thread is not None and self.body_thread == threading.get_ident()

    def location(self, node: int) -> SourceLocation | None:
        """The program line that made a node."""
        return self._fragments.location(node)

    def raise_if_failed(self, location: SourceLocation | None = None) -> None:
        """Raise what went wrong, if anything did: an error of the backend, or of the body on its thread."""
        with self.changed:
            self._raise_if_failed(location)

    def _raise_if_failed(self, location: SourceLocation | None = None) -> None:
        if self.body_error is not None and self.body_thread != threading.get_ident():
            raise self.body_error
        if self._fault is not None:
            raise self._fault
        if self._failed is not None:
            # A new object each time: tracebacks of several readers do not mix.
            error = SglError.from_info(self._failed.error)
            if isinstance(error, DeadlineExceeded):
                error = self._late()  # the backend knows what was left of the deadline when the program was opened
            node = self._failed.node
            if node is not None:
                error.add_note(f"in program {self.options.name!r}, node {node} on branch {self._failed.branch}")
            raise error.at(self.location(node) if node is not None else location)

    def wait_for(self, ready: Callable[[], bool], location: SourceLocation | None = None) -> None:
        """Wait until `ready()`; raises what ends the program before that."""
        with self.changed:
            while not ready():
                self._raise_if_failed(location)
                if self._done is not None and not self.body_running:
                    raise StateLost("the program ended without that value", location=location)
                self.sleep()

    def sleep(self) -> None:
        """Until the next event or wake-up; `changed` is held. Ctrl-C in here is also the end of the program."""
        left = self._time_left()
        try:
            self.changed.wait(None if left is None else max(0.0, left) + DEADLINE_GRACE_S)
        except BaseException:
            self.cancel()
            raise
        self._check_deadline(DEADLINE_GRACE_S)

    def _check_deadline(self, grace_s: float) -> None:
        """Fail the program once its deadline is over and nobody else has done so. `changed` is held."""
        left = self._time_left()
        if left is None or left + grace_s > 0 or self.ended:
            return
        self._fault = self._late()
        self.cancel()

    def _late(self) -> SglError:
        return DeadlineExceeded(
            f"program {self.options.name!r} ran longer than its deadline of {self.options.deadline_s} s",
            hint="raise deadline_s, or generate less",
        )

    def wait(self, captures: Iterable[Capture]) -> None:
        """Wait until all of them are there; submits what is buffered if they need that."""
        for capture in captures:
            if capture.event is None:
                if capture.node is None:
                    self.flush()
                self.wait_for(lambda capture=capture: capture.event is not None, capture.location)  # type: ignore[misc]

    async def wait_async(self, captures: Iterable[Capture]) -> None:
        """`wait` without a thread that waits. What tasks appended side by side is submitted as one fragment."""
        missing = [capture for capture in captures if capture.event is None]
        if any(capture.node is None for capture in missing):
            await asyncio.sleep(0)  # let the tasks that are ready append what they have
            self.flush()
        for capture in missing:
            while capture.event is None:
                await self._woken(capture)

    async def wait_for_async(self, ready: Callable[[], bool]) -> None:
        """`wait_for` without a thread that waits."""
        wake, woken = waker()
        self.listen(wake, on=True)
        try:
            while True:
                woken.clear()
                with self.changed:
                    if ready():
                        return
                    self._raise_if_failed()
                    if self._done is not None and not self.body_open:
                        raise StateLost("the program ended without that value")
                await self.in_time(woken)
        finally:
            self.listen(wake, on=False)

    async def _woken(self, capture: Capture) -> None:
        """Until something happened that may have filled a capture; raises what ends the program before that."""
        wake, woken = waker()
        with self.changed:
            if capture.event is not None:
                return
            self._raise_if_failed(capture.location)
            if self._done is not None:
                raise StateLost("the program ended without that value", location=capture.location)
            self._waiters.setdefault(capture, []).append(wake)
        try:
            await self.in_time(woken)
        finally:
            with self.changed:
                wakes = self._waiters.get(capture, [])
                if wake in wakes:
                    wakes.remove(wake)

    async def in_time(self, woken: asyncio.Event) -> None:
        """Wait for `woken`, or for the deadline."""
        left = self._time_left()
        try:
            async with asyncio.timeout(None if left is None else max(0.0, left) + DEADLINE_GRACE_S):
                await woken.wait()
        except TimeoutError:
            with self.changed:
                self._check_deadline(DEADLINE_GRACE_S)

    async def wait_end_async(self) -> None:
        """`wait_end` for asyncio."""
        await self.wait_for_async(lambda: self._done is not None)

    def wait_end(self) -> None:
        """Wait until the program has ended; raises if it failed."""
        self.wait_for(lambda: self._done is not None)

    def read_state(self, branch: int) -> StateText:
        """The text and ids of a branch after everything appended so far."""
        future = self._ask_state(branch)
        with self.changed:
            while not future.done() and not self.ended:
                self.sleep()
        return self._answered(future, branch)

    async def read_state_async(self, branch: int) -> StateText:
        """`read_state` for asyncio."""
        future = self._ask_state(branch)
        wake, woken = waker()
        self.listen(wake, on=True)
        try:
            while not future.done() and not self.ended:
                woken.clear()
                if not future.done():
                    await self.in_time(woken)
        finally:
            self.listen(wake, on=False)
        return self._answered(future, branch)

    def _ask_state(self, branch: int) -> Future[StateText]:
        self.flush()
        self.raise_if_failed()
        if self._session is None:
            empty: Future[StateText] = Future()
            empty.set_result(StateText(""))
            return empty
        if self._done is not None:
            raise StateLost(
                f"branch {branch} is released with the end of its program",
                hint="read its text inside the body, before the join",
            )
        future: Future[StateText] = self._session.read_state(branch)
        future.add_done_callback(self._on_read)
        return future

    def _answered(self, future: Future[StateText], branch: int) -> StateText:
        if not future.done():
            self.raise_if_failed()
            raise StateLost(f"branch {branch} was released before its text was read")
        error = future.exception()
        if error is not None:
            self.raise_if_failed()
            raise error
        return future.result()

    def end_body(self) -> None:
        """The body that ran beside whoever started it has ended."""
        with self.changed:
            self.body_open = False
            self.body_thread = None
            self._wake()

    def notify(self) -> None:
        """Wake everyone who waits: a name was captured, or the body ended."""
        with self.changed:
            self._wake()

    def _on_read(self, _future: Future[Any]) -> None:
        with self.changed:
            self._wake()


def _cancelled(name: str) -> SglError:
    return Cancelled(f"program {name!r} was cancelled")
