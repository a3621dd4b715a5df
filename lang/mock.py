"""`MockBackend`: runs programs without a model, for tests. Ships to users.

Owns scripted answers and a plain executor of request graphs on a thread of its own, like a real backend. It records
every graph and prompt. What it does not imitate: tokens are words with the space before them (`max_new_tokens` counts
those), constraints are not enforced, the chosen option has probability 1, roles are `<|im_start|>role` lines.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeAlias

from sgl.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineDead,
    GenerationError,
    InternalError,
    InvalidProgram,
    SglError,
    StateLost,
    Unsupported,
)
from sgl.grammars.formats import message_parser, reasoning_format
from sgl.grammars.spec import Choices, Regex
from sgl.lang.backend import EventSink
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
    Media,
    Node,
    ProgramOptions,
    Release,
    Rewind,
    Role,
    Sampling,
    Select,
    StateHandle,
    StateText,
    Text,
    TextEvent,
    TokenLogprob,
    Tokens,
    Usage,
    ValueEvent,
    validate,
)
from sgl.lang.rendering import PlainRenderer, Renderer, piece_id, words

Answer: TypeAlias = Callable[[str, Gen], str]
Answers: TypeAlias = Iterable[str] | Mapping[str, str | list[str]] | Answer

_SAMPLES = ("0", "0.5", '"text"', "True", "a", "A", "")


def _ids(text: str) -> tuple[int, ...]:
    return tuple(map(piece_id, words(text)))


class MockBackend:
    """A backend with scripted answers.

    Args:
        answers: what generations give: a list in order, a dict by name (a list value is used up in order), or a
            function of the prompt and the node. Cut at stops and at `max_new_tokens` words. Without an answer a
            generation gives `<name>`, or something simple that matches its regex.
        choices: per name of a select, the option to take; the first option otherwise.
        errors: per name of a generation or select, the error to fail with there.
        die_at: the backend dies when it reaches this name: every open program fails with `EngineDead`.
        delay_s: seconds that every generation takes (a cancel ends the wait).

    Attributes:
        graphs: every submitted graph; `prompts`: (name, prompt text) of every generation and select executed.

    Example:
        >>> import sgl
        >>> mock = sgl.MockBackend({"city": "Paris. And"})
        >>> @sgl.function
        ... def capital(s):
        ...     s += "France: " + sgl.gen("city", stop=".")
        >>> capital.run(backend=mock)["city"], mock.prompts, len(mock.graphs)
        ('Paris', [('city', 'France: ')], 1)
    """

    def __init__(
        self,
        answers: Answers = (),
        *,
        choices: Mapping[str, str] | None = None,
        errors: Mapping[str, Exception] | None = None,
        die_at: str | None = None,
        delay_s: float = 0.0,
    ) -> None:
        self.graphs: list[Graph] = []
        self.prompts: list[tuple[str, str]] = []
        self.epoch = uuid.uuid4().hex
        self._function: Answer | None = answers if callable(answers) else None
        self._by_name: dict[str, str | deque[str]] = {}
        self._in_order: deque[str] | None = None
        if isinstance(answers, Mapping):
            self._by_name = {key: v if isinstance(v, str) else deque(v) for key, v in answers.items()}
        elif not callable(answers):
            listed = list(answers)
            self._in_order = deque(listed) if listed else None
        self._choices = dict(choices or {})
        self._errors = dict(errors or {})
        self._die_at = die_at
        self.delay_s = delay_s
        self._lock = threading.Lock()
        self._sessions: set[MockSession] = set()
        self._jobs: deque[Callable[[], None]] = deque()
        self._working = False
        self._dead: SglError | None = None

    # --- the protocol ---

    def open(self, sink: EventSink, options: ProgramOptions) -> MockSession:
        """Start a program.

        Raises:
            EngineDead: the backend died or was shut down.
        """
        with self._lock:
            if self._dead is not None:
                raise EngineDead(self._dead.message, hint="make a new backend")
            session = MockSession(self, sink, options)
            self._sessions.add(session)
        return session

    def flush_cache(self) -> bool:
        """There is no cache: False."""
        return False

    def server_info(self) -> Mapping[str, Any]:
        """That this is the mock, and how many programs are open."""
        with self._lock:
            return {"backend": "mock", "epoch": self.epoch, "num_open": len(self._sessions)}

    def renderer(self) -> Renderer:
        """What counts as the mock does."""
        return PlainRenderer("words", words, exact=True)

    def shutdown(self) -> None:
        """End; open programs fail with `EngineDead`. Idempotent."""
        self.die(EngineDead("the mock backend was shut down"))

    def __enter__(self) -> MockBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def die(self, error: SglError | None = None) -> None:
        """End like a crash: every open program fails with `EngineDead`."""
        with self._lock:
            if self._dead is not None:
                return
            self._dead = error or EngineDead("the mock backend died")
            sessions = list(self._sessions)
        for session in sessions:
            session._stop.set()
            self._post(partial(session._fail, self._dead))

    # --- the thread ---

    def _post(self, job: Callable[[], None]) -> None:
        """Have a job done on the backend's thread, which lives while there are jobs."""
        with self._lock:
            self._jobs.append(job)
            if self._working:
                return
            self._working = True
        threading.Thread(target=self._work, name="sgl-mock", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._working = False
                    return
                job = self._jobs.popleft()
            job()

    # --- answers ---

    def _answer(self, node: Gen, prompt: str) -> str:
        if self._function is not None:
            return self._function(prompt, node)
        if self._in_order is not None:
            if not self._in_order:
                raise GenerationError(f"the mock has no answer left for {node.name!r}", hint="give it more answers")
            return self._in_order.popleft()
        found = self._by_name.get(node.name)
        if isinstance(found, str):
            return found
        if found is not None:
            if not found:
                raise GenerationError(f"the mock has no answer left for {node.name!r}", hint="give it more answers")
            return found.popleft()
        match node.constraint:
            case Regex(pattern=pattern):
                return next((sample for sample in _SAMPLES if re.fullmatch(pattern, sample)), f"<{node.name}>")
            case Choices(options=options):
                return options[0]
            case None:
                return f"<{node.name}>"
            case _:
                return "{}"


class _Branch:
    def __init__(self, id: int, text: str, role: str | None = None) -> None:
        self.id = id
        self.text = text
        self.start = len(text)
        self.marks: dict[str, str] = {}
        self.role = role


class MockSession:
    """One program on the mock. All execution happens on the backend's thread."""

    def __init__(self, backend: MockBackend, sink: EventSink, options: ProgramOptions) -> None:
        self._backend = backend
        self._sink = sink
        self._options = options
        self._stop = threading.Event()
        self._ended = False
        self._lost: SglError | None = None
        self._branches = {MAIN_BRANCH: _Branch(MAIN_BRANCH, "")}
        self._values: dict[tuple[int, str], str] = {}
        self._lineage: dict[int, int] = {}
        self._pending: list[Node] = []
        self._touched: set[int] = set()
        self._usage = Usage()
        self._finish = False
        self._node: Node | None = None
        if options.deadline_s is not None:
            timer = threading.Timer(options.deadline_s, self._expire)
            timer.daemon = True
            timer.start()
            self._timer: threading.Timer | None = timer
        else:
            self._timer = None

    # --- the protocol ---

    def submit(self, graph: Graph, *, finish: bool = False) -> None:
        """Execute the next fragment."""
        self._backend.graphs.append(graph)
        self._backend._post(lambda: self._run(graph, finish))

    def read_state(self, branch: int) -> Future[StateText]:
        """The branch's text after everything submitted so far."""
        future: Future[StateText] = Future()

        def answer() -> None:
            found = self._branches.get(branch)
            if self._ended or found is None:
                future.set_exception(self._lost or StateLost(f"branch {branch} is not alive"))
            else:
                future.set_result(StateText(found.text, _ids(found.text)))

        self._backend._post(answer)
        return future

    def cancel(self) -> None:
        """Stop; `FailedEvent` with `Cancelled` comes unless the program had ended."""
        self._stop.set()
        self._backend._post(lambda: self._fail(Cancelled(f"program {self._options.name!r} was cancelled")))

    # --- on the backend's thread ---

    def _expire(self) -> None:
        self._stop.set()
        error = DeadlineExceeded(f"program {self._options.name!r} ran longer than {self._options.deadline_s} s")
        self._backend._post(lambda: self._fail(error))

    def _emit(self, event: Event) -> None:
        self._sink(event)

    def _close(self, lost: SglError) -> None:
        self._ended = True
        self._lost = lost
        self._branches.clear()
        self._pending.clear()
        if self._timer is not None:
            self._timer.cancel()
        with self._backend._lock:
            self._backend._sessions.discard(self)

    def _fail(self, error: SglError | None, node: Node | None = None) -> None:
        if self._ended or error is None:
            return
        if node is not None:
            error.at(node.location)
        self._close(StateLost(f"program {self._options.name!r} failed: {error.message}"))
        self._emit(FailedEvent(error.to_info(), node.id if node is not None else None, node.branch if node else None))

    def _run(self, graph: Graph, finish: bool) -> None:
        if self._ended:
            return
        try:
            self._check(graph)
        except SglError as error:
            self._fail(error)
            return
        self._lineage.update({c: node.branch for node in graph.nodes if isinstance(node, Fork) for c in node.children})
        self._pending.extend(graph.nodes)
        self._touched.update(node.branch for node in graph.nodes)
        self._finish = self._finish or finish
        moved = True
        while moved and self._pending and not self._ended:
            moved = self._pass()
        if self._ended or self._stop.is_set():
            return
        if self._pending:
            if self._finish:
                self._fail(InvalidProgram("a value that the program waits for never comes"), self._pending[0])
            return
        if self._finish:
            text = self._branches[MAIN_BRANCH].text if self._options.want_text and MAIN_BRANCH in self._branches else ""
            self._close(StateLost(f"program {self._options.name!r} has ended"))
            self._emit(DoneEvent(usage=self._usage, text=text))
            return
        live = [self._branches[branch] for branch in sorted(self._touched) if branch in self._branches]
        self._touched.clear()
        self._emit(HandlesEvent(tuple(StateHandle(self._backend.epoch, b.id, len(b.text)) for b in live)))

    def _check(self, graph: Graph) -> None:
        for handle in graph.handles:
            branch = self._branches.get(handle.branch)
            if handle.epoch != self._backend.epoch or branch is None or len(branch.text) != handle.length:
                raise StateLost(f"the state of branch {handle.branch} is gone", hint="run the program again")
        born = {child for node in self._pending if isinstance(node, Fork) for child in node.children}
        gone = {node.branch for node in self._pending if isinstance(node, Release)}
        validate(graph, (set(self._branches) | born) - gone)

    def _pass(self) -> bool:
        """Execute what can be executed, in order; branches that wait are skipped. Whether anything was done."""
        waiting: list[Node] = []
        blocked: set[int] = set()
        nodes, self._pending = self._pending, []
        for position, node in enumerate(nodes):
            if self._stop.is_set():
                self._pending = waiting + nodes[position:]
                return False
            busy = {other.branch for other in waiting}
            held = isinstance(node, Join) and bool(busy & set(node.children))
            if isinstance(node, Release):
                held = any(isinstance(other, Join) and node.branch in other.children for other in waiting)
            if node.branch in blocked or held or node.branch not in self._branches or not self._ready(node):
                blocked.add(node.branch)
                waiting.append(node)
                continue
            try:
                self._execute(node, self._branches[node.branch])
            except SglError as error:
                self._fail(error, node)
                return False
            except Exception as error:  # noqa: BLE001 - a user's answer function: it fails the program
                self._fail(InternalError(f"the mock's answer raised {type(error).__name__}: {error}"), node)
                return False
            if self._ended:
                return False
        self._pending = waiting
        return len(waiting) < len(nodes)

    def _ready(self, node: Node) -> bool:
        if not isinstance(node, Text):
            return True
        return all(isinstance(s, LiteralText) or self._lookup(s.branch, s.name) is not None for s in node.segments)

    def _lookup(self, branch: int, name: str) -> str | None:
        walk: int | None = branch
        while walk is not None:
            if (walk, name) in self._values:
                return self._values[(walk, name)]
            walk = self._lineage.get(walk)
        return None

    def _append(self, branch: _Branch, text: str) -> None:
        branch.text += text
        if self._options.stream and text:
            self._emit(TextEvent(branch.id, text))

    def _execute(self, node: Node, branch: _Branch) -> None:
        match node:
            case Text():
                parts = [
                    s.text if isinstance(s, LiteralText) else self._lookup(s.branch, s.name) for s in node.segments
                ]
                self._append(branch, "".join(part or "" for part in parts))
            case Tokens():
                self._append(branch, "".join(f"<{token_id}>" for token_id in node.token_ids))
            case Role():
                self._append(branch, f"<|im_start|>{node.role}\n" if node.begin else "<|im_end|>\n")
                branch.role = node.role if node.begin else None
            case Media():
                self._append(branch, f"<{node.kind} {node.digest[:8]}>")
            case Gen():
                self._generate(node, branch)
            case Select():
                self._select(node, branch)
            case Fork():
                for child in node.children:
                    self._branches[child] = _Branch(child, branch.text, branch.role)
                    self._touched.add(child)
            case Join():
                if node.mode == "append":
                    for child in node.children:
                        joined = self._branches.get(child)
                        if joined is None:
                            raise InvalidProgram("join of a branch that was released")
                        self._append(branch, joined.text[joined.start :])
                self._emit(JoinedEvent(node.id, branch.id))
            case Release():
                del self._branches[branch.id]
            case Mark():
                branch.marks[node.label] = branch.text
            case Rewind():
                if node.label not in branch.marks:
                    raise InvalidProgram(f"no mark {node.label!r} on this branch")
                branch.text = branch.marks[node.label]
            case _:
                raise Unsupported(f"the mock cannot execute {type(node).__name__} nodes")

    def _begin(self, node: Gen | Select, prompt: str) -> None:
        """What happens before a value: faults that were asked for, the delay, the record."""
        backend = self._backend
        if node.name == backend._die_at:
            backend.die()
            self._fail(backend._dead)
            return
        if node.name in backend._errors:
            error = backend._errors[node.name]
            raise SglError.from_info(error.to_info()) if isinstance(error, SglError) else error
        backend.prompts.append((node.name, prompt))
        if backend.delay_s:
            self._stop.wait(backend.delay_s)

    def _generate(self, node: Gen, branch: _Branch) -> None:
        prompt = branch.text
        self._begin(node, prompt)
        if self._ended or self._stop.is_set():
            return
        sampling = node.sampling
        text, finish, matched = _cut(self._backend._answer(node, prompt), node)
        spoken = words(text)
        if self._options.stream:
            for word in spoken:
                branch.text += word
                self._emit(DeltaEvent(node.id, branch.id, node.name, word, _ids(word)))
        else:
            branch.text += text
        if node.reasoning is not None:
            answer = message_parser(reasoning=reasoning_format(node.reasoning)).parse(text).content
            branch.text = prompt + answer
        self._value(
            node,
            ValueEvent(
                node=node.id,
                branch=branch.id,
                name=node.name,
                value=text,
                token_ids=_ids(text),
                finish=finish,
                matched=matched,
                usage=self._used(prompt, len(spoken)),
                logprobs=tuple(TokenLogprob(id, 0.0) for id in _ids(text)) if sampling.return_logprob else (),
                prompt_logprobs=_prompt_logprobs(prompt, sampling),
            ),
        )

    def _select(self, node: Select, branch: _Branch) -> None:
        prompt = branch.text
        self._begin(node, prompt)
        if self._ended or self._stop.is_set():
            return
        choice = self._backend._choices.get(node.name, node.choices[0])
        if choice not in node.choices:
            raise GenerationError(f"the mock is to choose {choice!r}, which is not an option of {node.name!r}")
        self._append(branch, choice)
        scores = tuple(
            ChoiceScore(
                option,
                _ids(option),
                tuple(0.0 if option == choice else -10.0 for _ in _ids(option)),
                0.0 if option == choice else -10.0,
                1.0 if option == choice else 0.0,
            )
            for option in node.choices
        )
        self._value(
            node,
            ValueEvent(
                node=node.id,
                branch=branch.id,
                name=node.name,
                value=choice,
                token_ids=_ids(choice),
                usage=self._used(prompt, 0),
                choices=scores,
            ),
        )

    def _used(self, prompt: str, completion: int) -> Usage:
        num = len(words(prompt))
        return Usage(prompt_tokens=num, prefill_tokens=num, completion_tokens=completion)

    def _value(self, node: Gen | Select, event: ValueEvent) -> None:
        self._usage += event.usage
        self._values[(event.branch, node.name)] = event.value
        self._emit(event)


def _prompt_logprobs(prompt: str, sampling: Sampling) -> tuple[TokenLogprob, ...]:
    """Every word is certain, except the first, which nothing predicts."""
    start = sampling.logprob_start_len
    if not sampling.return_logprob or start < 0:
        return ()
    entries = [TokenLogprob(id, 0.0 if position else None) for position, id in enumerate(_ids(prompt))]
    return tuple(entries[start:])


def _cut(text: str, node: Gen) -> tuple[str, str, str | None]:
    """The answer up to the first stop or the budget of words; how it ended; the stop."""
    sampling = node.sampling
    spoken = words(text)
    finish = "stop"
    if len(spoken) > sampling.max_new_tokens:
        text, finish = "".join(spoken[: sampling.max_new_tokens]), "length"
    floor = len("".join(spoken[: sampling.min_new_tokens])) if sampling.min_new_tokens else 0
    for end in range(floor + 1, len(text) + 1) if sampling.stop or sampling.stop_regex else ():
        stops = [(end - len(stop), end) for stop in sampling.stop if text.endswith(stop, floor, end)]
        patterns = [re.compile(pattern).search(text, floor, end) for pattern in sampling.stop_regex]
        if found := stops + [match.span() for match in patterns if match is not None]:
            begin, end = min(found, key=lambda span: (span[0], -span[1]))
            return text[: end if sampling.no_stop_trim else begin], "stop", text[begin:end]
    return text, finish, None
