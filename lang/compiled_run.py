"""A run of a compiled program: its events as they come, its values by name.

Owns `CompiledRun`. It has no body and no thread; whoever waits for it blocks. Values are read as the program's outputs
say: text, numbers, what JSON holds. Every wait ends: by the end of the run, by its failure (raised with the program's
line), or by its deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sgl.errors import DeadlineExceeded, InternalError, InvalidParameter, InvalidProgram, SglError
from sgl.lang.backend import Backend, Session
from sgl.lang.capture import Capture
from sgl.lang.dataflow import parents
from sgl.lang.forms import portable_form
from sgl.lang.graph import (
    DoneEvent,
    Event,
    FailedEvent,
    Gen,
    Graph,
    LiteralText,
    ProgramOptions,
    Select,
    Text,
    Usage,
    ValueEvent,
    Var,
    meta_info,
)
from sgl.lang.interpreter import DEADLINE_GRACE_S
from sgl.lang.outputs import ListOutput, Output, ReasoningOutput, TextOutput
from sgl.lang.variables import probabilities

if TYPE_CHECKING:
    from sgl.lang.compile import CompiledProgram


class Ends:
    """The ends of runs that belong together: what waits for one of them waits here."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._num_ended = 0
        self._failed: CompiledRun | None = None

    def ended(self, run: CompiledRun) -> None:
        """A run has ended. `changed` is held."""
        self._num_ended += 1
        if run.failed and self._failed is None:
            self._failed = run
        self.changed.notify_all()

    def first_failure(self, runs: Sequence[CompiledRun]) -> CompiledRun | None:
        """Wait until all have ended, or one has failed: that one. Not longer than their deadline."""
        with self.changed:
            while self._failed is None and self._num_ended < len(runs):
                if not self.changed.wait(runs[-1].time_left):
                    break
            return self._failed


class CompiledRun:
    """A run of a compiled program, with its values by name.

    Args:
        ends: where its end is waited for; runs of a batch share one.
    """

    def __init__(self, program: CompiledProgram, graph: Graph, options: ProgramOptions, ends: Ends) -> None:
        self._program = program
        self._graph = graph
        self._options = options
        self._started_at = time.monotonic()
        self._session: Session | None = None
        self._ends = ends
        self._captures = {(node.branch, node.name): _capture(graph, at, node) for at, node in _generating(graph)}
        self._end: DoneEvent | FailedEvent | None = None

    def __repr__(self) -> str:
        return f"<CompiledRun {self._program.name}: {', '.join(self._program.outputs) or 'no values'}>"

    # --- running ---

    def start(self, backend: Backend) -> None:
        """Submit it.

        Raises:
            SglError: the backend does not take it; nothing of it is left there.
        """
        self._session = backend.open(self._on_event, self._options)
        try:
            self._session.submit(self._graph, finish=True)
        except BaseException as error:
            self._session.cancel()
            if isinstance(error, SglError) or not isinstance(error, Exception):
                raise
            raise InternalError(f"the backend failed: {type(error).__name__}: {error}", hint="see the cause") from error

    def _on_event(self, event: Event) -> None:
        with self._ends.changed:
            if isinstance(event, ValueEvent):
                self._captures[event.branch, event.name].event = event
            elif isinstance(event, (DoneEvent, FailedEvent)):
                self._end = event
                self._ends.ended(self)

    @property
    def failed(self) -> bool:
        """It ended with an error."""
        return isinstance(self._end, FailedEvent)

    @property
    def time_left(self) -> float | None:
        """Seconds until nobody waits any longer: the deadline, and some time for the backend to say so itself."""
        if self._options.deadline_s is None:
            return None
        return max(0.0, self._started_at + self._options.deadline_s + DEADLINE_GRACE_S - time.monotonic())

    def wait(self) -> CompiledRun:
        """Wait until it has ended; itself.

        Raises:
            SglError: it failed.
        """
        with self._ends.changed:
            while self._end is None:
                if not self._ends.changed.wait(self.time_left) and self._end is None:
                    raise DeadlineExceeded(
                        f"program {self._options.name!r} ran longer than its deadline of {self._options.deadline_s} s",
                        hint="raise deadline_s, or generate less",
                    )
        if isinstance(self._end, FailedEvent):
            error = SglError.from_info(self._end.error)
            failed = self._end.node
            raise error.at(next((node.location for node in self._graph.nodes if node.id == failed), None))
        return self

    def cancel(self) -> None:
        """Stop it on the backend."""
        if self._session is not None:
            self._session.cancel()

    # --- values ---

    def __getitem__(self, name: str) -> Any:
        return self._read(name, self._output(name), typed=False)

    def __contains__(self, name: object) -> bool:
        return name in self._program.outputs

    def keys(self) -> Iterable[str]:
        """The names of its values."""
        return self._program.outputs.keys()

    def value(self, name: str) -> Any:
        """As `ProgramState.value`: a number for `dtype=int`, decoded JSON for a schema, else what `run[name]` is.

        Raises:
            Truncated: the text ended before it was a complete value.
        """
        return self._read(name, self._output(name), typed=True)

    def get_meta_info(self, name: str) -> Any:
        """How a value came about, as `ProgramState.get_meta_info`; a list of these after a join."""
        return self._meta(self._output(name), name)

    def probabilities(self, name: str) -> dict[str, float]:
        """Of a select: each option with its probability."""
        return probabilities(self.get_meta_info(name), name)

    def text(self) -> str:
        """The text of the main state, template text included."""
        return self._done().text

    @property
    def usage(self) -> Usage:
        """Tokens of the whole program."""
        return self._done().usage

    def _done(self) -> DoneEvent:
        if not isinstance(self._end, DoneEvent):
            raise InvalidProgram("the program has not ended", hint="call wait() first")
        return self._end

    def _output(self, name: str) -> Output:
        self._done()
        found = self._program.outputs.get(name)
        if found is None:
            known = ", ".join(map(repr, self._program.outputs)) or "none"
            raise InvalidParameter(f"{self._program.name} has no value {name!r}", hint=f"it has {known}", param="name")
        return found

    def _read(self, name: str, output: Output, *, typed: bool) -> Any:
        match output:
            case ListOutput(items=items):
                return [self._read(name, item, typed=typed) for item in items]
            case ReasoningOutput(variable=variable):
                return self._capture(variable).message.reasoning
            case TextOutput(segments=segments, form=form):
                texts = [s.text if isinstance(s, LiteralText) else self._capture(s).text for s in segments]
                text = "".join(texts)
                if form is None or not (typed or output.is_typed) or not isinstance(segments[0], Var):
                    return text
                capture = self._capture(segments[0])
                cut = capture.done.finish == "length"
                return portable_form(form).value(name, text, cut=cut, location=capture.location)

    def _capture(self, variable: Var) -> Capture:
        return self._captures[variable.branch, variable.name]

    def _meta(self, output: Output, name: str) -> Any:
        if isinstance(output, ListOutput):
            return [self._meta(item, name) for item in output.items]
        if isinstance(output, TextOutput) and len(output.segments) == 1 and isinstance(output.segments[0], Var):
            return meta_info(self._capture(output.segments[0]).done)
        raise InvalidProgram(f"{name!r} was not generated; it has no meta information")


def _generating(graph: Graph) -> list[tuple[int, Gen | Select]]:
    return [(at, node) for at, node in enumerate(graph.nodes) if isinstance(node, (Gen, Select))]


def _capture(graph: Graph, at: int, node: Gen | Select) -> Capture:
    reasoning = node.reasoning if isinstance(node, Gen) else None
    inside = _starts_inside(graph, at, reasoning) if reasoning is not None else None
    return Capture(node.name, node.branch, node.location, reasoning=reasoning, starts_inside=inside)


def _starts_inside(graph: Graph, at: int, reasoning: str) -> bool | None:
    """Whether the text right before a generation has opened its reasoning; `None` where it says nothing of it."""
    from sgl.grammars.formats import opened_by

    lineage = parents(graph)
    branch = graph.nodes[at].branch
    while True:
        before = next((node for node in reversed(graph.nodes[:at]) if node.branch == branch), None)
        if before is not None or branch not in lineage:
            break
        branch, at = lineage[branch]
    last = before.segments[-1] if isinstance(before, Text) and before.segments else None
    return opened_by(reasoning, last.text) if isinstance(last, LiteralText) else None
