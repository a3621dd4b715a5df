"""`fn.explain(...)`: what a run will cost and why, before it; and beside it, what it did cost.

Owns the `Explanation`: the plan of the rows (from their traces), the figures that `forecast` predicts, what blocks
sharing, and the measured figures once somebody runs it. Nothing is computed by explaining.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sgl.errors import InvalidProgram, SglError, SourceLocation
from sgl.lang import defaults
from sgl.lang.backend import Backend, EventSink, Session
from sgl.lang.capture import UnknownName
from sgl.lang.forecast import Figures, Forecast, NodeCost, forecast, longest_path
from sgl.lang.graph import (
    DoneEvent,
    Event,
    FailedEvent,
    Fork,
    Gen,
    Graph,
    Join,
    LiteralText,
    Node,
    ProgramOptions,
    Role,
    Sampling,
    Select,
    StateText,
    Text,
    Usage,
    ValueEvent,
    sampling_values,
)
from sgl.lang.rendering import PlainRenderer, Renderer
from sgl.lang.tracing import Assumed, Trace, trace_body

if TYPE_CHECKING:
    from sgl.lang.function import SglFunction


class PathStep(msgspec.Struct, frozen=True, kw_only=True):
    """A generation or select on the critical path, and the steps of the engine that it takes."""

    name: str
    steps: int
    location: SourceLocation | None = None


class Blocker(msgspec.Struct, frozen=True, kw_only=True):
    """Something that keeps tokens from being shared, or the plan from being complete; `tokens` is what it costs."""

    reason: str
    tokens: int = 0
    location: SourceLocation | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What explaining found: data, as `--json` prints it and `save` writes it.

    Attributes:
        counted_by: the model whose tokens these are; `exact` unless they are an estimate.
        rows, nodes, branches: of all rows together.
        complete: whether every body was followed to its end.
        plain_tokens: that plain requests would prefill without a cache; `predicted` is with sharing.
        critical_path: of the longest row.
        measured: of a run of these rows, once there was one.
    """

    program: str
    counted_by: str
    exact: bool
    rows: int
    nodes: int
    branches: int
    complete: bool
    plain_tokens: int
    predicted: Figures
    critical_path: tuple[PathStep, ...]
    blockers: tuple[Blocker, ...]
    measured: Figures | None = None


class Explanation:
    """The explanation of a program on some rows. `print` it; `save` it before the run, and `measure` after.

    Attributes:
        plan: all of it as data; its fields are also attributes of this object.
        traces: per row, what its body appends.
        nodes: what each generation and select costs.
        states: of the measured run.
    """

    def __init__(
        self,
        function: SglFunction,
        rows: list[tuple[tuple[Any, ...], dict[str, Any]]],
        traces: list[Trace],
        foreseen: Forecast,
        plan: Plan,
        backend: Backend | None,
        sampling: Mapping[str, Any],
    ) -> None:
        self.plan = plan
        self.traces = traces
        self.nodes: tuple[NodeCost, ...] = foreseen.nodes
        self.states: list[Any] = []
        self._function = function
        self._rows = rows
        self._backend = backend
        self._sampling = dict(sampling)

    @property
    def predicted(self) -> Figures:
        """What it is going to cost."""
        return self.plan.predicted

    @property
    def measured(self) -> Figures | None:
        """What it did cost, after `measure`."""
        return self.plan.measured

    def __str__(self) -> str:
        return "\n".join(lines_of(self.plan))

    def __repr__(self) -> str:
        return f"<Explanation of {self.plan.program}, {self.plan.rows} rows>"

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; a file that exists is replaced."""
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self.plan), indent=2) + b"\n")

    def to_html(self) -> str:
        """The plan as one page without anything from elsewhere."""
        from sgl.lang.view.plan import plan_page

        return plan_page(self)

    def _repr_html_(self) -> str:
        from sgl.lang.view.plan import plan_part

        return plan_part(self)

    def measure(self, backend: Backend | None = None) -> Explanation:
        """Run the rows, and put what was counted beside what was predicted; this explanation.

        Token counts are the programs' own; steps are those that the engine made meanwhile, for whomever. What the
        engine had in its cache before counts as cached: flush it first for a figure that stands alone.

        Raises:
            SglError: a row failed.
        """
        counter = CountingBackend(defaults.backend_of(backend or self._backend))
        calls = [self._function.bind(**named) if named else self._function for _, named in self._rows]
        if len(self._rows) == 1:
            self.states = [calls[0].run(*self._rows[0][0], backend=counter, **self._sampling)]
        else:
            rows = [self._positional(args, named) for args, named in self._rows]
            self.states = self._function.run_batch(rows, backend=counter, **self._sampling)
        return self.take(counter)

    def take(self, counter: CountingBackend) -> Explanation:
        """Put what a counter has counted beside what was predicted; this explanation."""
        self.plan = msgspec.structs.replace(self.plan, measured=counter.figures())
        return self

    def _positional(self, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self._function.arg_names, args, strict=False)), **named}


def explain_function(
    function: SglFunction,
    rows: Sequence[Mapping[str, Any] | Sequence[Any]] | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    assume: Assumed | None = None,
    sampling: Mapping[str, Any] | None = None,
    backend: Backend | None = None,
    renderer: Renderer | None = None,
) -> Explanation:
    """What `SglFunction.explain` does; see there."""
    calls = [(args, dict(kwargs))] if rows is None else [function._row(i, row) for i, row in enumerate(rows)]
    counts = renderer or renderer_of(backend)
    base = defaults.sampling_defaults(backend) if backend is not None else Sampling()
    resolved = msgspec.structs.replace(base, max_new_tokens=128)
    resolved = msgspec.structs.replace(resolved, **sampling_values(dict(sampling or {})))
    traces = [
        trace_body(function, given, named, sampling=resolved, assume=assume, partial=True) for given, named in calls
    ]
    limits = _limits(backend)
    foreseen = forecast(traces, counts, **limits)
    longest = max(traces, key=lambda trace: _path_steps(trace, foreseen, traces), default=None)
    plan = Plan(
        program=function.__name__,
        counted_by=counts.name,
        exact=counts.exact,
        rows=len(traces),
        nodes=sum(len(trace.graph.nodes) for trace in traces),
        branches=sum(len({node.branch for node in trace.graph.nodes} | {0}) for trace in traces),
        complete=all(trace.stopped is None for trace in traces),
        plain_tokens=foreseen.plain_tokens,
        predicted=foreseen.figures,
        critical_path=_path(longest, foreseen, traces) if longest is not None else (),
        blockers=tuple(_blockers(traces, counts, foreseen)),
    )
    return Explanation(function, calls, traces, foreseen, plan, backend, sampling or {})


def renderer_of(backend: Backend | None) -> Renderer:
    """What counts tokens for a backend: its own renderer, the default model's for none, or an estimate."""
    if backend is None:
        return defaults.default_renderer()
    make = getattr(backend, "renderer", None)
    return make() if make is not None else PlainRenderer("an estimate of four characters per token")


def compute_prefix(function: SglFunction, backend: Backend) -> int:
    """What `SglFunction.cache` does; see there."""
    trace = trace_body(function, (), {}, partial=True)
    prefix: list[Node] = list(takewhile(_is_constant, trace.graph.nodes))
    following = trace.graph.nodes[len(prefix) :]
    first = following[0] if following else None
    if isinstance(first, Text) and isinstance(first.segments[0], LiteralText):
        prefix.append(msgspec.structs.replace(first, segments=first.segments[:1]))
    if not prefix:
        return 0
    last = Gen(id=prefix[-1].id + 1, name="prefix", sampling=Sampling(max_new_tokens=0))
    ended: Future[int] = Future()
    tokens: list[int] = []

    def take(event: Event) -> None:
        if isinstance(event, ValueEvent):
            tokens.append(event.usage.prompt_tokens)
        elif isinstance(event, DoneEvent):
            ended.set_result(tokens[-1] if tokens else 0)
        elif isinstance(event, FailedEvent):
            ended.set_exception(SglError.from_info(event.error))

    session = backend.open(take, ProgramOptions(name=function.__name__, want_text=False))
    session.submit(Graph(nodes=(*prefix, last)), finish=True)
    return ended.result()


def _is_constant(node: Node) -> bool:
    if isinstance(node, Text):
        return all(isinstance(segment, LiteralText) for segment in node.segments)
    return isinstance(node, Role)


def _limits(backend: Backend | None) -> dict[str, int | None]:
    """What bounds a step of the backend's engine."""
    resolved = backend.server_info().get("resolved", {}) if backend is not None else {}
    return {"chunk": resolved.get("chunked_prefill_size"), "max_running": resolved.get("max_running_requests")}


def _forwards(backend: Backend) -> int | None:
    stats = getattr(backend, "stats", None)
    if stats is None:
        return None
    found = stats()
    return int(found["forwards"] if isinstance(found, Mapping) else found.forwards)


# --- the critical path ----------------------------------------------------------------------------------------------


def _steps(trace: Trace, foreseen: Forecast, traces: list[Trace]) -> dict[int, int]:
    row = next(index for index, other in enumerate(traces) if other is trace)
    return {cost.node: cost.last - cost.first + 1 for cost in foreseen.nodes if cost.row == row}


def _path_steps(trace: Trace, foreseen: Forecast, traces: list[Trace]) -> int:
    steps = _steps(trace, foreseen, traces)
    return sum(steps.get(node.id, 0) for node in longest_path(trace.graph, steps))


def _path(trace: Trace, foreseen: Forecast, traces: list[Trace]) -> tuple[PathStep, ...]:
    steps = _steps(trace, foreseen, traces)
    return tuple(
        PathStep(name=node.name, steps=steps.get(node.id, 0), location=node.location)
        for node in longest_path(trace.graph, steps)
        if isinstance(node, (Gen, Select))
    )


_WORTH_MOVING = 16
"""Tokens of late text, per row, that are worth a word."""


# --- what blocks sharing --------------------------------------------------------------------------------------------


def _further(stopped: InvalidProgram) -> str:
    return "a run will fail there" if isinstance(stopped, UnknownName) else "assume a value to see further"


def _blockers(traces: list[Trace], renderer: Renderer, foreseen: Forecast) -> list[Blocker]:
    found: list[Blocker] = []
    for trace in traces:
        if trace.stopped is not None:
            found.append(
                Blocker(
                    reason=f"the plan ends here: {trace.stopped.message}; {_further(trace.stopped)}",
                    location=trace.stopped.location,
                )
            )
            break
    opened = sorted({name for trace in traces for name in trace.parameters})
    if opened:
        found.append(Blocker(reason=f"arguments without a value count as their names: {', '.join(opened)}"))
    found.extend(_late_constants(traces, renderer))
    if foreseen.figures.joined_tokens:
        joins = [n for trace in traces for n in trace.graph.nodes if isinstance(n, Join) and n.mode == "append"]
        found.append(
            Blocker(
                reason="a join appends the text of its branches: all but the first one's is computed again behind it",
                tokens=foreseen.figures.joined_tokens,
                location=joins[0].location if joins else None,
            )
        )
    if foreseen.figures.rerendered_tokens:
        found.append(
            Blocker(
                reason="the chat template rewrites earlier turns, and what it changed is computed again",
                tokens=foreseen.figures.rerendered_tokens,
            )
        )
    return found


def _late_constants(traces: list[Trace], renderer: Renderer) -> list[Blocker]:
    """Text that is the same in every row but stands behind text that is not."""
    columns = list(zip(*(_prompt(trace) for trace in traces), strict=False))
    different = next((index for index, texts in enumerate(columns) if not _same(texts)), None)
    if different is None:
        return []
    where = columns[different][0][1]
    ending = _common_ending([text for text, _ in columns[different]])
    late = [ending, *(texts[0][0] for texts in columns[different + 1 :] if _same(texts))]
    tokens = sum(map(renderer.count, late))
    if tokens < _WORTH_MOVING:
        return []
    reason = (
        "text that is the same in all rows stands behind text that differs: before it, it would be computed once, "
        f"and not {len(traces)} times"
    )
    return [Blocker(reason=reason, tokens=tokens * (len(traces) - 1), location=where)]


def _common_ending(texts: Sequence[str]) -> str:
    """The longest text that all of them end with."""
    characters = takewhile(lambda column: len(set(column)) == 1, zip(*(reversed(text) for text in texts), strict=False))
    return "".join(column[0] for column in characters)[::-1]


def _same(texts: Sequence[tuple[str, SourceLocation | None]]) -> bool:
    return len({text for text, _ in texts}) == 1


def _prompt(trace: Trace) -> list[tuple[str, SourceLocation | None]]:
    """The texts of the main branch up to its first generation or fork, as the lines of the program wrote them."""
    found: list[tuple[str, SourceLocation | None]] = []
    for node in trace.graph.nodes:
        if node.branch != 0:
            continue
        if isinstance(node, (Gen, Select, Fork)):
            break
        if isinstance(node, Text):
            for segment in node.segments:
                found.append((segment.text if isinstance(segment, LiteralText) else segment.name, node.location))
    return found


# --- counting a run -------------------------------------------------------------------------------------------------


class CountingBackend:
    """A backend that passes everything on, and counts what comes back. Thread-safe."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._usage = Usage()
        self._requests = 0
        self._round_trips = 0
        self._forwards = _forwards(backend)
        recommend = getattr(backend, "sampling_defaults", None)
        if recommend is not None:
            self.sampling_defaults = recommend

    def open(self, sink: EventSink, options: ProgramOptions) -> Session:
        """Start a program there."""

        def count(event: Event) -> None:
            with self._lock:
                if isinstance(event, ValueEvent):
                    self._requests += 1
                elif isinstance(event, DoneEvent):
                    self._usage += event.usage
            sink(event)

        return _CountingSession(self._backend.open(count, options), self)

    def submitted(self) -> None:
        """A message was sent."""
        with self._lock:
            self._round_trips += 1

    def flush_cache(self) -> bool:
        """The backend's."""
        return self._backend.flush_cache()

    def server_info(self) -> Mapping[str, Any]:
        """The backend's."""
        return self._backend.server_info()

    def shutdown(self) -> None:
        """Nothing: the backend belongs to whoever made it."""

    def figures(self) -> Figures:
        """What was counted so far."""
        now, before = _forwards(self._backend), self._forwards
        forwards = now - before if now is not None and before is not None else None
        with self._lock:
            return Figures.of(self._usage, requests=self._requests, forwards=forwards, round_trips=self._round_trips)


class _CountingSession:
    def __init__(self, session: Session, counter: CountingBackend) -> None:
        self._session = session
        self._counter = counter

    def submit(self, graph: Graph, *, finish: bool = False) -> None:
        self._counter.submitted()
        self._session.submit(graph, finish=finish)

    def read_state(self, branch: int) -> Future[StateText]:
        return self._session.read_state(branch)

    def cancel(self) -> None:
        self._session.cancel()


# --- for people -----------------------------------------------------------------------------------------------------

LABELS = {
    "requests": "generations and selects",
    "prompt_tokens": "prompt tokens",
    "cached_tokens": "  shared (found in the cache)",
    "prefill_tokens": "  prefilled",
    "scored_tokens": "    of these, options of selects",
    "completion_tokens": "generated tokens",
    "joined_tokens": "appended by joins",
    "rerendered_tokens": "rewritten by the template",
    "forwards": "forwards",
    "round_trips": "messages to the backend",
}


def compared(plan: Plan) -> list[tuple[str, str, str]]:
    """The figures as rows of label, predicted, measured."""
    rows = []
    for name, label in LABELS.items():
        predicted, measured = getattr(plan.predicted, name), getattr(plan.measured, name, None)
        if predicted or measured:
            rows.append((label, _shown(predicted), _shown(measured) if plan.measured is not None else ""))
    return rows


def _shown(value: int | None) -> str:
    return "not told" if value is None else f"{value:,}"


def lines_of(plan: Plan) -> list[str]:
    """The plan as lines of text."""
    counted = plan.counted_by if plan.exact else f"{plan.counted_by} (not exact)"
    lines = [
        f"{plan.program}: {plan.rows} row{'s' * (plan.rows != 1)}, {plan.nodes} nodes on "
        f"{plan.branches} branch{'es' * (plan.branches != 1)}; "
        f"tokens of {counted}",
        "",
        f"{'':32}{'predicted':>12}{'measured':>12}" if plan.measured is not None else f"{'':32}{'predicted':>12}",
    ]
    lines += [f"{label:32}{predicted:>12}{measured:>12}".rstrip() for label, predicted, measured in compared(plan)]
    lines.append(f"{'prefilled as plain requests':32}{plan.plain_tokens:>12,}")
    if plan.predicted.prefill_tokens:
        lines.append(f"{'  times as much':32}{plan.plain_tokens / plan.predicted.prefill_tokens:>12.1f}")
    if plan.critical_path:
        steps = sum(step.steps for step in plan.critical_path)
        names = " -> ".join(f"{step.name} ({step.steps})" for step in plan.critical_path)
        lines += ["", f"critical path, {steps} steps: {names}"]
    for blocker in plan.blockers:
        cost = f" ({blocker.tokens:,} tokens)" if blocker.tokens else ""
        lines += ["", f"- {blocker.reason}{cost}"]
        if blocker.location is not None:
            lines.append(f"  at {blocker.location}")
    return lines
