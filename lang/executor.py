"""Executing request graphs on the client's side: what the mock and the API backends share.

Owns `GraphSession`: the branches of one program with their queues, values and joins, the order of events, fragments,
deadlines and cancellation. What a prompt is, and how a value comes about, a derived class says (`generate`, `select`).
All execution is a sequence of jobs, one at a time, that `post` runs on a thread of the backend; a generation that takes
long runs elsewhere and hands its result to `finish` in a job.

A branch executes its nodes in order and stops at one that has to wait: for a value, for a join, for its generation.
What fails ends the program with one `FailedEvent`, which names the node.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from sgl.errors import Cancelled, DeadlineExceeded, InternalError, InvalidProgram, SglError, StateLost, Unsupported
from sgl.lang.backend import EventSink
from sgl.lang.graph import (
    MAIN_BRANCH,
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
    Reads,
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
    Var,
    validate,
)


class Prompt(Protocol):
    """What a branch has said so far. `sgl.lang.rendering.RenderedState` is one."""

    @property
    def text(self) -> str:
        """All of it."""

    def add_text(self, text: str) -> None:
        """Append text as written."""

    def begin(self, role: str) -> None:
        """Begin a chat turn."""

    def end(self) -> None:
        """End the open turn."""

    def flush(self) -> None:
        """End a text unit, where there are such."""


P = TypeVar("P", bound=Prompt)


class Read:
    """A queued `read_state`."""

    def __init__(self, answer: Future[StateText]) -> None:
        self.answer = answer


class Branch(Generic[P]):
    """One prompt state of a running program."""

    def __init__(self, id: int, prompt: P) -> None:
        self.id = id
        self.prompt = prompt
        self.queue: deque[Node | Read] = deque()
        self.busy = False
        self.text_at_fork = len(prompt.text)
        self.num_streamed = self.text_at_fork
        self.marks: dict[str, P] = {}


class GraphSession(ABC, Generic[P]):
    """One program (see `sgl.lang.backend.Session`).

    Args:
        post: runs a job after those before it, on a thread of the backend.
        epoch: of the backend, for state handles.
        prompt: an empty one.
    """

    def __init__(
        self,
        sink: EventSink,
        options: ProgramOptions,
        post: Callable[[Callable[[], None]], None],
        epoch: str,
        prompt: P,
    ) -> None:
        self.options = options
        self.stop = threading.Event()
        self.ended = False
        self._sink = sink
        self._post = post
        self._epoch = epoch
        self._lost: SglError | None = None
        self._branches: dict[int, Branch[P]] = {MAIN_BRANCH: Branch(MAIN_BRANCH, prompt)}
        self._known = {MAIN_BRANCH}
        self._lineage: set[int] = set()  # branches that a fork makes
        self._reads = Reads()
        self._unborn: dict[int, deque[Node | Read]] = {}
        self._joining: Counter[int] = Counter()
        self._released: set[int] = set()
        self._values: dict[int, str] = {}  # by node
        self._touched: set[int] = set()
        self._usage = Usage()
        self._finish = False
        self._advancing = False
        self._timer: threading.Timer | None = None
        if options.deadline_s is not None:
            self._timer = threading.Timer(options.deadline_s, self._expire)
            self._timer.daemon = True
            self._timer.start()

    # --- what a derived class says ---

    def check(self, graph: Graph) -> None:
        """Raise `Unsupported` where this backend cannot execute a node; called before anything is done."""

    @abstractmethod
    def copy(self, prompt: P) -> P:
        """A prompt that continues this one."""

    @abstractmethod
    def generate(self, branch: Branch[P], node: Gen) -> None:
        """Begin a generation, which ends with `finish`, now or in a later job."""

    @abstractmethod
    def select(self, branch: Branch[P], node: Select) -> None:
        """Begin a select, which ends with `finish`, now or in a later job."""

    def add_media(self, branch: Branch[P], node: Media) -> None:
        """Append an image, video or audio part."""
        raise Unsupported(f"this backend takes no {node.kind}", location=node.location)

    def add_tokens(self, branch: Branch[P], node: Tokens) -> None:
        """Append token ids."""
        raise Unsupported("this backend takes no token ids", hint="give the text", location=node.location)

    def state_of(self, branch: Branch[P]) -> StateText:
        """What `read_state` answers."""
        return StateText(branch.prompt.text)

    def ending(self) -> None:
        """The program is over, however it ended."""

    # --- the protocol ---

    def submit(self, graph: Graph, *, finish: bool = False) -> None:
        """Execute the next fragment.

        Raises:
            Unsupported: this backend cannot execute one of the nodes. Nothing was submitted.
        """
        self.check(graph)
        self._post(lambda: self._take(graph, finish))

    def read_state(self, branch: int) -> Future[StateText]:
        """A branch after everything submitted so far."""
        answer: Future[StateText] = Future()

        def queue() -> None:
            if self.ended or (branch not in self._branches and branch not in self._lineage) or branch in self._released:
                answer.set_exception(self._lost or StateLost(f"branch {branch} is not alive"))
                return
            self._queue(branch).append(Read(answer))
            self.advance()

        self._post(queue)
        return answer

    def cancel(self) -> None:
        """Stop; `FailedEvent` with `Cancelled` comes unless the program had ended."""
        self.stop.set()
        self._post(lambda: self.fail(Cancelled(f"program {self.options.name!r} was cancelled")))

    # --- jobs ---

    def later(self, job: Callable[[], None]) -> None:
        """Run a job of this program, unless it has ended by then; what it raises ends the program."""

        def run() -> None:
            if self.ended:
                return
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - one program's fault must not end the others
                self.fail(_typed(error))

        self._post(run)

    def emit(self, event: Event) -> None:
        """Send an event, unless the program is stopped."""
        if not self.ended and not self.stop.is_set():
            self._sink(event)

    def finish(self, branch: Branch[P], node: Gen | Select, event: ValueEvent) -> None:
        """A value exists: tell it, and go on."""
        if self.ended:
            return
        self._usage += event.usage
        self._values[node.id] = event.value
        self.emit(event)
        branch.busy = False
        branch.num_streamed = len(branch.prompt.text)
        self.advance()

    def fail(self, error: SglError | None, node: Node | None = None) -> None:
        """End the program with an error."""
        if self.ended or error is None:
            return
        if node is not None:
            error.at(node.location)
        self._close(StateLost(f"program {self.options.name!r} failed: {error.message}"))
        self._sink(FailedEvent(error.to_info(), node.id if node else None, node.branch if node else None))

    def _expire(self) -> None:
        self.stop.set()
        error = DeadlineExceeded(f"program {self.options.name!r} ran longer than {self.options.deadline_s} s")
        self._post(lambda: self.fail(error))

    def _close(self, lost: SglError) -> None:
        self.ended = True
        self._lost = lost
        self.stop.set()
        for queue in (*(branch.queue for branch in self._branches.values()), *self._unborn.values()):
            for node in queue:
                if isinstance(node, Read):
                    node.answer.set_exception(lost)
        self._branches.clear()
        if self._timer is not None:
            self._timer.cancel()
        self.ending()

    def _take(self, graph: Graph, finish: bool) -> None:
        if self.ended:
            return
        try:
            self._check_handles(graph)
            self._known = validate(graph, self._known)
        except SglError as error:
            self.fail(error)
            return
        for node in graph.nodes:
            if isinstance(node, Fork):
                self._lineage.update(node.children)
                self._reads.forked(node.branch, node.children, node.id)
            elif isinstance(node, (Gen, Select)):
                self._reads.generated(node.branch, node.name, node.id)
            elif isinstance(node, Join):
                self._joining.update(node.children)
            self._queue(node.branch).append(node)
        self._touched.update(node.branch for node in graph.nodes)
        self._finish = self._finish or finish
        self.advance()

    def _check_handles(self, graph: Graph) -> None:
        for handle in graph.handles:
            branch = self._branches.get(handle.branch)
            if handle.epoch != self._epoch or branch is None or len(branch.prompt.text) != handle.length:
                raise StateLost(f"the state of branch {handle.branch} is gone", hint="run the program again")

    def _queue(self, branch: int) -> deque[Node | Read]:
        found = self._branches.get(branch)
        return found.queue if found is not None else self._unborn.setdefault(branch, deque())

    # --- nodes ---

    def advance(self) -> None:
        """Execute what can be executed, and end the program when nothing is left."""
        if self._advancing:
            return  # a generation that was done at once: the loop below goes on with its branch
        self._advancing = True
        try:
            moved = True
            while moved and self._going:
                moved = False
                for branch in list(self._branches.values()):
                    moved = self._run_branch(branch) or moved
            if self._going:
                self._rest()
        finally:
            self._advancing = False

    @property
    def _going(self) -> bool:
        return not self.ended and not self.stop.is_set()

    def _run_branch(self, branch: Branch[P]) -> bool:
        """Execute what a branch can execute; whether that was anything."""
        moved = False
        while branch.queue and not branch.busy and self._going:
            node = branch.queue[0]
            try:
                done = self._execute(branch, node)
            except BaseException as error:  # noqa: BLE001 - one program's fault must not end the others
                self.fail(_typed(error), None if isinstance(node, Read) else node)
                return False
            if not done:
                break
            if branch.queue and branch.queue[0] is node:
                branch.queue.popleft()
            moved = True
        return moved

    def _execute(self, branch: Branch[P], node: Node | Read) -> bool:
        """Run a node; False when it has to wait."""
        match node:
            case Read():
                node.answer.set_result(self.state_of(branch))
            case Text():
                parts = [s.text if isinstance(s, LiteralText) else self._lookup(s, node.id) for s in node.segments]
                if any(part is None for part in parts):
                    return False
                branch.prompt.add_text("".join(part or "" for part in parts))
            case Tokens():
                self.add_tokens(branch, node)
            case Role():
                branch.prompt.begin(node.role) if node.begin else branch.prompt.end()
            case Media():
                self.add_media(branch, node)
            case Gen() | Select():
                self._stream_text(branch)
                branch.busy = True
                branch.queue.popleft()  # it may be finished, and the branch go on, before this returns
                self.generate(branch, node) if isinstance(node, Gen) else self.select(branch, node)
            case Fork():
                branch.prompt.flush()
                for child in node.children:
                    self._branches[child] = Branch(child, self.copy(branch.prompt))
                    self._branches[child].queue.extend(self._unborn.pop(child, ()))
                    self._touched.add(child)
            case Join():
                return self._join(branch, node)
            case Release():
                if self._joining[branch.id]:
                    return False  # a join that stands before it has yet to read the branch
                self._released.add(branch.id)
                del self._branches[branch.id]
            case Mark():
                branch.prompt.flush()
                branch.marks[node.label] = self.copy(branch.prompt)
            case Rewind():
                if node.label not in branch.marks:
                    raise InvalidProgram(f"no mark {node.label!r} on this branch", location=node.location)
                branch.prompt = self.copy(branch.marks[node.label])
                branch.num_streamed = min(branch.num_streamed, len(branch.prompt.text))
            case _:
                raise Unsupported(f"this backend cannot execute {type(node).__name__} nodes", location=node.location)
        return True

    def _join(self, branch: Branch[P], node: Join) -> bool:
        children = [self._branches.get(child) for child in node.children]
        if any(child is None or not _is_joinable(child) for child in children):
            return False
        if node.mode == "append":
            for child in children:
                if child is not None:
                    branch.prompt.add_text(child.prompt.text[child.text_at_fork :])
        self._joining.subtract(node.children)
        self._stream_text(branch)
        self.emit(JoinedEvent(node.id, branch.id))
        return True

    def _lookup(self, variable: Var, at: int) -> str | None:
        source = self._reads.of(variable, at)
        return self._values.get(source) if source is not None else None

    def _stream_text(self, branch: Branch[P]) -> None:
        text = branch.prompt.text
        if self.options.stream and len(text) > branch.num_streamed:
            self.emit(TextEvent(branch.id, text[branch.num_streamed :]))
        branch.num_streamed = len(text)

    def _rest(self) -> None:
        """Nothing can be executed now: wait, say so, or end."""
        if any(branch.busy for branch in self._branches.values()):
            return
        stuck = next((branch.queue[0] for branch in self._branches.values() if branch.queue), None)
        if stuck is not None:
            error = InvalidProgram("a value that the program waits for never comes")
            self.fail(error, None if isinstance(stuck, Read) else stuck)
            return
        if not self._finish:
            live: Iterable[Branch[P]] = [self._branches[id] for id in sorted(self._touched) if id in self._branches]
            self._touched.clear()
            handles = tuple(StateHandle(self._epoch, branch.id, len(branch.prompt.text)) for branch in live)
            if handles:
                self.emit(HandlesEvent(handles))
            return
        main = self._branches.get(MAIN_BRANCH)
        text = ""
        if main is not None:
            self._stream_text(main)
            text = main.prompt.text if self.options.want_text else ""
        done = DoneEvent(usage=self._usage, text=text)
        self._close(StateLost(f"program {self.options.name!r} has ended"))
        self._sink(done)


def _is_joinable(branch: Branch[P]) -> bool:
    return not branch.busy and (not branch.queue or isinstance(branch.queue[0], (Release, Read)))


def _typed(error: BaseException) -> SglError:
    if isinstance(error, SglError):
        return error
    typed = InternalError(f"{type(error).__name__}: {error}", hint="see the cause")
    typed.__cause__ = error
    return typed
