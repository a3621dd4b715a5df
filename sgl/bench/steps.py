"""Steps of one engine core in this process, timed one by one: decoding, and chunks of prompts.

Owns what a decoding step is here: `EngineCore.step()`, end to end, while every row decodes; scheduling, sampling and
text included, messages between processes not. The core is built as the worker builds it. Called by `sgl.bench.gpu`.

Rows are plain programs with prompts of random ids. Their prompts are computed before the clock runs, and found in the
cache when the same rows are measured again, so that variants (steps that overlap or do not) can take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec

from sgl.bench.prompts import Prompts
from sgl.errors import BenchError, Cancelled
from sgl.grammars.spec import Constraint
from sgl.lang.graph import Event, FailedEvent, Gen, Graph, ProgramOptions, Sampling, Tokens, ValueEvent
from sgl.runtime.config import config_from_mapping
from sgl.runtime.core import EngineCore
from sgl.runtime.engine_start import build_core
from sgl.runtime.plan import Pending, StepPlan, StepResult

_WARM_STEPS = 6
"""After the last prompt is computed: what they leave behind in allocators and queues is gone then."""
_MOST_FORCED = 4
"""Times as many tokens as steps that a row may get where a constraint forces some."""
_LONGEST = 100_000
"""Steps within which any prompt is computed, or something is wrong."""


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of consecutive steps, and of what the device did in them (0 where nobody times it).

    Attributes:
        host_s: what the host did in them, by call; see `HOST_CALLS`.
        new_tokens: that all rows together got.
    """

    step_s: tuple[float, ...]
    busy_s: float
    idle_s: float
    host_s: dict[str, float] = {}
    new_tokens: int = 0

    @property
    def median_s(self) -> float:
        """Of one step."""
        return statistics.median(self.step_s)

    @property
    def gap(self) -> float:
        """The share of the time in which the device waited for the host."""
        return self.idle_s / (self.busy_s + self.idle_s) if self.busy_s else 0.0


HOST_CALLS = ("schedule", "forward", "wait", "results", "settle", "masks", "draw")
"""What the host does in a step: plan it, queue its forward, wait for the tokens of the step before, take these, see how
rows draw by them, wait for masks, queue the draw. What is left of a step's time is the loop, events and ends."""


class _Core(EngineCore):
    """An engine core that keeps its runner at hand, and notes how long its calls take.

    Attributes:
        spent_s: seconds since the start, by `HOST_CALLS`.
    """

    def __init__(self, config: Any, tokenizer: Any, runner: Any, sampler: Any, **services: Any) -> None:
        super().__init__(config, tokenizer, runner, sampler, **services)
        self.runner = runner
        self.spent_s = dict.fromkeys(HOST_CALLS, 0.0)
        scheduler = self.scheduler
        scheduler.schedule = self._timed("schedule", scheduler.schedule)  # type: ignore[method-assign]
        scheduler.process = self._timed("results", scheduler.process)  # type: ignore[method-assign]
        scheduler.settle = self._timed("settle", scheduler.settle)  # type: ignore[method-assign]
        self._forward = self._timed("forward", self._forward)
        self._sample = self._after_masks(self._sample)
        begin = self._after_masks(self._start)

        def start(plan: StepPlan, logits: Any) -> Pending:
            pending = begin(plan, logits)
            return _Awaited(pending.token_ids, self._timed("wait", pending.wait))

        self._start = start

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.spent_s[name] += time.perf_counter() - start

        return calling

    def _after_masks(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        draw = self._timed("draw", draw)

        def drawing(plan: StepPlan, logits: Any) -> Any:
            if plan.masks is not None:
                self._timed("masks", plan.masks.wait)()
            return draw(plan, logits)

        return drawing


class _Awaited:
    """A pending result whose wait is timed."""

    def __init__(self, token_ids: Any, wait: Callable[[], StepResult]) -> None:
        self.token_ids = token_ids
        self.wait = wait


class StepBench:
    """One engine core, and rows on it.

    Args:
        fields: of `EngineConfig`.

    Raises:
        ConfigError, ModelError: as `sgl.Engine`.

    Example:
        >>> bench = StepBench({"model_path": "dummy", "num_threads": 1, "max_total_tokens": 256})
        >>> len(bench.decode(rows=2, context=8, steps=3).step_s)
        3
        >>> bench.tokens(rows=2, context=8, new_tokens=4) == bench.tokens(rows=2, context=8, new_tokens=4)
        True
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._values: dict[int, ValueEvent] = {}
        self._next = 0
        core, self.info = build_core(config_from_mapping(fields), emit=self._emit, kind=_Core)
        if not isinstance(core, _Core):
            raise BenchError(f"build_core made a {type(core).__name__}")
        self.core = core
        self._prompts: dict[int, list[list[int]]] = {}
        self._computed: dict[int, int] = {}  # by context: of how many prompts the cache has keys and values

    @property
    def step_weights_bytes(self) -> int:
        """Weights that a decoding step reads."""
        return int(self.info["step_weights_bytes"])

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return int(self.core.config.kv_bytes_per_token)

    def floor_bytes(self, rows: int, context: int) -> int:
        """What a decoding step of so many rows has to read."""
        return self.step_weights_bytes + rows * context * self.kv_bytes_per_token

    def decode(
        self, *, rows: int, context: int, steps: int, constraint: Constraint | None = None, temperature: float = 0.0
    ) -> StepTimes:
        """Times of `steps` steps in which `rows` sequences of about `context` tokens decode.

        Args:
            constraint: that no output completes in so many steps.
        """
        with self._decoding(rows, context, steps, constraint, temperature):
            return self._timed(steps)

    def while_decoding(self, *, rows: int, context: int, steps: int, act: Callable[[Callable[[], Any]], Any]) -> Any:
        """What `act` gives, called with a function that takes one decoding step; it may be called `steps` times."""
        with self._decoding(rows, context, steps):
            return act(self.core.step)

    def tokens(self, *, rows: int, context: int, new_tokens: int) -> list[tuple[int, ...]]:
        """What `rows` prompts go on with, greedily, decoded together."""
        return self.complete(self._taken(rows, context), new_tokens)

    def complete(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float = 0.0
    ) -> list[tuple[int, ...]]:
        """What these prompts, ids of tokens, go on with, computed together; greedily unless a temperature is given."""
        programs = [self._start(prompt, new_tokens, temperature=temperature) for prompt in prompts]
        values = self._finish(programs)
        return [tuple(values[program].token_ids) for program in programs]

    def prefill(self, *, length: int, times: int) -> list[float]:
        """Seconds of each of `times` steps that compute a prompt of `length` new tokens as one chunk.

        Raises:
            BenchError: a chunk holds fewer tokens.
        """
        if self.core.config.chunked_prefill_size < length:
            raise BenchError(f"chunks hold {self.core.config.chunked_prefill_size} tokens, not {length}")
        found = []
        with self.plain_steps():
            for number in range(times):
                self.core.flush_cache()
                self._computed.clear()
                (prompt,) = Prompts(self.info["vocab_size"], seed=f"prefill {number}").take(1, length)
                program = self._start(prompt, 1)
                start = time.perf_counter()
                self.core.step()
                found.append(time.perf_counter() - start)
                self._finish([program])
        return found

    def plain_steps(self) -> AbstractContextManager[None]:
        """Steps do not overlap meanwhile: the host looks at each result before it begins the next."""
        return self.changed(disable_overlap_schedule=True)

    @contextmanager
    def changed(self, **fields: Any) -> Iterator[None]:
        """Fields of the resolved configuration are others meanwhile."""
        before = self.core.config
        self.core.apply(msgspec.structs.replace(before, **fields), self.core.limits)
        try:
            yield
        finally:
            self.core.apply(before, self.core.limits)

    def record_anew(self) -> None:
        """Forget the decoding steps that were recorded, as something in them is done differently from now on."""
        self.core.runner.forget_recorded()

    def close(self) -> None:
        """End what the core has running beside it."""
        self.core.cancel_all()
        self.core.compiler.close()

    # --- inside ---

    @contextmanager
    def _decoding(
        self, rows: int, context: int, steps: int, constraint: Constraint | None = None, temperature: float = 0.0
    ) -> Iterator[None]:
        """Meanwhile so many rows decode, for `steps` steps at least."""
        if self._computed.get(context, 0) < rows:
            # Beforehand: or the first rows would be done before the last prompt is computed.
            self._finish([self._start(prompt, 1) for prompt in self._taken(rows, context)])
            self._computed[context] = rows
        budget = steps + 2 * _WARM_STEPS + 8
        if constraint is not None:
            budget *= _MOST_FORCED
        programs = [
            self._start(prompt, budget + row % 2, constraint, temperature)
            for row, prompt in enumerate(self._taken(rows, context))
        ]
        scheduler = self.core.scheduler
        for _ in range(_LONGEST):
            self.core.step()
            if len(scheduler.running) == rows and all(request.completion_tokens for request in scheduler.running):
                break
        else:
            raise BenchError(f"{rows} rows do not decode together: {len(scheduler.running)} run")
        for _ in range(_WARM_STEPS):
            self.core.step()
        try:
            yield
        finally:
            for program in programs:
                self.core.cancel(program)
            while self.core.step():
                pass
            self._values.clear()

    def _taken(self, rows: int, context: int) -> list[list[int]]:
        """The prompts of a context: those of fewer rows are the first of more."""
        known = self._prompts.get(context, [])
        if len(known) < rows:
            known = Prompts(self.info["vocab_size"], seed=f"steps {context}").take(rows, context)
            self._prompts[context] = known
        return known[:rows]

    def _timed(self, steps: int) -> StepTimes:
        before, host = msgspec.structs.replace(self.core.snapshot()), dict(self.core.spent_s)
        num_before = self._num_taken()
        times = []
        last = time.perf_counter()
        for _ in range(steps):
            self.core.step()
            now = time.perf_counter()
            times.append(now - last)
            last = now
        after = self.core.snapshot()
        return StepTimes(
            step_s=tuple(times),
            busy_s=after.device_busy_s - before.device_busy_s,
            idle_s=after.device_idle_s - before.device_idle_s,
            host_s={name: seconds - host[name] for name, seconds in self.core.spent_s.items()},
            new_tokens=self._num_taken() - num_before,
        )

    def _num_taken(self) -> int:
        """Tokens that the rows which decode have got so far."""
        return sum(request.completion_tokens for request in self.core.scheduler.running)

    def _start(
        self, prompt: Sequence[int], new_tokens: int, constraint: Constraint | None = None, temperature: float = 0.0
    ) -> int:
        number, self._next = self._next, self._next + 1
        sampling = Sampling(temperature=temperature, max_new_tokens=new_tokens, ignore_eos=True)
        gen = Gen(id=1, name="x", constraint=constraint, sampling=sampling)
        self.core.open(number, ProgramOptions(name="bench"))
        self.core.submit(number, Graph(nodes=(Tokens(id=0, token_ids=tuple(prompt)), gen)), finish=True)
        return number

    def _finish(self, programs: Sequence[int]) -> dict[int, ValueEvent]:
        """Step until all of them have their value; these."""
        for _ in range(_LONGEST):
            if all(program in self._values for program in programs):
                break
            self.core.step()
        while self.core.step():
            pass
        values, self._values = self._values, {}
        return values

    def _emit(self, program: int, event: Event) -> None:
        if isinstance(event, FailedEvent) and event.error.code != Cancelled.code:
            raise BenchError(f"a generation of the bench failed: {event.error.message}")
        if isinstance(event, ValueEvent):
            self._values[program] = event
