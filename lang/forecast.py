"""What programs will cost, counted ahead: requests, tokens to compute, and steps of the engine.

Owns a small model of the engine: states rendered by the model's tokenizer and template, a prefix tree that keeps
everything, and steps that carry a bounded number of tokens. It computes nothing. `explain` uses it; that its figures
are those of the engine, where lengths are known, is a test on the engine's counters.

Generations are as long as they may be (by their budget, or by a regex or options that bound them), unless a value is
assumed for them. The pool is taken to be large enough, all programs to start together, and a constraint to force
nothing: the figures are those of an engine that is not pressed.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from sgl.errors import InvalidProgram
from sgl.grammars.spec import Choices, Regex
from sgl.lang.dataflow import needs, reads_of
from sgl.lang.graph import (
    ARGUMENTS,
    MAIN_BRANCH,
    Fork,
    Gen,
    Graph,
    Join,
    LiteralText,
    Mark,
    Node,
    Release,
    Rewind,
    Role,
    Segment,
    Select,
    Text,
    Tokens,
    Usage,
)
from sgl.lang.rendering import RenderedState, Renderer
from sgl.lang.tracing import Trace


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a run costs, predicted or measured; tokens unless named otherwise.

    Attributes:
        requests: generations and selects.
        prompt_tokens: that had to be in the KV cache before each first output; of these, `cached_tokens` are found
            there and `prefill_tokens` are computed.
        completion_tokens: generated.
        scored_tokens: option tokens computed for selects (part of `prefill_tokens`).
        joined_tokens, rerendered_tokens: as in `Usage`.
        forwards: steps of the engine; `None` where the backend does not tell.
        round_trips: messages from programs to their backend.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    completion_tokens: int = 0
    scored_tokens: int = 0
    joined_tokens: int = 0
    rerendered_tokens: int = 0
    forwards: int | None = 0
    round_trips: int = 0

    @classmethod
    def of(cls, usage: Usage, *, requests: int, forwards: int | None, round_trips: int) -> Figures:
        """Figures whose token counts are those of a usage."""
        shared = {name: getattr(usage, name) for name in cls.__struct_fields__ if hasattr(usage, name)}
        return cls(**shared, requests=requests, forwards=forwards, round_trips=round_trips)


class NodeCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one generation or select of one row costs; `first` and `last` are steps of the engine, from 1."""

    row: int
    node: int
    prompt_tokens: int
    cached_tokens: int
    prefill_tokens: int
    completion_tokens: int
    first: int
    last: int


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of a set of rows.

    Attributes:
        figures: of all rows together.
        plain_tokens: that plain requests would prefill without any cache: every prompt whole, every option of a select
            behind its prompt.
        nodes: of each generation and select.
    """

    figures: Figures
    plain_tokens: int
    nodes: tuple[NodeCost, ...]


def forecast(
    traces: Sequence[Trace], renderer: Renderer, *, chunk: int | None = None, max_running: int | None = None
) -> Forecast:
    """Count what the traced programs cost when they are run together.

    Args:
        chunk: most tokens of a step; `max_running`: most sequences in one.

    Raises:
        InvalidProgram: one of them waits for itself.
    """
    engine = _Engine(chunk, max_running)
    programs = [_Program(row, trace, renderer, engine) for row, trace in enumerate(traces)]
    for program in programs:
        program.advance()
    while engine.step():
        pass
    for program in programs:
        program.check_done()
    usage = sum((work.usage for work in engine.done), Usage())
    usage += Usage(
        joined_tokens=sum(program.joined for program in programs),
        rerendered_tokens=sum(program.rerendered for program in programs),
    )
    nodes = tuple(
        NodeCost(
            row=work.row,
            node=work.node.id,
            prompt_tokens=work.usage.prompt_tokens,
            cached_tokens=work.usage.cached_tokens,
            prefill_tokens=work.usage.prefill_tokens,
            completion_tokens=work.usage.completion_tokens,
            first=work.first,
            last=work.last,
        )
        for work in sorted(engine.done, key=lambda work: (work.row, work.node.id))
    )
    return Forecast(
        figures=Figures.of(
            usage,
            requests=len(engine.done),
            forwards=engine.steps,
            round_trips=sum(trace.num_fragments for trace in traces),
        ),
        plain_tokens=sum(work.plain_tokens for work in engine.done),
        nodes=nodes,
    )


# --- the engine -----------------------------------------------------------------------------------------------------

_Tree = dict[int, "_Tree"]


class _Request:
    """A sequence to compute; `draws` are the ids that it will draw."""

    def __init__(self, ids: list[int], draws: Sequence[int] = (), *, limit: int | None = None, scored: bool = False):
        self.ids = ids
        self.draws = draws
        self.prompt_len = len(ids)
        self.limit = len(ids) - 1 if limit is None else limit  # most tokens that may be taken from the cache
        self.scored = scored
        self.position = 0
        self.drawn = 0
        self.cached = 0
        self.prefilled = 0
        self.cursor: _Tree | None = None
        self.work: _Work | None = None

    @property
    def done(self) -> bool:
        return self.position >= self.prompt_len and self.drawn >= len(self.draws)

    def find(self, tree: _Tree) -> None:
        """Go on along what is cached."""
        here = tree if self.cursor is None else self.cursor
        start = self.position
        while self.position < self.limit and (found := here.get(self.ids[self.position])) is not None:
            here = found
            self.position += 1
        self.cursor = here
        if not self.scored:
            self.cached += self.position - start

    def compute(self, num_tokens: int) -> int:
        """Compute at most so many tokens; how many. Draws where the last one is computed."""
        count = min(num_tokens, len(self.ids) - self.position)
        here = self.cursor if self.cursor is not None else {}
        for token in self.ids[self.position : self.position + count]:
            here = here.setdefault(token, {})
        self.cursor = here
        self.prefilled += max(0, min(self.position + count, self.prompt_len) - self.position)
        self.position += count
        if self.position == len(self.ids) and self.drawn < len(self.draws):
            self.ids.append(self.draws[self.drawn])
            self.drawn += 1
        return count

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.cached + self.prefilled,
            cached_tokens=self.cached,
            prefill_tokens=self.prefilled,
            completion_tokens=self.drawn,
            scored_tokens=self.prefilled if self.scored else 0,
        )


class _Work:
    """One generation or select under way."""

    def __init__(self, row: int, node: Gen | Select, requests: list[_Request], finish: Callable[[], None]) -> None:
        self.row = row
        self.node = node
        self.requests = requests
        self.finish = finish
        self.first = 0
        self.last = 0
        self.plain_tokens = 0
        for request in requests:
            request.work = self

    @property
    def usage(self) -> Usage:
        return sum((request.usage() for request in self.requests), Usage())


class _Engine:
    """Steps over requests."""

    def __init__(self, chunk: int | None, max_running: int | None) -> None:
        self._chunk = chunk
        self._max_running = max_running
        self._tree: _Tree = {}
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self.steps = 0
        self.done: list[_Work] = []
        self._fresh = 1 << 40

    def new_ids(self, count: int) -> list[int]:
        """Ids that nothing else has: tokens that are not known."""
        self._fresh += count
        return list(range(self._fresh - count, self._fresh))

    def add(self, work: _Work) -> None:
        self._waiting.extend(work.requests)

    def step(self) -> bool:
        """One step; False when there is nothing to do."""
        if not self._running and not self._waiting:
            return False
        self.steps += 1
        left = self._chunk if self._chunk is not None else 1 << 60
        decoding = [request for request in self._running if request.drawn]
        prefilling = [request for request in self._running if not request.drawn]
        for request in (*decoding, *prefilling):
            left -= self._advance(request, left)
        while left > 0 and self._waiting and (self._max_running is None or len(self._running) < self._max_running):
            request = self._waiting.popleft()
            self._running.append(request)
            left -= self._advance(request, left)
        ended = [request for request in self._running if request.done]
        self._running = [request for request in self._running if not request.done]
        for work in dict.fromkeys(request.work for request in ended):
            if work is not None and all(request.done for request in work.requests):
                work.last = self.steps
                self.done.append(work)
                work.finish()
        return True

    def _advance(self, request: _Request, left: int) -> int:
        if left <= 0:
            return 0
        request.find(self._tree)
        if request.work is not None and not request.work.first:
            request.work.first = self.steps
        return request.compute(left)


# --- programs -------------------------------------------------------------------------------------------------------


@dataclass
class _Branch:
    id: int
    state: RenderedState
    text_at_fork: int = 0
    len_at_fork: int = 0
    queue: deque[Node] = field(default_factory=deque)
    busy: bool = False
    marks: dict[str, RenderedState] = field(default_factory=dict)


class _Program:
    """One row: its branches, executed as the engine executes them."""

    def __init__(self, row: int, trace: Trace, renderer: Renderer, engine: _Engine) -> None:
        self.joined = 0
        self.rerendered = 0
        self._row = row
        self._trace = trace
        self._renderer = renderer
        self._engine = engine
        self._values: dict[int, str] = {}  # by node
        self._reads = reads_of(trace.graph.nodes)
        self._nodes: dict[int, list[Node]] = {}
        for node in trace.graph.nodes:
            self._nodes.setdefault(node.branch, []).append(node)
        self._branches: dict[int, _Branch] = {}
        self._texts: dict[int, str] = {}
        self._begin(MAIN_BRANCH, renderer.state())

    def _begin(self, id: int, state: RenderedState) -> None:
        queue = deque(self._nodes.get(id, ()))
        self._branches[id] = _Branch(id, state, len(state.text), len(state.ids), queue)

    def advance(self) -> None:
        """Execute what can be executed."""
        moved = True
        while moved:
            moved = False
            for branch in list(self._branches.values()):
                while branch.queue and not branch.busy and self._execute(branch, branch.queue[0]):
                    branch.queue.popleft()
                    moved = True

    def check_done(self) -> None:
        """Raise where something still waits."""
        for branch in self._branches.values():
            if branch.queue:
                raise InvalidProgram(
                    "the program waits for a value that never comes", location=branch.queue[0].location
                )

    def _execute(self, branch: _Branch, node: Node) -> bool:
        """Run a node; False when it has to wait. Nodes that no text and no token come of are passed by."""
        state = branch.state
        match node:
            case Text(segments=segments):
                texts = [self._text_of(node, segment) for segment in segments]
                if any(text is None for text in texts):
                    return False
                state.add_text("".join(text or "" for text in texts))
            case Tokens(token_ids=ids):
                state.add_ids(ids)
            case Role(role=role, begin=begin):
                before = state.rerendered
                state.begin(role) if begin else state.end()
                self.rerendered += state.rerendered - before
            case Gen():
                self._generate(branch, node)
            case Select():
                self._select(branch, node)
            case Fork(children=children):
                state.flush()
                for child in children:
                    self._begin(child, state.copy())
            case Join(children=children, mode=mode):
                joined = [self._branches.get(child) for child in children]
                if any(child is None or not self._is_done(child) for child in joined):
                    return False
                if mode == "append":
                    self._append(branch, [child for child in joined if child is not None])
            case Release():
                if any(branch.id in n.children for other in self._branches.values() for n in _joins(other.queue)):
                    return False
            case Mark(label=label):
                state.flush()
                branch.marks[label] = state.copy()
            case Rewind(label=label) if label in branch.marks:
                branch.state = branch.marks[label].copy()
            case _:
                pass
        return True

    def _is_done(self, branch: _Branch) -> bool:
        return not branch.busy and (not branch.queue or isinstance(branch.queue[0], Release))

    def _append(self, branch: _Branch, children: Iterable[_Branch]) -> None:
        for child in children:
            branch.state.add_text(child.state.text[child.text_at_fork :])
            self.joined += len(child.state.ids) - child.len_at_fork

    def _text_of(self, node: Text, segment: Segment) -> str | None:
        if isinstance(segment, LiteralText):
            return segment.text
        if segment.branch == ARGUMENTS:
            return "{" + segment.name + "}"
        if segment.name == "text()":
            other = self._branches.get(segment.branch)
            return other.state.text if other is not None else ""
        source = self._reads.of(segment, node.id)
        return self._values.get(source) if source is not None else None

    def _generate(self, branch: _Branch, node: Gen) -> None:
        state = branch.state
        state.flush()
        given = self._trace.values.get(node.id)
        if given is None:
            length = most_tokens(node, self._renderer)
            text = self._renderer.filler(length)
            draws = self._engine.new_ids(length)
        else:
            probe = state.copy()
            probe.add_generated(given)
            text, draws = given, list(probe.ids[len(state.ids) :])
        request = _Request(list(state.ids), draws)

        def finish() -> None:
            state.add_generated(text, draws)
            self._done(branch, node, text)

        work = _Work(self._row, node, [request], finish)
        work.plain_tokens = request.prompt_len
        branch.busy = True
        self._engine.add(work)

    def _select(self, branch: _Branch, node: Select) -> None:
        state = branch.state
        options = state.options(node.choices)
        paths = [tuple(path) for path in options.paths]
        base = list(state.ids)
        requests = [_Request(list(base), limit=len(base) - 1)]
        asked: set[tuple[int, ...]] = {()}
        for path in paths:
            own = [k for k in range(1, len(path)) if path[:k] not in asked]
            asked.update(path[:k] for k in own)
            if own:
                limit = len(base) + own[0] - 1
                requests.append(_Request([*base, *path[: own[-1]]], limit=limit, scored=True))
        if node.method == "unconditional_likelihood_normalized":
            requests += [_Request(list(path[:-1]), limit=0, scored=True) for path in paths if len(path) > 1]
        chosen = self._trace.values.get(node.id, node.choices[0])
        index = node.choices.index(chosen)

        def finish() -> None:
            state.choose(chosen, paths[index])
            self._done(branch, node, chosen)

        work = _Work(self._row, node, requests, finish)
        work.plain_tokens = sum(len(base) + len(path) for path in paths)
        branch.busy = True
        self._engine.add(work)

    def _done(self, branch: _Branch, node: Gen | Select, value: str) -> None:
        self._values[node.id] = value
        branch.busy = False
        self.advance()


def most_tokens(node: Gen, renderer: Renderer) -> int:
    """How long a generation may become: its budget, or what its constraint leaves of it.

    Example:
        >>> from sgl.lang.rendering import PlainRenderer, words
        >>> most_tokens(Gen(id=0, name="x", constraint=Regex("[1-5]")), PlainRenderer("words", words))
        1
    """
    budget = node.sampling.max_new_tokens
    match node.constraint:
        case Choices(options=options):
            return min(budget, max(map(renderer.count, options)))
        case Regex(pattern=pattern):
            return min(budget, _widest(pattern))
        case _:
            return budget


def _widest(pattern: str) -> int:
    """Most characters that a pattern matches, as Python's own reader of patterns knows it."""
    reader = getattr(re, "_parser", None)
    return int(reader.parse(pattern).getwidth()[1]) if reader is not None else 2**31


def _joins(nodes: Iterable[Node]) -> list[Join]:
    return [node for node in nodes if isinstance(node, Join)]


def longest_path(graph: Graph, steps: Mapping[int, int]) -> list[Node]:
    """The chain of nodes, each waiting for the one before, that takes the most steps.

    Args:
        steps: per node id, what it takes; nothing for others.
    """
    total: list[int] = []
    before: list[int | None] = []
    for position, needed in enumerate(needs(graph)):
        best = max((n for n in needed if n < position), key=lambda n: total[n], default=None)
        before.append(best)
        total.append(steps.get(graph.nodes[position].id, 0) + (total[best] if best is not None else 0))
    if not total:
        return []
    at: int | None = max(range(len(total)), key=total.__getitem__)
    path: list[Node] = []
    while at is not None:
        path.append(graph.nodes[at])
        at = before[at]
    return path[::-1]
