"""Programs executed the way a client of plain requests does it: the baseline of `sgl bench program --wall`.

Owns a backend that runs the same programs on an engine which never learns about them. Each generation becomes one
request with everything before it as its prompt, sent when its prompt is known; each option of a select becomes one
scoring request with the option behind the prompt, as APIs that score strings want it; forks, joins, marks and variables
are kept here, on the client's side. The engine sees no fork, no live state and no program, and tokenizes each prompt
anew.

The same calls, exactly: roles are sent as roles, and what was generated goes back as token ids (as text where a stop
string was cut off), so that greedy generations, and those with a seed of their own, give the same tokens as the program
does. Where the two differ: a generation without a seed draws from another one; a vocabulary of words may encode text
across the seam of a fork, a mark or a cut differently, as the client sends it in one piece; `DoneEvent` and
`read_state` carry the text without what the chat template adds to it, and no ids.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec

from sgl.errors import Cancelled, InternalError, InvalidParameter, InvalidProgram, SglError, StateLost, Unsupported
from sgl.lang.backend import Backend, EventSink, Session
from sgl.lang.graph import (
    MAIN_BRANCH,
    ChoiceScore,
    DeltaEvent,
    DoneEvent,
    Event,
    FailedEvent,
    Fork,
    Gen,
    Graph,
    HandlesEvent,
    Join,
    JoinedEvent,
    LiteralText,
    Mark,
    Node,
    ProgramOptions,
    Release,
    Rewind,
    Role,
    Select,
    StateHandle,
    StateText,
    Text,
    TextEvent,
    Tokens,
    Usage,
    ValueEvent,
    validate,
)
from sgl.runtime.selection import decide


class PlainBackend:
    """Runs programs as plain requests.

    Args:
        engine: what answers the requests; it is not owned.
        in_flight: most requests at a time; 1 is "one by one". Without it every request goes when its prompt is known.
        options_apart: each option of a select is a request, as for APIs that score strings. Without it a select is one
            request with all of them, for an engine that chooses by itself.

    Attributes:
        num_requests: sent so far.

    Example:
        >>> import sgl
        >>> @sgl.function
        ... def two(s):
        ...     s += "One " + sgl.gen("a") + " two " + sgl.gen("b")
        >>> backend = PlainBackend(sgl.MockBackend(["1", "2"]))
        >>> two.run(backend=backend)["b"], backend.num_requests
        ('2', 2)
    """

    def __init__(self, engine: Backend, in_flight: int | None = None, *, options_apart: bool = True) -> None:
        if in_flight is not None and in_flight < 1:
            raise InvalidParameter(f"in_flight is {in_flight}; expected at least 1", param="in_flight")
        self._engine = engine
        self.options_apart = options_apart
        self._lock = threading.Lock()
        self._free = in_flight
        self._waiting: deque[Callable[[], None]] = deque()
        self.num_requests = 0

    def open(self, sink: EventSink, options: ProgramOptions) -> PlainSession:
        """Start a program (see `sgl.lang.backend`)."""
        return PlainSession(self, sink, options)

    def flush_cache(self) -> bool:
        """The engine's."""
        return self._engine.flush_cache()

    def server_info(self) -> Mapping[str, Any]:
        """The engine's."""
        return self._engine.server_info()

    def shutdown(self) -> None:
        """Nothing: the engine belongs to whoever made it."""

    # --- requests ---

    def enter(self, start: Callable[[], None]) -> None:
        """Call `start` as soon as a request more may be under way; `leave` ends each."""
        with self._lock:
            if self._free == 0:
                self._waiting.append(start)
                return
            if self._free is not None:
                self._free -= 1
        start()

    def leave(self) -> None:
        """A request is over."""
        with self._lock:
            if not self._waiting:
                if self._free is not None:
                    self._free += 1
                return
            following = self._waiting.popleft()
        following()

    def send(self, graph: Graph, sink: EventSink) -> Session:
        """One plain request."""
        with self._lock:
            self.num_requests += 1
        session = self._engine.open(sink, ProgramOptions(name="plain", want_text=False))
        session.submit(graph, finish=True)
        return session


class _Read:
    """A queued `read_state`."""

    def __init__(self) -> None:
        self.answer: Future[StateText] = Future()


class _Branch:
    """A prompt as its client knows it: the nodes that a request with this prompt begins with."""

    def __init__(self, id: int, prompt: list[Node], text: str) -> None:
        self.id = id
        self.prompt = prompt
        self.text = text
        self.text_at_fork = len(text)
        self.prompt_at_fork = len(prompt)
        self.queue: deque[Node | _Read] = deque()
        self.busy = False
        self.marks: dict[str, tuple[list[Node], str]] = {}


class _Request:
    """One request under way."""

    def __init__(self, branch: _Branch, node: Gen | Select, asked: Gen | Select) -> None:
        self.branch = branch
        self.node = node
        self.asked = asked
        self.session: Session | None = None
        self.siblings: list[_Request] = []  # requests for the other options of a select, and itself
        self.value: ValueEvent | None = None
        self.over = False

    def graph(self) -> Graph:
        nodes = (*self.branch.prompt, self.asked)
        return Graph(nodes=tuple(msgspec.structs.replace(node, id=i, branch=0) for i, node in enumerate(nodes)))


class PlainSession:
    """One program (see `sgl.lang.backend.Session`): its branches and the requests it is waiting for."""

    def __init__(self, backend: PlainBackend, sink: EventSink, options: ProgramOptions) -> None:
        self._backend = backend
        self._sink = sink
        self._options = options
        self._lock = threading.RLock()
        self._branches = {MAIN_BRANCH: _Branch(MAIN_BRANCH, [], "")}
        self._alive = {MAIN_BRANCH}  # after everything submitted
        self._parents: dict[int, int] = {}
        self._unborn: dict[int, deque[Node | _Read]] = {}
        self._joins: Counter[int] = Counter()  # branch -> joins of it that are still queued
        self._values: dict[tuple[int, str], str] = {}
        self._requests: list[_Request] = []
        self._touched: set[int] = set()
        self._finish = False
        self._ended = False
        self._usage = Usage()

    def submit(self, graph: Graph, *, finish: bool = False) -> None:
        """Execute a whole program, or what is new of it."""
        with self._lock:
            if self._ended:
                return
            try:
                self._alive = validate(graph, self._alive)
            except SglError as error:
                self._fail(error)
                return
            for node in graph.nodes:
                if isinstance(node, Fork):
                    self._parents.update(dict.fromkeys(node.children, node.branch))
                elif isinstance(node, Join):
                    self._joins.update(node.children)
                self._queue(node.branch).append(node)
                self._touched.add(node.branch)
            self._finish = self._finish or finish
            self._advance()

    def read_state(self, branch: int) -> Future[StateText]:
        """The text of a live branch, after everything submitted so far."""
        read = _Read()
        with self._lock:
            if self._ended or branch not in self._alive:
                read.answer.set_exception(StateLost(f"branch {branch} is not alive"))
            else:
                self._queue(branch).append(read)
                self._advance()
        return read.answer

    def cancel(self) -> None:
        """Stop the program and every request of it."""
        with self._lock:
            self._fail(Cancelled(f"program {self._options.name!r} was cancelled"))

    # --- executing nodes; the lock is held ---

    def _queue(self, branch: int) -> deque[Node | _Read]:
        if branch in self._branches:
            return self._branches[branch].queue
        return self._unborn.setdefault(branch, deque())

    def _advance(self) -> None:
        """Execute what can be executed; at the end of it all, say so."""
        moved = True
        while moved and not self._ended:
            moved = False
            for branch in list(self._branches.values()):
                while branch.queue and not branch.busy and not self._ended:
                    node = branch.queue[0]
                    try:
                        done = self._execute(branch, node)
                    except SglError as error:
                        self._fail(error.at(None if isinstance(node, _Read) else node.location), node)
                        return
                    if not done:
                        break
                    branch.queue.popleft()
                    moved = True
        if not self._ended and not any(branch.busy for branch in self._branches.values()):
            self._settle()

    def _execute(self, branch: _Branch, node: Node | _Read) -> bool:
        """Run one node; False when it has to wait."""
        match node:
            case _Read():
                node.answer.set_result(StateText(text=branch.text))
            case Text():
                texts = [
                    segment.text if isinstance(segment, LiteralText) else self._lookup(segment.branch, segment.name)
                    for segment in node.segments
                ]
                known = [text for text in texts if text is not None]
                if len(known) < len(texts):
                    return False
                self._write(branch, "".join(known))
            case Tokens() | Role():
                branch.prompt.append(node)
            case Select() if self._backend.options_apart:
                branch.busy = True
                options = [msgspec.structs.replace(node, choices=(choice,), temperature=0.0) for choice in node.choices]
                requests = [_Request(branch, node, option) for option in options]
                for request in requests:
                    request.siblings = requests
                for request in requests:
                    self._ask(request)
            case Gen() | Select():
                branch.busy = True
                self._ask(_Request(branch, node, node))
            case Fork():
                for id in node.children:
                    child = _Branch(id, list(branch.prompt), branch.text)
                    child.queue = self._unborn.pop(id, deque())
                    self._branches[id] = child
            case Join():
                return self._join(branch, node)
            case Release():
                if self._joins[branch.id]:
                    return False
                del self._branches[branch.id]
            case Mark():
                branch.marks[node.label] = (list(branch.prompt), branch.text)
            case Rewind():
                if node.label not in branch.marks:
                    raise InvalidProgram(f"no mark {node.label!r} on this branch")
                prompt, branch.text = branch.marks[node.label]
                branch.prompt = list(prompt)
            case _:
                raise Unsupported(f"plain requests cannot express {type(node).__name__} nodes")
        return True

    def _join(self, branch: _Branch, node: Join) -> bool:
        children = [self._branches[id] for id in node.children if id in self._branches]
        if len(children) < len(node.children) or not all(_is_done(child) for child in children):
            return False
        if node.mode == "append":
            for child in children:
                if any(isinstance(each, Role) for each in child.prompt[child.prompt_at_fork :]):
                    raise Unsupported("chat turns of a joined branch cannot be appended as plain text")
                self._write(branch, child.text[child.text_at_fork :])
        self._joins.subtract(node.children)
        self._emit(JoinedEvent(node=node.id, branch=branch.id))
        return True

    def _write(self, branch: _Branch, text: str) -> None:
        branch.prompt.append(Text(id=0, segments=(LiteralText(text),)))
        branch.text += text
        if self._options.stream and text:
            self._emit(TextEvent(branch=branch.id, text=text))

    def _lookup(self, branch: int, name: str) -> str | None:
        walk: int | None = branch
        while walk is not None:
            if (walk, name) in self._values:
                return self._values[(walk, name)]
            walk = self._parents.get(walk)
        return None

    # --- requests ---

    def _ask(self, request: _Request) -> None:
        self._requests.append(request)
        self._backend.enter(partial(self._start, request))

    def _start(self, request: _Request) -> None:
        """The backend's turn for a request; perhaps on another thread, and after the program's end."""
        with self._lock:
            ended = self._ended
            if not ended:
                try:
                    request.session = self._backend.send(request.graph(), partial(self._on_event, request))
                except SglError as error:
                    self._fail(error, request.node)
                    ended = True
        if ended:
            self._backend.leave()

    def _on_event(self, request: _Request, event: Event) -> None:
        """An event of the engine, on its thread."""
        match event:
            case ValueEvent():
                request.value = event
            case DoneEvent():
                with self._lock:
                    request.over = True
                    if not self._ended:
                        self._answered(request)
                self._backend.leave()
            case FailedEvent():
                with self._lock:
                    request.over = True
                    self._fail(SglError.from_info(event.error), request.node)
                self._backend.leave()
            case _:
                pass

    def _answered(self, request: _Request) -> None:
        siblings = request.siblings or [request]
        if not all(each.over for each in siblings):
            return
        values = [each.value for each in siblings if each.value is not None]
        if len(values) < len(siblings):
            self._fail(InternalError("a request ended without a value"), request.node)
            return
        branch, node = request.branch, request.node
        value = _chosen(node, values) if isinstance(node, Select) and request.siblings else values[0]
        value = msgspec.structs.replace(value, node=node.id, branch=branch.id, name=node.name)
        self._requests = [each for each in self._requests if each not in siblings]
        self._usage += value.usage
        self._values[(branch.id, node.name)] = value.value
        whole = isinstance(node, Gen) and not isinstance(value.matched, str) and value.token_ids
        branch.prompt.append(
            Tokens(id=0, token_ids=value.token_ids) if whole else Text(id=0, segments=(LiteralText(value.value),))
        )
        branch.text += value.value
        branch.busy = False
        if self._options.stream:
            self._emit(DeltaEvent(node.id, branch.id, node.name, value.value, value.token_ids))
        self._emit(value)
        self._advance()

    # --- ends ---

    def _settle(self) -> None:
        """Nothing is under way: the program ends, waits for more, or waits for ever."""
        stuck = [branch.queue[0] for branch in self._branches.values() if branch.queue]
        if stuck or self._unborn:
            if self._finish:
                self._fail(InvalidProgram("the program waits for a value or a branch that never comes"))
            return
        if self._finish:
            main = self._branches.get(MAIN_BRANCH)
            self._ended = True
            self._emit(DoneEvent(usage=self._usage, text=main.text if main is not None else ""))
        elif self._touched:
            handles = tuple(StateHandle("", id, 0) for id in sorted(self._touched & set(self._branches)))
            self._touched.clear()
            if handles:
                self._emit(HandlesEvent(handles))

    def _fail(self, error: SglError, node: Node | _Read | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        for request in self._requests:
            if request.session is not None:
                request.session.cancel()
        lost = StateLost(f"program {self._options.name!r} failed: {error.message}")
        for queue in (*(branch.queue for branch in self._branches.values()), *self._unborn.values()):
            for each in queue:
                if isinstance(each, _Read):
                    each.answer.set_exception(lost)
        place = (None, None) if node is None or isinstance(node, _Read) else (node.id, node.branch)
        self._emit(FailedEvent(error=error.to_info(), node=place[0], branch=place[1]))

    def _emit(self, event: Event) -> None:
        self._sink(event)


def _is_done(branch: _Branch) -> bool:
    """Whether everything before the branch's release is done."""
    return not branch.busy and (not branch.queue or isinstance(branch.queue[0], Release))


def _chosen(node: Select, values: Sequence[ValueEvent]) -> ValueEvent:
    """The option that wins, from one scoring answer for each."""
    scores: list[ChoiceScore] = [value.choices[0] for value in values]
    best, decided = decide(
        node.choices,
        [score.token_ids for score in scores],
        [score.logprobs for score in scores],
        node.method,
        unconditional=[score.unconditional for score in scores] if all(score.unconditional for score in scores) else (),
        temperature=node.temperature,
        seed=node.seed or 0,
    )
    usage = sum((value.usage for value in values), Usage())
    return msgspec.structs.replace(
        values[best], value=node.choices[best], token_ids=decided[best].token_ids, usage=usage, choices=decided
    )
