"""Runs written down, played back without a model, and branched from any of their generations.

Owns `Recorder` (a backend that passes everything on and keeps it), the `Recording` that it makes (one JSON file) and
`Replay` (a backend that answers from one). What a program sends must be what it sent when it was recorded; where it
differs, the error names the first node that does. The time that chat templates see is recorded with each program and
holds for its branches. Events come in the order and between the same messages as they did.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from sgl.errors import Cancelled, EngineDead, InvalidParameter, InvalidProgram, SglError, StateLost, Unsupported
from sgl.grammars.formats import message_parser, reasoning_format
from sgl.lang import defaults
from sgl.lang.backend import Backend, EventSink, Session
from sgl.lang.dataflow import note_reads
from sgl.lang.graph import (
    DoneEvent,
    Event,
    FailedEvent,
    Gen,
    Graph,
    LiteralText,
    Node,
    ProgramOptions,
    Reads,
    Segment,
    Select,
    StateText,
    Text,
    Tokens,
    ValueEvent,
    Var,
    check_integer,
    digest,
)
from sgl.lang.rendering import Renderer
from sgl.lang.serial import Workers

FORMAT = 1


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A fragment that a program sent, and what came back before the next one.

    Attributes:
        reads: answers to `read_state`, as (branch, state).
    """

    graph: Graph
    finish: bool = False
    events: tuple[Event, ...] = ()
    reads: tuple[tuple[int, StateText], ...] = ()


class ProgramRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One program: its options (with the time that its templates saw) and its messages."""

    options: ProgramOptions
    messages: tuple[Message, ...]


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """What a recorder has seen, in the order in which programs were opened.

    Attributes:
        backend: the model, or what else executed them.
        sampling: what that model recommends, and `formats` how it writes tools and reasoning: what the programs that
            were recorded depended on besides their arguments.
    """

    backend: str
    programs: tuple[ProgramRecord, ...]
    sampling: dict[str, Any] = {}
    formats: dict[str, Any] = {}
    format: int = FORMAT

    def save(self, path: str | Path) -> None:
        """Write it as JSON; a file that exists is replaced."""
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @staticmethod
    def load(path: str | Path) -> Recording:
        """Read what `save` wrote.

        Raises:
            InvalidProgram: it is no recording, or of another format.
        """
        try:
            recording = msgspec.json.decode(Path(path).read_bytes(), type=Recording)
        except msgspec.MsgspecError as error:
            raise InvalidProgram(f"{str(path)!r} is no recording: {error}", hint="make one with sgl.Recorder") from None
        if recording.format != FORMAT:
            raise InvalidProgram(f"{str(path)!r} has format {recording.format}; this version reads {FORMAT}")
        return recording


# --- recording ------------------------------------------------------------------------------------------------------


class Recorder:
    """A backend that writes down what programs do on another one.

    Args:
        path: the file, written when the recorder is closed (or with `save`).
        backend: what executes the programs; the default one otherwise. It is not owned.

    Example:
        >>> import sgl, tempfile, pathlib
        >>> @sgl.function
        ... def hello(s):
        ...     s += "Hello " + sgl.gen("who")
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "run.json"
        >>> with sgl.Recorder(file, sgl.MockBackend(["world"])) as recorder:
        ...     _ = hello.run(backend=recorder)
        >>> hello.run(backend=sgl.Replay(file))["who"]
        'world'
    """

    def __init__(self, path: str | Path, backend: Backend | None = None) -> None:
        self._path = Path(path)
        if not self._path.parent.is_dir():
            raise InvalidParameter(
                f"path is {str(path)!r}; the folder {str(self._path.parent)!r} does not exist",
                hint="make it first",
                param="path",
            )
        self._backend = defaults.backend_of(backend)
        self._lock = threading.Lock()
        self._sessions: list[_RecordingSession] = []
        recommend = getattr(self._backend, "sampling_defaults", None)
        if recommend is not None:
            self.sampling_defaults = recommend

    def open(self, sink: EventSink, options: ProgramOptions) -> Session:
        """Start a program there, at a time that is kept."""
        if options.now is None:
            options = msgspec.structs.replace(options, now=time.time())
        session = _RecordingSession(self._backend, sink, options)
        with self._lock:
            self._sessions.append(session)
        return session

    def flush_cache(self) -> bool:
        """The backend's."""
        return self._backend.flush_cache()

    def server_info(self) -> Mapping[str, Any]:
        """The backend's."""
        return self._backend.server_info()

    def recording(self) -> Recording:
        """What was seen so far."""
        info = self._backend.server_info()
        with self._lock:
            programs = tuple(session.record() for session in self._sessions)
        recommend = getattr(self._backend, "sampling_defaults", None)
        return Recording(
            backend=_model_of(info),
            programs=programs,
            sampling=dict(recommend()) if recommend is not None else {},
            formats=dict(info.get("formats", {})),
        )

    def save(self) -> None:
        """Write the file."""
        self.recording().save(self._path)

    def shutdown(self) -> None:
        """Write the file. The backend belongs to whoever made it."""
        self.save()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class _RecordingSession:
    def __init__(self, backend: Backend, sink: EventSink, options: ProgramOptions) -> None:
        self._options = options
        self._sink = sink
        self._lock = threading.Lock()
        self._messages: list[tuple[Graph, bool, list[Event], list[tuple[int, StateText]]]] = []
        self._session = backend.open(self._on_event, options)

    def _on_event(self, event: Event) -> None:
        with self._lock:
            if self._messages:
                self._messages[-1][2].append(event)
        self._sink(event)

    def submit(self, graph: Graph, *, finish: bool = False) -> None:
        with self._lock:
            self._messages.append((graph, finish, [], []))
        self._session.submit(graph, finish=finish)

    def read_state(self, branch: int) -> Future[StateText]:
        answer = self._session.read_state(branch)
        answer.add_done_callback(partial(self._on_read, branch))
        return answer

    def _on_read(self, branch: int, answer: Future[StateText]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            with self._lock:
                if self._messages:
                    self._messages[-1][3].append((branch, answer.result()))

    def cancel(self) -> None:
        self._session.cancel()

    def record(self) -> ProgramRecord:
        with self._lock:
            messages = tuple(
                Message(graph=graph, finish=finish, events=tuple(events), reads=tuple(reads))
                for graph, finish, events, reads in self._messages
            )
        return ProgramRecord(options=self._options, messages=messages)


# --- playing back ---------------------------------------------------------------------------------------------------


class Replay:
    """A backend that answers programs from a recording.

    Args:
        recording: the file, or what was read from it.
        until: play the values of nodes before this number only; that node and what follows is executed anew on
            `backend`, in the time that was recorded.

    Raises:
        InvalidParameter: one of `until` and `backend` without the other.

    Example:
        >>> import sgl, tempfile, pathlib
        >>> @sgl.function
        ... def two(s):
        ...     s += "One " + sgl.gen("a") + " two " + sgl.gen("b")
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "run.json"
        >>> with sgl.Recorder(file, sgl.MockBackend(["1", "2"])) as recorder:
        ...     _ = two.run(backend=recorder)
        >>> two.run(backend=sgl.Replay(file, until=3, backend=sgl.MockBackend({"b": "other"}))).text()
        'One 1 two other'
    """

    def __init__(
        self, recording: str | Path | Recording, *, until: int | None = None, backend: Backend | None = None
    ) -> None:
        if (until is None) != (backend is None):
            raise InvalidParameter(
                "a replay that goes on by itself needs both until and backend", param="until" if backend else "backend"
            )
        if until is not None:
            check_integer("until", until, low=0)
        if backend is not None:
            defaults.check_backend(backend)
        self.recording = recording if isinstance(recording, Recording) else Recording.load(recording)
        self._until = until
        self._backend = backend
        self._lock = threading.Lock()
        self._left: list[ProgramRecord] = list(self.recording.programs)
        self._workers = Workers("sgl-replay")
        self._closed = False

    def open(self, sink: EventSink, options: ProgramOptions) -> Session:
        """Start a program; which one of the recording it is, its first message says.

        Raises:
            EngineDead: the replay was shut down.
        """
        if self._closed:
            raise EngineDead("the replay was shut down", hint="make a new one")
        return _Playing(self, sink, options)

    def flush_cache(self) -> bool:
        """There is none: False."""
        return False

    def server_info(self) -> Mapping[str, Any]:
        """What was recorded."""
        return {
            "backend": "replay",
            "model": self.recording.backend,
            "num_programs": len(self.recording.programs),
            "formats": self.recording.formats,
        }

    def sampling_defaults(self) -> Mapping[str, Any]:
        """What the recorded model recommended."""
        return self.recording.sampling

    def renderer(self) -> Renderer:
        """The default one: a recording has no tokenizer."""
        return defaults.renderer_for(None)

    def shutdown(self) -> None:
        """Take no more programs. Idempotent."""
        self._closed = True

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def take(self, options: ProgramOptions, graph: Graph) -> ProgramRecord:
        """The next record that begins with this message; else the next one of this name, which then differs.

        Raises:
            InvalidProgram: none is left.
        """
        begins = digest(graph)
        with self._lock:
            named = [record for record in self._left if record.options.name == options.name and record.messages]
            same = [record for record in named if digest(record.messages[0].graph) == begins]
            if not named:
                raise InvalidProgram(
                    f"no run of {options.name!r} is left in the recording",
                    hint="it has: " + (", ".join(r.options.name for r in self._left) or "nothing any more"),
                )
            record = (same or named)[0]
            self._left.remove(record)
        return record


class _Playing:
    """One program of a replay."""

    def __init__(self, replay: Replay, sink: EventSink, options: ProgramOptions) -> None:
        self._replay = replay
        self._sink = sink
        self._options = options
        self._record: ProgramRecord | None = None
        self._at = -1
        self._reads: list[tuple[int, StateText]] = []
        self._ended = False
        self._live: Session | None = None
        self._values: dict[int, ValueEvent] = {}
        self._read = Reads()

    # --- the protocol ---

    def submit(self, graph: Graph, *, finish: bool = False) -> None:
        """Play what came back, or have it executed."""
        if self._replay._backend is not None:
            self._go_on(graph, finish)
            return
        self._replay._workers.post(partial(self._play, graph))

    def read_state(self, branch: int) -> Future[StateText]:
        """What was read there."""
        if self._live is not None:
            return self._live.read_state(branch)
        answer: Future[StateText] = Future()
        self._replay._workers.post(partial(self._answer, branch, answer))
        return answer

    def cancel(self) -> None:
        """End."""
        if self._live is not None:
            self._live.cancel()
            return
        self._replay._workers.post(lambda: self._fail(Cancelled(f"program {self._options.name!r} was cancelled")))

    # --- playing ---

    def _emit(self, events: Iterable[Event]) -> None:
        for event in events:
            if not self._ended:
                self._ended = isinstance(event, (DoneEvent, FailedEvent))
                self._sink(event)

    def _fail(self, error: SglError) -> None:
        self._emit([FailedEvent(error.to_info())])

    def _play(self, graph: Graph) -> None:
        if self._ended:
            return
        try:
            if self._record is None:
                self._record = self._replay.take(self._options, graph)
            self._at += 1
            if self._at >= len(self._record.messages):
                raise InvalidProgram(
                    f"{self._options.name!r} sends more than was recorded",
                    location=graph.nodes[0].location if graph.nodes else None,
                )
            message = self._record.messages[self._at]
            _compare(message.graph, graph, self._options.name)
        except SglError as error:
            self._fail(error)
            return
        self._reads += message.reads
        self._emit(message.events)

    def _answer(self, branch: int, answer: Future[StateText]) -> None:
        found = next((read for read in self._reads if read[0] == branch), None)
        if found is None:
            answer.set_exception(StateLost(f"the recording has no state of branch {branch} here"))
            return
        self._reads.remove(found)
        answer.set_result(found[1])

    # --- going on with a backend ---

    def _go_on(self, graph: Graph, finish: bool) -> None:
        replay = self._replay
        if self._live is None:
            self._record = replay.take(self._options, graph)
            options = msgspec.structs.replace(self._options, now=self._record.options.now)
            until = replay._until or 0
            events = [event for message in self._record.messages for event in message.events]
            self._values = {e.node: e for e in events if isinstance(e, ValueEvent) and e.node < until}
            if replay._backend is None:
                raise InvalidParameter("a replay without a backend cannot go on", param="backend")
            self._live = replay._backend.open(self._sink, options)
        played = [self._values[node.id] for node in graph.nodes if node.id in self._values]
        for event in played:
            replay._workers.post(partial(self._sink, event))
        note_reads(self._read, graph.nodes)
        # Token ids mean something to the model that drew them, and to no other.
        same_model = _model_of(replay._backend.server_info()) == replay.recording.backend if replay._backend else False
        exact = _with_values(graph, self._values, self._read, as_tokens=same_model)
        try:
            self._live.submit(exact, finish=finish)
        except Unsupported:
            self._live.submit(_with_values(graph, self._values, self._read, as_tokens=False), finish=finish)


def _compare(recorded: Graph, sent: Graph, name: str) -> None:
    """Raise `InvalidProgram` unless a program sent what it had sent; handles are the engine's, and which of them has
    come by then is a matter of time."""
    if digest(_without_handles(recorded)) == digest(_without_handles(sent)):
        return
    for was, now in zip(recorded.nodes, sent.nodes, strict=False):
        if _bare(was) != _bare(now):
            raise InvalidProgram(
                f"{name!r} differs from its recording at node {now.id}: {_told(now)}, and it was {_told(was)}",
                hint=f"recorded at {was.location}; record it again, or go on from here with until={now.id} and backend",
                location=now.location,
            )
    more = (sent.nodes or recorded.nodes)[-1] if sent.nodes or recorded.nodes else None
    raise InvalidProgram(
        f"{name!r} differs from its recording: it sends {len(sent.nodes)} nodes, and there were {len(recorded.nodes)}",
        hint="record it again",
        location=more.location if more is not None else None,
    )


def _without_handles(graph: Graph) -> Graph:
    return msgspec.structs.replace(graph, handles=())


def _bare(node: Node) -> Node:
    return msgspec.structs.replace(node, location=None)


def _told(node: Node) -> str:
    text = msgspec.json.encode(_bare(node)).decode()
    return text if len(text) <= 120 else f"{text[:117]}..."


def _with_values(graph: Graph, values: Mapping[int, ValueEvent], reads: Reads, *, as_tokens: bool) -> Graph:
    """A graph in which what generations that have a value left in the state stands in their place, and the values in
    that of variables that read them."""

    def fill(segment: Segment, at: int) -> Segment:
        source = reads.of(segment, at) if isinstance(segment, Var) else None
        return LiteralText(values[source].value) if source is not None and source in values else segment

    nodes: list[Node] = []
    for node in graph.nodes:
        if isinstance(node, (Gen, Select)) and node.id in values:
            nodes.append(_left_by(node, values[node.id], as_tokens=as_tokens))
        elif isinstance(node, Text):
            filled = tuple(fill(segment, node.id) for segment in node.segments)
            nodes.append(msgspec.structs.replace(node, segments=filled))
        else:
            nodes.append(node)
    return msgspec.structs.replace(graph, nodes=tuple(nodes))


def _left_by(node: Gen | Select, event: ValueEvent, *, as_tokens: bool) -> Text | Tokens:
    """What a generation left in its state: its tokens, where none of them ended it; or the answer alone where there is
    reasoning."""
    reasoning = node.reasoning if isinstance(node, Gen) else None
    if as_tokens and reasoning is None and isinstance(node, Gen) and event.token_ids and event.finish == "length":
        return Tokens(id=node.id, branch=node.branch, location=node.location, token_ids=event.token_ids)
    text = event.value
    if reasoning is not None:
        text = message_parser(reasoning=reasoning_format(reasoning)).parse(text).content
    return Text(id=node.id, branch=node.branch, location=node.location, segments=(LiteralText(text),))


def _model_of(info: Mapping[str, Any]) -> str:
    return str(info.get("model", info.get("backend", "")))
