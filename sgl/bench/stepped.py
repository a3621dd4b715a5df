"""An engine in this process whose requests are recorded: what the counters of `sgl bench program` are read from.

Owns one engine core, built as the worker builds it, the thread that steps it, and a record of each request in order of
admission. It is a backend of the language. Two things that a worker process does not do: nothing is stepped while it
is `held`, so that a wave of programs arrives as one whatever the threads do, and jobs run at once. So a workload of
static programs gives the same counters each time; programs that read their own values still race with each other.

Nothing in the engine is changed for this: requests are seen where a program hands them over (`EngineCore.watch`), and
their admission where the model first gets a chunk of theirs. An engine that fails ends every open program with its
error, and each later call with the same.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import numpy as np

from sgl.bench.belady import Access
from sgl.errors import EngineDead, InternalError, SglError
from sgl.lang.backend import EventSink
from sgl.lang.graph import DoneEvent, Event, FailedEvent, Graph, ProgramOptions, StateText, Usage
from sgl.runtime.config import config_from_mapping
from sgl.runtime.core import EngineCore, Runner
from sgl.runtime.engine_start import build_core
from sgl.runtime.generation import Generation
from sgl.runtime.plan import Move, StepPlan
from sgl.runtime.program_run import ProgramRun
from sgl.runtime.sequence import Request
from sgl.runtime.stats import Stats

Result = TypeVar("Result")


class Record(msgspec.Struct, frozen=True):
    """One request that ended.

    Attributes:
        access: its tokens as the cache sees them.
        usage: what the engine counted for it.
        needed_tokens: pool that it had to be able to have: prompt and most new tokens.
        scored: an option of a select, whose prompt tokens are what it computes itself; none of them is a hit.
    """

    access: Access
    usage: Usage
    needed_tokens: int
    scored: bool


class _ObservedRunner:
    """Tells of each plan before it is computed."""

    def __init__(self, runner: Runner, observe: Callable[[StepPlan], None]) -> None:
        self._runner = runner
        self._observe = observe

    def forward(self, plan: StepPlan, drawn: Any = None) -> Any:
        self._observe(plan)
        return self._runner.forward(plan, drawn)

    def move(self, moves: Sequence[Move]) -> None:
        self._runner.move(moves)


class _RecordingCore(EngineCore):
    """An engine core that keeps each request and the prompt that it came with."""

    def __init__(self, config: Any, tokenizer: Any, runner: Runner, sampler: Any, **services: Any) -> None:
        self._arrived: dict[int, tuple[Request, list[int]]] = {}  # by sequence, until admitted
        self._admitted: list[tuple[Request, list[int]]] = []
        super().__init__(config, tokenizer, _ObservedRunner(runner, self._admit), sampler, **services)

    def watch(self, request: Request, run: ProgramRun) -> None:
        super().watch(request, run)
        prompt = request.sequence.token_ids[: request.prompt_len]
        self._arrived[request.sequence.id] = (request, prompt)

    def records(self) -> list[Record]:
        """Requests that were admitted and ended so far, in order of admission."""
        return [_record(request, prompt) for request, prompt in self._admitted if request.done]

    def _admit(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            arrived = self._arrived.pop(chunk.sequence, None)
            if arrived is not None:
                self._admitted.append(arrived)


def _record(request: Request, prompt: list[int]) -> Record:
    generation = request.generation
    output: list[int] = []
    if isinstance(generation, Generation):
        # The last token that was drawn is not computed; when it ended the output, it is not part of it either.
        output = generation.output_ids[: max(0, request.completion_tokens - 1)]
    tokens = np.array([*prompt, *output], dtype=np.int32)
    access = Access(tokens, 0 if request.score_only else len(prompt) - 1, str(request.sequence.namespace))
    return Record(access, request.usage(), len(prompt) + request.new_tokens, request.score_only)


class SteppedEngine:
    """A backend over an engine core in this process.

    Args:
        fields: of `EngineConfig`.

    Raises:
        ConfigError, ModelError: as `sgl.Engine`.

    Example:
        >>> import sgl
        >>> @sgl.function
        ... def two(s):
        ...     s += "Once" + sgl.gen(max_tokens=3, ignore_eos=True) + " and" + sgl.gen(max_tokens=2, ignore_eos=True)
        >>> with SteppedEngine(model_path="dummy", num_threads=1, max_total_tokens=256) as engine:
        ...     _ = two.run(backend=engine)
        ...     [record.usage.prompt_tokens for record in engine.records()], list(engine.messages.values())
        ([4, 11], [1])
    """

    def __init__(self, **fields: Any) -> None:
        self.messages: Counter[int] = Counter()
        """Round trips of each program: fragments and reads of its state."""
        self._events: list[tuple[int, Event]] = []
        core, info = build_core(
            config_from_mapping(fields),
            emit=lambda program, event: self._events.append((program, event)),
            kind=_RecordingCore,
        )
        if not isinstance(core, _RecordingCore):
            raise InternalError(f"build_core made a {type(core).__name__}")
        self._core = core
        self._info = info
        self._sinks: dict[int, EventSink] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._num_programs = 0
        self._holds = 0
        self._closing = False
        self._dead: SglError | None = None
        self._thread = threading.Thread(target=self._serve, name="sgl-stepped", daemon=True)
        self._thread.start()

    # --- as a backend ---

    def open(self, sink: EventSink, options: ProgramOptions) -> _Session:
        """Start a program (see `sgl.lang.backend`)."""
        with self._changed:
            self._raise_if_dead()
            self._num_programs += 1
            number = self._num_programs
            self._sinks[number] = sink
        return _Session(self, number, options)

    def flush_cache(self) -> bool:
        """Drop every cached page that no live program stands on."""
        self.ask(self._core.flush_cache)
        return True

    def server_info(self) -> Mapping[str, Any]:
        """The model, and what was resolved with the reasons."""
        return self._info

    def shutdown(self) -> None:
        """End the thread; open programs fail. Idempotent."""
        self._end(EngineDead("the engine was shut down"))
        self._thread.join()

    def __enter__(self) -> SteppedEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    # --- what is measured ---

    @contextmanager
    def held(self) -> Iterator[None]:
        """Take programs in, but compute nothing."""
        with self._changed:
            self._holds += 1
        try:
            yield
        finally:
            with self._changed:
                self._holds -= 1
                self._changed.notify_all()

    def wait_for_programs(self, count: int, otherwise: Callable[[], bool]) -> None:
        """Wait until `count` programs were submitted in all, or `otherwise()`; that one is asked at `notify`."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.messages) >= count or otherwise())

    def notify(self, *_: object) -> None:
        """Something that `wait_for_programs` waits for may have changed."""
        with self._changed:
            self._changed.notify_all()

    def records(self) -> list[Record]:
        """Requests that ended so far, in order of admission."""
        return self.ask(self._core.records)

    def stats(self) -> Stats:
        """Counters and gauges of now; raises `InternalError` when a law is broken."""

        def read() -> Stats:
            stats = msgspec.structs.replace(self._core.snapshot())
            stats.check()
            return stats

        return self.ask(read)

    def ask(self, question: Callable[[], Result]) -> Result:
        """Answer `question()` on the core's thread, between two steps."""
        answer: Future[Result] = Future()

        def act() -> None:
            try:
                answer.set_result(question())
            except SglError as error:
                answer.set_exception(error)

        self.post(act)
        while not answer.done():
            with self._changed:
                self._raise_if_dead()
                self._changed.wait_for(lambda: answer.done() or self._dead is not None)
        return answer.result()

    # --- inside ---

    def post(self, act: Callable[[], None], *, program: int | None = None) -> None:
        """Do something on the core's thread; it is a message of `program`."""
        with self._changed:
            self._raise_if_dead()
            if program is not None:
                self.messages[program] += 1
            self._inbox.append(act)
            self._changed.notify_all()

    def core(self) -> EngineCore:
        """For what is posted, and nothing else."""
        return self._core

    def flush_events(self) -> None:
        """Hand over what the core has emitted. On the core's thread."""
        events, self._events = self._events, []
        for program, event in events:
            with self._changed:
                sink = self._sinks.get(program)
                if isinstance(event, (DoneEvent, FailedEvent)):
                    self._sinks.pop(program, None)
            if sink is not None:
                sink(event)

    def _serve(self) -> None:
        try:
            while self._turn():
                self.flush_events()
        except Exception as error:  # noqa: BLE001 - told to everyone who waits
            failure = error if isinstance(error, SglError) else InternalError(f"{type(error).__name__}: {error}")
            failure.__cause__ = error if failure is not error else error.__cause__
            self._end(failure)
        with self._changed:
            sinks, self._sinks = self._sinks, {}
            dead = self._dead
        for sink in sinks.values():
            sink(FailedEvent(error=(dead or EngineDead("the engine has ended")).to_info()))

    def _turn(self) -> bool:
        """Handle what came in, and step unless held; False at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or bool(self._inbox) or (not self._holds and self._core.has_work)
            )
            if self._closing:
                return False
            inbox, self._inbox = self._inbox, deque()
            held = self._holds > 0
        for act in inbox:
            act()
        if inbox:
            self.notify()
        if not held:
            self._core.step()
        return True

    def _end(self, error: SglError) -> None:
        with self._changed:
            self._closing = True
            self._dead = self._dead or error
            self._changed.notify_all()

    def _raise_if_dead(self) -> None:
        if self._dead is not None:
            raise EngineDead(self._dead.message, hint=self._dead.hint)


class _Session:
    """One program on a stepped engine (see `sgl.lang.backend.Session`)."""

    def __init__(self, engine: SteppedEngine, number: int, options: ProgramOptions) -> None:
        self._engine = engine
        self._number = number
        self._options: ProgramOptions | None = options
        self._lock = threading.Lock()

    def submit(self, graph: Graph, *, finish: bool = False) -> None:
        """Execute a whole program, or what is new of it."""
        core = self._engine.core()
        with self._lock:
            options, self._options = self._options, None

            def act() -> None:
                if options is not None:
                    core.open(self._number, options)
                core.submit(self._number, graph, finish=finish)

            self._engine.post(act, program=self._number)

    def read_state(self, branch: int) -> Future[StateText]:
        """The text and ids of a live branch after everything submitted so far."""
        if self._options is not None:
            self.submit(Graph(nodes=()))
        answer: Future[StateText] = Future()

        def reply(state: StateText | None, error: SglError | None) -> None:
            self._engine.flush_events()
            if state is not None:
                answer.set_result(state)
            else:
                answer.set_exception(error or InternalError("a state was neither read nor lost"))

        core = self._engine.core()
        self._engine.post(lambda: core.read_state(self._number, branch, reply), program=self._number)
        return answer

    def cancel(self) -> None:
        """Stop the program and release its state."""
        core = self._engine.core()
        try:
            if self._options is not None:
                self.submit(Graph(nodes=()))
            self._engine.post(lambda: core.cancel(self._number))
        except EngineDead:
            return  # what died needs no cancelling
