"""The engine core: a plain object with `open / submit / cancel / step`, and no process, socket or thread of its own.

Owns the programs and wires scheduler, model runner, sampler and grammar compiler together. The worker process drives
it; a test drives it by hand, with a fake clock and a scripted runner. All calls come from one thread; jobs handed to
the executor come back through `finish_jobs`.

A step is *schedule, forward, sample, process*. With overlap the same four calls come in another order: the next step is
scheduled and its forward queued while the device computes the step before, whose result is processed meanwhile; then
the next one's tokens are drawn, by everything that was learned. Drawn ids stay on the device, where the forward finds
those that it follows. Whatever a row needs of its token on the host (a mask, penalties, the end of a text) is there
before the row draws again; what it computed for nothing is taken back (`Scheduler`).

A step that raises ends the programs that were in it and drops the whole cache, whose pages are not trusted any more;
the engine goes on. When steps keep failing, the error is raised to the owner, who ends the process. What fails in one
program's own work (its constraint, its text, its events) ends that program alone. What a client is told of an
exception that nobody expected is in `failures`; where tests make things fail on purpose is in `faults`.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from sgl.errors import EngineDead, InternalError, QueueTimeout, SglError, StateLost
from sgl.grammars.compiler import GrammarCompiler
from sgl.lang.graph import Event, FailedEvent, Graph, ProgramOptions
from sgl.limits import Limits
from sgl.runtime.alarms import Alarms
from sgl.runtime.branch import Reply
from sgl.runtime.cache_control import CacheControl, busy
from sgl.runtime.config import ResolvedConfig
from sgl.runtime.failures import internal_error, typed
from sgl.runtime.faults import FaultPoints
from sgl.runtime.masks import MaskFiller
from sgl.runtime.plan import Move, Pending, StepPlan, StepResult
from sgl.runtime.processors import BUILT_IN, LogitProcessor
from sgl.runtime.profiler import StepProfiler, draw_name, step_name
from sgl.runtime.program_run import ProgramRun
from sgl.runtime.scheduler import Scheduler
from sgl.runtime.sequence import Request
from sgl.runtime.speculation.drafter import Drafter
from sgl.runtime.speculation.start import make_drafter
from sgl.runtime.stats import Stats
from sgl.runtime.text.tokenizer import Tokenizer
from sgl.runtime.trace import StepTimes, Tracer

if TYPE_CHECKING:
    from sgl.runtime.device_clock import DeviceClock

_MAX_FAILED_STEPS = 3


class Runner(Protocol):
    """Computes a plan: `ModelRunner`, or a script in tests."""

    def forward(self, plan: StepPlan, drawn: Any = None) -> Any:
        """Float32 logits `[rows, vocabulary]`; `drawn` are the tokens that chunks may follow (`Pending.token_ids`)."""

    def move(self, moves: Sequence[Move]) -> None:
        """Move keys and values in the pool, all at once, behind what was computed so far."""


class StepSampler(Protocol):
    """Draws and scores: `Sampler`."""

    def sample(self, plan: StepPlan, logits: Any) -> StepResult:
        """One result per chunk."""

    def start(self, plan: StepPlan, logits: Any) -> Pending:
        """The same without waiting for the device."""


class _Flight(NamedTuple):
    """A step whose tokens are being drawn."""

    plan: StepPlan
    result: Pending
    times: StepTimes | None


class EngineCore:
    """Executes programs step by step.

    Args:
        config: what was resolved.
        tokenizer, runner, sampler: the model.
        executor: runs jobs (encoding, compiling) off the step loop; `None` runs them at once.
        emit: receives (program, event), in order.
        clock: seconds.
        wake: called from an executor's thread when a job is done.
        processors: the custom logit processors that the sampler has, by name.
        faults: what to make fail, in tests.
        tracer: writes the step timeline.
        device_clock: times the steps of `runner` and `sampler` on their device.
        shared_prefix_tokens: what `Stats.shared_prefix_tokens` is by now.
        drafter: guesses tokens; by default the one that `config` asks for.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        tokenizer: Tokenizer,
        runner: Runner,
        sampler: StepSampler,
        *,
        emit: Callable[[int, Event], None],
        executor: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
        wake: Callable[[], None] = lambda: None,
        processors: Mapping[str, LogitProcessor] = BUILT_IN,
        faults: FaultPoints | None = None,
        tracer: Tracer | None = None,
        device_clock: DeviceClock | None = None,
        shared_prefix_tokens: Callable[[], int] | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.epoch = uuid.uuid4().hex
        self.config = config
        self.limits = limits = config.limits
        self.tokenizer = tokenizer
        self.stats = Stats()
        self.scheduler = Scheduler(
            config,
            self.stats,
            limits,
            masks=MaskFiller(tokenizer.vocab_size, config.num_mask_threads, config.num_threads),
            on_end=tracer.ended if tracer is not None else None,
            drafter=drafter if drafter is not None else make_drafter(config, tokenizer),
        )
        self.cache = CacheControl(self.scheduler, tokenizer, clock)
        self.compiler = GrammarCompiler(
            tokenizer.to_json(),
            tokenizer.vocab_size,
            sorted(tokenizer.eos_ids),
            limits=limits,
            backend=config.grammar_backend,
        )
        self.processors = processors
        self.now = clock
        self.faults = faults
        self.tracer = tracer
        self._device_clock = device_clock
        self._shared_prefix_tokens = shared_prefix_tokens
        self.profiler = StepProfiler(config.device)
        forward, sample, begin = (
            self.profiler.named(runner.forward, step_name, begins=True),
            self.profiler.named(sampler.sample, draw_name, begins=False),
            self.profiler.named(sampler.start, draw_name, begins=False),
        )
        self._forward = forward if tracer is None else tracer.timed(forward)
        self._sample = sample if tracer is None else tracer.timed(sample)
        self._runner = runner
        self._overlaps = not config.disable_overlap_schedule
        self._start = begin if tracer is None else tracer.timed(begin)
        self._flight: _Flight | None = None
        self._emit = emit
        self._executor = executor
        self._wake = wake
        self._programs: dict[int, ProgramRun] = {}
        self._alarms: Alarms[int] = Alarms()
        self._watchers: dict[int, ProgramRun] = {}
        self._done_jobs: deque[tuple[Future[Any], Callable[[Any, SglError | None], None]]] = deque()
        self._failed_steps = 0
        self._moved_at = clock()

    # --- programs ---

    def open(self, program: int, options: ProgramOptions) -> None:
        """Start a program. One that cannot be started fails, as one that cannot go on does."""
        if program in self._programs:
            raise InternalError(f"program {program} is open already")
        try:
            run = self._programs[program] = ProgramRun(program, options, self)
        except Exception as error:  # noqa: BLE001 - a bug in one program must not end the others
            failure = typed(f"program {options.name!r} cannot be started", error)
            self._emit(program, FailedEvent(error=failure.to_info()))
            return
        self.expect_end(run)
        self.stats.programs += 1

    def submit(self, program: int, graph: Graph, *, finish: bool = False) -> None:
        """Execute a fragment; one that comes after its program ended is dropped, as the client has been told."""
        run = self._programs.get(program)
        if run is not None:
            run.submit(graph, finish=finish)

    def read_state(self, program: int, branch: int, reply: Reply) -> None:
        """Answer with a branch's text after everything submitted so far."""
        run = self._programs.get(program)
        if run is None:
            reply(None, StateLost("the program has ended", hint="read a state while its program runs"))
        else:
            run.read_state(branch, reply)

    def cancel(self, program: int) -> None:
        """Stop a program; unknown or ended ones are no error."""
        run = self._programs.get(program)
        if run is not None:
            run.cancel()

    def fail(self, program: int, error: SglError) -> bool:
        """End a program with `error`; False when there is none of that number."""
        run = self._programs.get(program)
        if run is None:
            return False
        run.fail(error)
        return True

    def cancel_all(self, error: SglError | None = None) -> None:
        """End every program."""
        for run in list(self._programs.values()):
            run.fail(error or EngineDead("the engine was shut down"))

    # --- the step ---

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute anything, or look at what was computed."""
        return self.scheduler.has_work or self._flight is not None

    def step(self) -> bool:
        """Advance every planned sequence; False when there was nothing to do."""
        self.finish_jobs()
        self._check_deadlines()
        self.cache.tick()
        done = self._step_ahead() if self._overlaps else self._step_now()
        if done:
            self.cache.tick()
        self.profiler.step_is_over()
        if self._device_clock is not None and not self.has_work:
            self._device_clock.rest()
        return done

    def _step_now(self) -> bool:
        """A step from its plan to its result."""
        if self._flight is not None:  # steps overlapped until now
            flight, self._flight = self._flight, None
            self._land(flight)
        plan = self.scheduler.schedule()
        if not plan.chunks:
            return False
        try:
            begun = self.now()
            logits = self._compute(plan)
            result = self._sample(plan, logits)
            device_s = self._take_device_time()
            touched = self._process(plan, result, self.now() - begun if self._device_clock is None else device_s)
        except Exception as error:  # noqa: BLE001 - whatever a model or kernel raises must not end the other programs
            self._fail_step(plan, error)
            return True
        self._tell(plan, touched, self.tracer.take_times() if self.tracer is not None else None)
        self._carry_on(logits)
        return True

    def _carry_on(self, logits: Any) -> None:
        """Requests that begin where right guesses of the step have led draw from its logits at once."""
        while (plan := self.scheduler.carry()).chunks:
            try:
                result = self._sample(plan, logits[list(plan.carried or ())])
                touched = self._process(plan, result)
            except Exception as error:  # noqa: BLE001 - as in `_step_now`
                self._fail_step(plan, error)
                return
            self._tell(plan, touched, None)

    def _step_ahead(self) -> bool:
        """Begin a step while the one before is computed, take the result of that one, then draw this one's tokens."""
        flight, self._flight = self._flight, None
        if flight is not None and not self.scheduler.foresees():
            self._land(flight)
            flight = None
        plan = self.scheduler.schedule()
        logits: Any = None
        failure: Exception | None = None
        if plan.chunks:
            try:
                logits = self._compute(plan, flight.result.token_ids if flight is not None else None)
            except Exception as error:  # noqa: BLE001 - as in `_step_now`; what flies may be sound all the same
                failure = error
        if flight is not None:
            self._land(flight)
            plan = self.scheduler.settle(plan)
        if not plan.chunks:
            return flight is not None
        try:
            if failure is not None:
                raise failure
            result = self._start(plan, logits)
        except Exception as error:  # noqa: BLE001 - as in `_step_now`
            self._fail_step(plan, error)
            return True
        self._flight = _Flight(plan, result, self.tracer.take_times() if self.tracer is not None else None)
        return True

    def _land(self, flight: _Flight) -> None:
        """Take the result of a step that was begun before."""
        try:
            result = flight.result.wait()
            touched = self._process(flight.plan, result, self._take_device_time())
        except Exception as error:  # noqa: BLE001 - as in `_step_now`
            self._fail_step(flight.plan, error)
            return
        self._tell(flight.plan, touched, flight.times)

    def _process(self, plan: StepPlan, result: StepResult, seconds: float = 0.0) -> list[Request]:
        """What the scheduler makes of a result; keys and values of right guesses are put in their places."""
        touched = self.scheduler.process(plan, result, seconds)
        if moves := self.scheduler.paging.take_moves():
            self._runner.move(moves)
        return touched

    def _take_device_time(self) -> float:
        """Seconds from the end of the step before to the end of the one whose result is there, on its device, less what
        it waited for a draft model; 0 where nobody measures, and of a step that tells nothing of others."""
        if self._device_clock is None:
            return 0.0
        time = self._device_clock.take()
        self.stats.device_busy_s += time.busy_s
        self.stats.device_idle_s += time.idle_s
        if not time.is_usual:
            return 0.0
        drafter = self.scheduler.drafter
        return time.busy_s if drafter is not None and drafter.has_model else time.busy_s + time.idle_s

    def _compute(self, plan: StepPlan, drawn: Any = None) -> Any:
        """The plan's logits."""
        logits = self._forward(plan, drawn)
        if self.faults is not None:
            logits = self.faults.forward(plan, logits, [self._name_of(chunk.sequence) for chunk in plan.chunks])
        return logits

    def _tell(self, plan: StepPlan, touched: list[Request], times: StepTimes | None) -> None:
        """A step has succeeded: programs go on with what their requests got."""
        self._failed_steps = 0
        self._moved_at = self.now()
        if self._shared_prefix_tokens is not None:
            self.stats.shared_prefix_tokens = self._shared_prefix_tokens()
        if self.tracer is not None and times is not None:
            self.scheduler.gauge(counted=False)
            self.tracer.step(plan, times, touched, self.stats)
        for request in touched:
            if request.completion_tokens and not request.first_at:
                request.first_at = self._moved_at
            run = self._watchers.get(request.sequence.id)
            if run is not None:
                if request.done:
                    self._watchers.pop(request.sequence.id, None)
                run.on_request(request)

    @property
    def stalled_s(self) -> float:
        """Seconds since the last step that succeeded, or since there was something to do again; 0 when idle."""
        return self.now() - self._moved_at if self.has_work else 0.0

    def finish_jobs(self) -> None:
        """Hand the results of jobs that are done to their programs."""
        while self._done_jobs:
            future, done = self._done_jobs.popleft()
            _deliver(future.result, done)

    def _fail_step(self, plan: StepPlan, error: Exception) -> None:
        self._failed_steps += 1
        if self._device_clock is not None:
            self._device_clock.rest()
        failure = internal_error("a model step failed", error)
        runs = {id(run): run for chunk in plan.chunks if (run := self._watchers.get(chunk.sequence)) is not None}
        for run in runs.values():
            run.fail(failure)
        self.scheduler.reset()
        if self._failed_steps >= _MAX_FAILED_STEPS:
            raise failure

    def _check_deadlines(self) -> None:
        now = self.now()
        for number in self._alarms.due(now):
            if (run := self._programs.get(number)) is not None:
                run.check_time(now)
                self.expect_end(run)
        while (request := self.scheduler.waiting.oldest_at_door) is not None:
            waited = now - request.queued_at
            owner = self._watchers.get(request.sequence.id)
            if waited <= self.limits.max_queue_s or owner is None:
                return
            owner.fail(
                QueueTimeout(
                    f"waited {waited:.0f} s for the first step; the limit is {self.limits.max_queue_s:g} s",
                    hint="send again later, or fewer at a time, or raise max_queue_s",
                )
            )

    def next_deadline(self) -> float | None:
        """When the next open program, pin or waiting flush may run out of time, on the engine's clock."""
        first = min(self._alarms.next(), self.cache.next_deadline())
        return first if first < math.inf else None

    # --- services to programs ---

    def emit(self, program: int, event: Event) -> None:
        """Send an event to the client."""
        if self.faults is not None and not isinstance(event, FailedEvent):
            self.faults.reach("before_emit", self._programs[program].options.name)
        self._emit(program, event)

    def watch(self, request: Request, run: ProgramRun) -> None:
        """Tell `run` when `request` gets something."""
        if not self.has_work:
            self._moved_at = self.now()
        self._watchers[request.sequence.id] = run

    def expect_end(self, run: ProgramRun) -> None:
        """Time may end `run` at another moment than before."""
        if not run.ended:
            self._alarms.set(run.id, run.expires_at)

    def ended(self, run: ProgramRun, sequences: Iterable[int]) -> None:
        """Forget a program and the sequences that it had requests on."""
        self._programs.pop(run.id, None)
        self._alarms.drop(run.id)
        for sequence in sequences:
            self._watchers.pop(sequence, None)

    def run_job(self, job: Callable[[], Any], done: Callable[[Any, SglError | None], None], *, small: bool) -> None:
        """Run a job; `small` ones, and all without an executor, at once."""
        if small or self._executor is None:
            _deliver(job, done)
            return
        future = self._executor.submit(job)

        def finished(future: Future[Any]) -> None:
            self._done_jobs.append((future, done))
            self._wake()

        future.add_done_callback(finished)

    def _name_of(self, sequence: int) -> str:
        """Of the program that has a request on `sequence`."""
        run = self._watchers.get(sequence)
        return run.options.name if run is not None else ""

    def apply(self, config: ResolvedConfig, limits: Limits) -> None:
        """Go on with other sizes of a step and other bounds; the pool and the model stay what they are."""
        self.config = self.scheduler.config = config
        self._overlaps = not config.disable_overlap_schedule
        self.limits = self.scheduler.limits = limits

    # --- views ---

    def snapshot(self) -> Stats:
        """Counters and gauges of now."""
        self.scheduler.gauge()
        self.stats.num_programs = len(self._programs)
        return self.stats

    def flush_cache(self) -> int:
        """Drop every cached page that no live state and no pin holds; how many there were.

        Raises:
            EngineBusy: requests run or wait (see `CacheControl.flush`, which can wait).
        """
        if self.scheduler.has_work:
            raise busy(self.scheduler)
        return self.scheduler.flush()


def _deliver(job: Callable[[], Any], done: Callable[[Any, SglError | None], None]) -> None:
    """Call `done` with what `job` gives, or with the error it raises."""
    try:
        result = job()
    except SglError as error:
        done(None, error)
    except Exception as error:  # noqa: BLE001 - a bug in one program's job must not end the others
        done(None, internal_error("a job of the program failed", error))
    else:
        done(result, None)
