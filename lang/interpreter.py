"""One running program: buffers nodes, submits them as fragments, and keeps what comes back.

Owns the session with the backend, the numbering of nodes and branches, and the captures. `ProgramState` appends to it;
nothing is sent until a value is needed (`wait`, `read_text`) or the body ends (`finish`). A fragment is everything that
was buffered on all branches since the last one.

Events arrive on a thread of the backend and only fill captures and wake waiters. Every wait ends: by its value, by the
program's failure (raised with the line of the program), or by its end. Thread-safe.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any, cast

import msgspec

from sgl.errors import Cancelled, InternalError, InvalidProgram, SglError, SourceLocation, StateLost
from sgl.lang.backend import Backend, Session
from sgl.lang.graph import (
    MAIN_BRANCH,
    DeltaEvent,
    DoneEvent,
    Event,
    FailedEvent,
    Fork,
    Gen,
    Graph,
    HandlesEvent,
    JoinedEvent,
    Node,
    ProgramOptions,
    Release,
    Sampling,
    Select,
    StateHandle,
    StateText,
    TextEvent,
    ValueEvent,
    validate,
)
from sgl.lang.passes import liveness, merge_text

_OURS = ("sgl.lang.", "contextlib")
"""Modules whose frames are not the program: this room, and what runs its context managers."""


def user_location() -> SourceLocation | None:
    """The innermost line on this thread's stack that is not of this room."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_OURS):
            return SourceLocation(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


class UnknownName(InvalidProgram, KeyError):
    """A name that nothing captured; also a `KeyError`. On the wire it is `InvalidProgram`."""

    __str__ = InvalidProgram.__str__


class Capture:
    """A value that a generation or select will have. Filled once, by the event of its node."""

    __slots__ = ("branch", "dtype", "event", "is_json", "location", "name", "node")

    def __init__(self, name: str, branch: int, location: SourceLocation | None, dtype: str | None, is_json: bool):
        self.name = name
        self.branch = branch
        self.location = location
        self.dtype = dtype
        self.is_json = is_json
        self.node: int | None = None
        self.event: ValueEvent | None = None


class Program:
    """A program while it runs, and what is left of it afterwards.

    Args:
        backend: executes it; opened at the first submission.
        options: of the whole program.
        sampling: what holds for generations that say nothing else.
    """

    def __init__(self, backend: Backend, options: ProgramOptions, sampling: Sampling) -> None:
        self.options = options
        self.sampling = sampling
        self.changed = threading.Condition()
        self.body_thread: int | None = None
        self.body_error: BaseException | None = None
        self.version = 0  # counts wake-ups, so that a reader of streams misses none
        self.stream: list[TextEvent | DeltaEvent] = []
        self._backend = backend
        self._session: Session | None = None
        self._submitting = threading.RLock()
        self._buffer: list[tuple[Node, Capture | None]] = []
        self._captures: dict[int, Capture] = {}  # by node, until their event
        self._locations: dict[int, SourceLocation | None] = {}
        self._next_node = 0
        self._next_branch = MAIN_BRANCH + 1
        self._next_unnamed = 0
        self._live: set[int] = {MAIN_BRANCH}  # on the backend, after everything submitted
        self._abandoned: deque[int] = deque()  # filled by finalizers, at any moment
        self._dead: set[int] = set()  # used no more, not yet released
        self._handles: dict[int, StateHandle] = {}
        self._fragment_start = 0
        self._confirmed = False  # the backend is known to have the latest fragment
        self._finished = False
        self._cancelled = False
        self._failed: FailedEvent | None = None
        self._fault: SglError | None = None
        self._done: DoneEvent | None = None
        self._listeners: set[Callable[[], None]] = set()

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
        self._abandoned.append(branch)

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
                    graph, live = self._fragment(buffered, finish)
                    self._finished = finish
                session = self._session
                if session is None:
                    session = self._backend.open(self._on_event, self.options)
                    self._session = session
                session.submit(graph, finish=finish)
            except BaseException as error:
                self._submission_failed(error)
                raise
            with self.changed:
                self._live = live
                cancelled = self.cancelled
            if cancelled:
                session.cancel()

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

    def _fragment(self, buffered: list[tuple[Node, Capture | None]], finish: bool) -> tuple[Graph, set[int]]:
        nodes = [msgspec.structs.replace(node, id=self._next_node + i) for i, (node, _) in enumerate(buffered)]
        born = {child for node in nodes if isinstance(node, Fork) for child in node.children}
        present = self._live | born
        released = {node.branch for node in nodes if isinstance(node, Release)}
        while self._abandoned:
            self._dead.add(self._abandoned.popleft())
        # At the end every branch is dead, but its pages may go before the others are done.
        dead = (present - {MAIN_BRANCH} if finish and nodes else self._dead & present) - released
        self._dead -= dead | released
        graph = liveness(merge_text(Graph(nodes=tuple(nodes))), dead)
        if nodes and graph.nodes and graph.nodes[0].id != self._next_node:
            raise InvalidProgram("internal numbering of nodes is broken")
        captures = iter([capture for _, capture in buffered if capture is not None])
        for node in graph.nodes:
            self._locations[node.id] = node.location
            if isinstance(node, (Gen, Select)):
                capture = next(captures)
                capture.node = node.id
                self._captures[node.id] = capture
        touched = {node.branch for node in graph.nodes}
        handles = tuple(self._handles.pop(branch) for branch in sorted(touched & set(self._handles)))
        graph = msgspec.structs.replace(graph, handles=handles)
        live = validate(graph, self._live)
        self._fragment_start = self._next_node
        self._next_node += len(graph.nodes)
        self._confirmed = False
        return graph, live

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
            match event:
                case ValueEvent():
                    capture = self._captures.pop(event.node, None)
                    if capture is not None:
                        capture.event = event
                    self._confirmed = self._confirmed or event.node >= self._fragment_start
                case JoinedEvent():
                    self._confirmed = self._confirmed or event.node >= self._fragment_start
                case TextEvent() | DeltaEvent():
                    self.stream.append(event)
                case HandlesEvent():
                    # One that was on its way when the latest fragment left speaks of an older state.
                    if self._confirmed:
                        self._handles.update({handle.branch: handle for handle in event.handles})
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
        """The body is running on another thread than the caller's."""
        return self.body_thread is not None and self.body_thread != threading.get_ident()

    @property
    def in_body(self) -> bool:
        """The caller is the body, running on its thread."""
        return self.body_thread is not None and self.body_thread == threading.get_ident()

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
            node = self._failed.node
            raise error.at(self._locations.get(node) if node is not None else location)

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
        try:
            self.changed.wait()
        except BaseException:
            self.cancel()
            raise

    def wait(self, capture: Capture) -> ValueEvent:
        """The event of a capture; submits what is buffered if it needs that."""
        if capture.event is None:
            if capture.node is None:
                self.flush()
            self.wait_for(lambda: capture.event is not None, capture.location)
        return cast(ValueEvent, capture.event)

    def wait_end(self) -> None:
        """Wait until the program has ended; raises if it failed."""
        self.wait_for(lambda: self._done is not None)

    def read_state(self, branch: int) -> StateText:
        """The text and ids of a branch after everything appended so far."""
        self.flush()
        self.raise_if_failed()
        if self._done is not None or self._session is None:
            if self._session is None:
                return StateText("")
            raise StateLost(
                f"branch {branch} is released with the end of its program",
                hint="read its text inside the body, before the join",
            )
        future: Future[StateText] = self._session.read_state(branch)
        future.add_done_callback(self._on_read)
        with self.changed:
            while not future.done() and not self.ended:
                self.sleep()
            if not future.done():
                self._raise_if_failed()
                raise StateLost(f"branch {branch} was released before its text was read")
        error = future.exception()
        if error is not None:
            self.raise_if_failed()
            raise error
        return future.result()

    def notify(self) -> None:
        """Wake everyone who waits: a name was captured, or the body ended."""
        with self.changed:
            self._wake()

    def _on_read(self, _future: Future[Any]) -> None:
        with self.changed:
            self._wake()


def _cancelled(name: str) -> SglError:
    return Cancelled(f"program {name!r} was cancelled")
