"""The real scheduler, tree, pool and program runs on a model that only takes time, and a clock that only it advances.

Owns the virtual clock, the latency model and the stand-in for the model. What it answers: how long would these programs
have taken, and what would have been shared, with another policy, pool or batch size. Nothing here imports torch.

Programs come from a `message_log` of a real engine (`load_log`) or from graphs. A program arrives at its time; its next
fragment follows as soon as the one before is done, as if the client took no time to think. Generations are as long as
they may be, unless `output_len` says otherwise; drawn tokens are letters that depend on seed and position only, so that
two runs with different policies generate the same text.
"""

from __future__ import annotations

import heapq
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from sgl.errors import ConfigError
from sgl.grammars.matcher import Bitmask, bitmask_to_bool
from sgl.lang.graph import DeltaEvent, DoneEvent, Event, FailedEvent, Graph, HandlesEvent, ProgramOptions, ValueEvent
from sgl.runtime.config import ResolvedConfig
from sgl.runtime.core import EngineCore
from sgl.runtime.messages import Hello, Submit, ToWorker
from sgl.runtime.plan import Done, Move, Pending, RowResult, SampleSpec, StepPlan, StepResult
from sgl.runtime.stats import Stats
from sgl.runtime.text.tokenizer import Tokenizer

OutputLen = Callable[[SampleSpec], int]


class LatencyModel(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step: a constant, plus so much per computed token and per key that a token attends to.

    The defaults are of the order of a small model on a laptop; `from_trace` fits them to a machine.
    """

    step_s: float = 5e-3
    token_s: float = 3e-3
    pair_s: float = 1e-8

    def seconds(self, plan: StepPlan) -> float:
        """Duration of a step with this plan."""
        return self.step_s + self.token_s * plan.num_tokens + self.pair_s * plan.num_pairs

    @classmethod
    def from_trace(cls, path: str | Path) -> LatencyModel:
        """Least squares over the steps in a trace file (`trace_file`), no term below zero.

        Raises:
            ConfigError: it is no trace, or has fewer than ten steps.
        """
        steps = _steps_of(Path(path))
        if len(steps) < 10:
            raise ConfigError(
                f"trace {str(path)!r} has {len(steps)} steps; expected at least 10",
                hint="record a longer run with trace_file",
                param="trace",
            )
        columns = np.array([[1.0, float(step["tokens"]), float(step["pairs"])] for step in steps])
        seconds = np.array([1e-3 * float(step["forward_ms"]) for step in steps])
        used = [0, 1, 2]
        while used:
            solution, *_ = np.linalg.lstsq(columns[:, used], seconds, rcond=None)
            if (solution >= 0).all():
                break
            used.pop(int(solution.argmin()))
        found = dict(zip(used, solution.tolist(), strict=True)) if used else {}
        return cls(step_s=found.get(0, 0.0), token_s=found.get(1, 0.0), pair_s=found.get(2, 0.0))


class SimulatedModel:
    """Takes time instead of computing, and draws letters. Runner and sampler of an `EngineCore`."""

    def __init__(self, latency: LatencyModel, tokenizer: Tokenizer, output_len: OutputLen | None = None) -> None:
        self.now = 0.0
        self.busy_s = 0.0
        self._latency = latency
        self._vocab_size = tokenizer.vocab_size
        self._eos = min(tokenizer.eos_ids, default=None)
        self._letters = [tokenizer.encode(letter)[-1] for letter in "abcdefghijklmnopqrstuvwxyz"]
        self._output_len = output_len

    def clock(self) -> float:
        """Seconds since the simulation began."""
        return self.now

    def forward(self, plan: StepPlan, drawn: None = None) -> None:
        """Let the time of a step pass."""
        seconds = self._latency.seconds(plan)
        self.now += seconds
        self.busy_s += seconds

    def move(self, moves: Sequence[Move]) -> None:
        """Nothing: there are no keys and values."""

    def sample(self, plan: StepPlan, logits: None) -> StepResult:
        """A letter for each row that draws, and a made-up log-probability for each token to score."""
        rows = []
        masks = iter(plan.masks.wait().words if plan.masks is not None else ())
        for chunk in plan.chunks:
            scores = tuple(
                tuple(-0.1 - (token * 2654435761 % 1009) / 500 for token in score.token_ids) for score in chunk.scores
            )
            drawn = [
                RowResult(sequence=chunk.sequence, token_id=self._draw(spec, masks), logprob=-1.0)
                for _, spec in chunk.draws
            ]
            first = drawn[0] if drawn else RowResult(sequence=chunk.sequence)
            rows.append(msgspec.structs.replace(first, scores=scores, more=tuple(drawn[1:])))
        return StepResult(rows=tuple(rows))

    def start(self, plan: StepPlan, logits: None) -> Pending:
        """See `StepSampler.start`."""
        return Done(self.sample(plan, logits))

    def _draw(self, spec: SampleSpec, masks: Iterator[Bitmask]) -> int:
        ends = self._output_len is not None and spec.position >= self._output_len(spec)
        if spec.matcher is not None:
            return self._allowed(spec, next(masks), ends=ends)
        if ends and self._eos is not None and self._eos not in spec.blocked_ids:
            return self._eos
        return self._letters[(spec.seed * 31 + spec.position * 7919) % len(self._letters)]

    def _allowed(self, spec: SampleSpec, mask: Bitmask, *, ends: bool) -> int:
        allowed: npt.NDArray[np.intp] = np.flatnonzero(bitmask_to_bool(mask[None], self._vocab_size)[0])
        if ends and self._eos is not None and self._eos in allowed:
            return self._eos
        others = allowed[allowed != self._eos] if self._eos is not None else allowed
        pick = others if len(others) else allowed
        return int(pick[(spec.seed * 31 + spec.position * 7919) % len(pick)])


class SimulatedProgram(msgspec.Struct, frozen=True, kw_only=True):
    """A program that arrives: its fragments, in order, the last of which finishes it."""

    fragments: tuple[Graph, ...]
    options: ProgramOptions = ProgramOptions()
    arrival_s: float = 0.0


class ProgramTimes(msgspec.Struct, kw_only=True):
    """Seconds at which a program arrived, gave its first token, and ended; `error` is the code of its failure."""

    arrival_s: float
    first_s: float | None = None
    end_s: float | None = None
    error: str | None = None


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation found: counters of the engine, times of each program, the end, and the share spent in steps."""

    stats: Stats
    programs: tuple[ProgramTimes, ...]
    makespan_s: float
    busy_share: float

    def latency_s(self, quantile: float) -> float | None:
        """Quantile of arrival to end over the programs that ended; `None` when none did."""
        spans = [times.end_s - times.arrival_s for times in self.programs if times.end_s is not None]
        return float(np.quantile(spans, quantile)) if spans else None


class Simulation:
    """Runs programs through an `EngineCore` on virtual time.

    Args:
        config: what is simulated.
        latency: how long steps take.
        tokenizer: of the simulated model; bytes by default.
        output_len: tokens after which a generation ends by itself.

    Example:
        >>> from sgl.runtime.simulator import SimulatedProgram, Simulation
        >>> from sgl.lang.graph import Gen, Graph, LiteralText, Sampling, Text
        >>> ask = Gen(id=1, name="x", sampling=Sampling(max_new_tokens=4))
        >>> graph = Graph(nodes=(Text(id=0, segments=(LiteralText("hello"),)), ask))
        >>> from sgl.runtime.config import ResolvedConfig
        >>> config = ResolvedConfig(dtype="float32", device="cpu", context_len=64, page_size=1, num_pages=64,
        ...     max_running_requests=4, chunked_prefill_size=16, disable_radix_cache=False, deterministic=False,
        ...     rerender="template", random_seed=0, num_threads=1, weights_bytes=0, kv_bytes_per_token=1)
        >>> result = Simulation(config).run([SimulatedProgram(fragments=(graph,))])
        >>> result.stats.prefill_tokens, result.stats.decode_tokens, result.stats.forwards
        (5, 4, 4)
    """

    def __init__(
        self,
        config: ResolvedConfig,
        latency: LatencyModel | None = None,
        tokenizer: Tokenizer | None = None,
        output_len: OutputLen | None = None,
    ) -> None:
        tokenizer = tokenizer or Tokenizer.toy()
        self.model = SimulatedModel(latency or LatencyModel(), tokenizer, output_len)
        config = msgspec.structs.replace(config, disable_overlap_schedule=True)  # one clock: nothing runs beside it
        self.core = EngineCore(config, tokenizer, self.model, self.model, emit=self._on_event, clock=self.model.clock)
        self._times: dict[int, ProgramTimes] = {}
        self._fragments: dict[int, deque[Graph]] = {}
        self._idle: list[int] = []

    def run(self, programs: Iterable[SimulatedProgram]) -> SimulationResult:
        """Simulate until every program ended."""
        arrivals = [(each.arrival_s, number, each) for number, each in enumerate(programs, 1)]
        heapq.heapify(arrivals)
        core = self.core
        while arrivals or core.has_work or self._idle:
            if not core.has_work and not self._idle:
                self.model.now = max(self.model.now, arrivals[0][0])
            while arrivals and arrivals[0][0] <= self.model.now:
                _, number, program = heapq.heappop(arrivals)
                self._times[number] = ProgramTimes(arrival_s=program.arrival_s)
                self._fragments[number] = deque(program.fragments)
                core.open(number, program.options)
                self._idle.append(number)
            idle, self._idle = self._idle, []
            for number in idle:
                fragments = self._fragments[number]
                if fragments:
                    core.submit(number, fragments.popleft(), finish=not fragments)
            core.step()
        times = tuple(self._times[number] for number in sorted(self._times))
        makespan = self.model.now - min((each.arrival_s for each in times), default=0.0)
        share = self.model.busy_s / makespan if makespan else 0.0
        return SimulationResult(stats=core.snapshot(), programs=times, makespan_s=makespan, busy_share=share)

    def _on_event(self, program: int, event: Event) -> None:
        times = self._times[program]
        match event:
            case DeltaEvent() | ValueEvent():
                if times.first_s is None:
                    times.first_s = self.model.now
            case HandlesEvent():
                self._idle.append(program)
            case DoneEvent():
                times.end_s = self.model.now
            case FailedEvent():
                times.error = event.error.code
                self._fragments[program].clear()
            case _:
                pass


class RecordedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a `message_log` holds: the programs, and the fields of `EngineConfig` that their engine was given; those of
    the last one where several wrote to the file."""

    programs: tuple[SimulatedProgram, ...]
    fields: dict[str, Any]


_NOT_SIMULATED = ("message_log", "trace_file", "fault_points", "log_level", "watchdog_timeout")


def load_log(path: str | Path) -> RecordedLoad:
    """The programs in a `message_log`, all arriving at time 0.

    Raises:
        ConfigError: it cannot be read, a line is no message, or it has no program.
    """
    decoder = msgspec.json.Decoder(ToWorker)
    opened: dict[tuple[int, int], ProgramOptions] = {}
    fragments: dict[tuple[int, int], list[Graph]] = {}
    engines: list[dict[str, Any]] = []
    try:
        with Path(path).open("rb") as lines:
            for line in lines:
                message = decoder.decode(line)
                if isinstance(message, Hello):
                    engines.append(message.config)
                elif isinstance(message, Submit):
                    program = (len(engines), message.program)  # each engine counts its own from the beginning
                    if message.open is not None:
                        opened[program] = message.open
                    graph = msgspec.structs.replace(message.graph, handles=())
                    fragments.setdefault(program, []).append(graph)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"message log {str(path)!r} cannot be read: {error}",
            hint="give a file that an engine wrote as its message_log",
            param="log",
        ) from None
    if not fragments:
        raise ConfigError(
            f"message log {str(path)!r} has no program in it",
            hint="run programs on an engine with this message_log first",
            param="log",
        )
    given = engines[-1] if engines else {}
    return RecordedLoad(
        programs=tuple(
            SimulatedProgram(fragments=tuple(graphs), options=opened.get(program, ProgramOptions()))
            for program, graphs in fragments.items()
        ),
        fields={name: value for name, value in given.items() if name not in _NOT_SIMULATED},
    )


def poisson(programs: Sequence[SimulatedProgram], rate: float, seed: int = 0) -> list[SimulatedProgram]:
    """The programs with random arrivals, `rate` per second on average."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, size=len(programs))
    return [
        msgspec.structs.replace(program, arrival_s=float(arrival))
        for program, arrival in zip(programs, np.cumsum(gaps), strict=True)
    ]


def _steps_of(path: Path) -> list[dict[str, Any]]:
    """Arguments of the steps in a trace file, which may be cut off at its end."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(
            f"trace {str(path)!r} cannot be read: {error.strerror}",
            hint="give a trace_file of an engine",
            param="trace",
        ) from None
    steps = []
    for line in text.splitlines():
        line = line.strip().lstrip("[").rstrip("],")
        try:
            event = json.loads(line) if line else None
        except ValueError:
            continue  # the line on which the engine died
        if isinstance(event, dict) and event.get("ph") == "X" and "forward_ms" in event.get("args", {}):
            steps.append(event["args"])
    return steps
