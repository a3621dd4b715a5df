"""Reading a running program's events as they happen.

Owns the one stream that everything reads: `StreamEvent`, the flat form of what happened, and `Cursor`, which takes the
text of a branch or of one variable out of it. Both take what is there without waiting, so the same code serves blocking
iterators and asynchronous ones (no thread waits for those).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sgl.errors import InvalidProgram, SourceLocation
from sgl.grammars.formats.events import ContentDelta, ReasoningDelta
from sgl.lang.capture import Capture, waker
from sgl.lang.graph import (
    DeltaEvent,
    DoneEvent,
    Event,
    JoinedEvent,
    TextEvent,
    TokenLogprob,
    Usage,
    ValueEvent,
    meta_info,
)
from sgl.lang.interpreter import Program
from sgl.lang.variables import Reasoning

if TYPE_CHECKING:
    from sgl.grammars.formats import StreamParser
    from sgl.lang.branches import BranchState

Kind = Literal["text", "delta", "value", "joined", "done"]


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """Something that happened in a program.

    Attributes:
        kind: `text` (literal or template text was appended), `delta` (more of a generation), `value` (a generation or
            select is done), `joined`, `done` (the program has ended).
        time_s: since the program was started.
        branch: that it happened on; `node`: that did it; `location`: the program line of that node.
        name: of the variable.
        text: appended text, the piece of a delta, the whole value, or all text at the end.
        token_ids, logprobs: of a delta: those drawn since the last one; of a value: all.
        usage: tokens of the value, or of the whole program at the end; `latency_s`: how long the value took.
        finish: of a value: why it ended.
        row: of a batch; `None` otherwise.

    Example:
        >>> StreamEvent("text", 0.1, 0, text="Hello").text
        'Hello'
    """

    kind: Kind
    time_s: float
    branch: int = 0
    node: int | None = None
    name: str | None = None
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    usage: Usage | None = None
    latency_s: float | None = None
    finish: str | None = None
    location: SourceLocation | None = None
    row: int | None = None


def stream_event(time_s: float, event: Event, program: Program) -> StreamEvent | None:
    """The flat form of a graph event; `None` for what is said otherwise (a failure is raised)."""
    match event:
        case TextEvent():
            return StreamEvent("text", time_s, event.branch, text=event.text)
        case DeltaEvent():
            return StreamEvent(
                "delta",
                time_s,
                event.branch,
                event.node,
                event.name,
                event.text,
                event.token_ids,
                event.logprobs,
                location=program.location(event.node),
            )
        case ValueEvent():
            return StreamEvent(
                "value",
                time_s,
                event.branch,
                event.node,
                event.name,
                event.value,
                event.token_ids,
                event.logprobs,
                event.usage,
                event.latency_s,
                event.finish,
                program.location(event.node),
            )
        case JoinedEvent():
            return StreamEvent("joined", time_s, event.branch, event.node, location=program.location(event.node))
        case DoneEvent():
            return StreamEvent("done", time_s, text=event.text, usage=event.usage)
        case _:
            return None


class EventReader:
    """A place in a program's events.

    Args:
        branches: whose events are wanted, until everything captured on them so far is there; `None` for all, until the
            program ends.
        flush: submit what is buffered first; not from a thread that is not the body's.
    """

    def __init__(self, program: Program, branches: Sequence[BranchState] | None, *, flush: bool = True) -> None:
        if not program.options.stream:
            raise InvalidProgram("events need a streaming run", hint="run the program with stream=True")
        self._program = program
        self._numbers = {branch.number for branch in branches} if branches is not None else None
        self._captures = [part for branch in branches or () for part in branch.parts if isinstance(part, Capture)]
        self._position = 0
        if flush and not program.body_running:
            program.flush()

    def take(self) -> tuple[list[StreamEvent], bool]:
        """What happened since the last call, and whether that was all.

        Raises:
            SglError: the program failed (after what came before it was taken).
        """
        program = self._program
        with program.changed:
            over = program.done is not None
            if self._numbers is not None:
                over = over or all(capture.event is not None for capture in self._captures)
            wanted = [event for event in self.ready() if self._wants(event)]
        if not wanted and not over:
            program.raise_if_failed()
        return wanted, over

    def ready(self) -> list[StreamEvent]:
        """What happened since the last call; what ends the program is told elsewhere."""
        program = self._program
        with program.changed:
            events = program.stream[self._position :]
            self._position += len(events)
        found = [stream_event(time_s, event, program) for time_s, event in events]
        return [event for event in found if event is not None]

    def _wants(self, event: StreamEvent) -> bool:
        return self._numbers is None or (event.branch in self._numbers and event.kind != "done")


def event_stream(program: Program, branches: Sequence[BranchState] | None) -> Iterator[StreamEvent]:
    """Events until the end, waiting for each."""
    yield from _blocking(program, EventReader(program, branches).take)


def event_stream_async(program: Program, branches: Sequence[BranchState] | None) -> AsyncIterator[StreamEvent]:
    """Events until the end, without a thread that waits."""
    return _awaiting(program, EventReader(program, branches).take)


# --- text -----------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Text that appeared, with the tokens behind it; the last piece of a variable has its event."""

    text: Any
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    value: ValueEvent | None = None


def piece_meta(piece: Piece, num_tokens: int) -> dict[str, Any]:
    """The meta information of a piece after `num_tokens` tokens in all; of the last one, everything."""
    info: dict[str, Any] = {"completion_tokens": num_tokens} if piece.value is None else meta_info(piece.value)
    info["output_ids"] = list(piece.token_ids)
    if piece.logprobs or "output_token_logprobs" in info:
        info["output_token_logprobs"] = [(entry.logprob, entry.token_id, None) for entry in piece.logprobs]
    return info


class Cursor:
    """A place in the stream of one branch (or, with `name`, of one variable on it).

    Args:
        find: gives what the name stands for once the body has made it: a capture, or the reasoning in one. The first
            one found is followed to its end.
        final: gives the value of a variable that no generation or select made, once the program is over; it raises
            when there is no such variable.
    """

    def __init__(
        self,
        program: Program,
        branch: int,
        name: str | None,
        find: Callable[[], Capture | Reasoning | None],
        final: Callable[[], Any],
    ) -> None:
        self._program = program
        self._branch = branch
        self._name = name
        self._find = find
        self._final = final
        self._capture: Capture | None = None
        self._parser: StreamParser | None = None
        self._wants_reasoning = False
        self._position = 0
        self._num_read = 0  # characters of the generation
        self._num_ids = 0
        self._held: list[DeltaEvent] = []  # with tokens and no text yet

    def take(self) -> tuple[list[Piece], bool]:
        """Pieces that came since the last call, and whether that was all.

        Raises:
            UnknownName: the program is over and has no such variable.
            SglError: the program failed (after the pieces that came before it were taken).
        """
        program = self._program
        with program.changed:
            if self._name is not None and self._capture is None:
                self._follow(self._find())
            capture = self._capture
            # Until the capture is known, events are left where they are: they may be its own.
            events = program.stream[self._position :] if self._name is None or capture is not None else []
            self._position += len(events)
            over = program.done is not None
            if capture is not None:
                over = over or capture.event is not None
        pieces = [piece for _, event in events if (piece := self._piece(event)) is not None]
        if over and capture is not None and capture.event is not None:
            event = capture.event  # what had no delta: all of a select, tokens without text
            rest = self._part(event.value[self._num_read :], is_last=True)
            pieces.append(Piece(rest, event.token_ids[self._num_ids :], event.logprobs[self._num_ids :], event))
        if over and capture is None and self._name is not None:
            pieces.append(Piece(self._final()))
        if not pieces and not over:
            program.raise_if_failed()
        return pieces, over

    def _follow(self, found: Capture | Reasoning | None) -> None:
        self._wants_reasoning = isinstance(found, Reasoning)
        self._capture = found.capture if isinstance(found, Reasoning) else found
        if self._capture is not None and self._capture.reasoning is not None:
            self._parser = self._capture.parser()

    def _piece(self, event: Event) -> Piece | None:
        if self._name is None:
            is_ours = isinstance(event, (TextEvent, DeltaEvent)) and event.branch == self._branch
            return Piece(event.text) if is_ours and isinstance(event, (TextEvent, DeltaEvent)) else None
        if not isinstance(event, DeltaEvent) or self._capture is None or event.node != self._capture.node:
            return None
        self._held.append(event)
        self._num_read += len(event.text)
        text = self._part(event.text)
        if not text:
            return None
        held, self._held = self._held, []
        ids = tuple(token_id for delta in held for token_id in delta.token_ids)
        self._num_ids += len(ids)
        return Piece(text, ids, tuple(entry for delta in held for entry in delta.logprobs))

    def _part(self, text: str, *, is_last: bool = False) -> str:
        """What of generated text belongs to the variable: the answer, or the reasoning."""
        if self._parser is None:
            return text
        events = [*self._parser.feed(text), *(self._parser.close() if is_last else ())]
        kind = ReasoningDelta if self._wants_reasoning else ContentDelta
        return "".join(event.text for event in events if isinstance(event, kind))


def iterate(program: Program, cursor: Cursor) -> Iterator[Piece]:
    """Pieces until the end, waiting for each."""
    yield from _blocking(program, cursor.take)


def iterate_async(program: Program, cursor: Cursor) -> AsyncIterator[Piece]:
    """Pieces until the end, without a thread that waits."""
    return _awaiting(program, cursor.take)


# --- waiting --------------------------------------------------------------------------------------------------------


def _blocking(program: Program, take: Callable[[], tuple[list[Any], bool]]) -> Iterator[Any]:
    while True:
        with program.changed:
            seen = program.version
        items, over = take()
        yield from items
        if over:
            return
        if items:
            continue  # an error that came with them is raised by the next look
        with program.changed:
            while program.version == seen:
                program.sleep()


async def _awaiting(program: Program, take: Callable[[], tuple[list[Any], bool]]) -> AsyncIterator[Any]:
    wake, woken = waker()
    program.listen(wake, on=True)
    try:
        while True:
            woken.clear()
            items, over = take()
            for item in items:
                yield item
            if over:
                return
            if items:
                continue
            await program.in_time(woken)
    finally:
        program.listen(wake, on=False)
