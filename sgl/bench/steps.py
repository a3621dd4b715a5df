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
from contextlib import contextmanager
from typing import Any

import msgspec

from sgl.bench.prompts import Prompts
from sgl.errors import BenchError, Cancelled
from sgl.lang.graph import Event, FailedEvent, Gen, Graph, ProgramOptions, Sampling, Tokens, ValueEvent
from sgl.runtime.config import config_from_mapping
from sgl.runtime.core import EngineCore
from sgl.runtime.worker import build_core

_WARM_STEPS = 6
"""After the last prompt is computed: what they leave behind in allocators and queues is gone then."""
_LONGEST = 100_000
"""Steps within which any prompt is computed, or something is wrong."""


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of consecutive steps, and of what the device did in them (0 where nobody times it)."""

    step_s: tuple[float, ...]
    busy_s: float
    idle_s: float

    @property
    def median_s(self) -> float:
        """Of one step."""
        return statistics.median(self.step_s)

    @property
    def gap(self) -> float:
        """The share of the time in which the device waited for the host."""
        return self.idle_s / (self.busy_s + self.idle_s) if self.busy_s else 0.0


class _Core(EngineCore):
    """An engine core that keeps its runner at hand."""

    def __init__(self, config: Any, tokenizer: Any, runner: Any, sampler: Any, **services: Any) -> None:
        super().__init__(config, tokenizer, runner, sampler, **services)
        self.runner = runner


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

    def decode(self, *, rows: int, context: int, steps: int) -> StepTimes:
        """Times of `steps` steps in which `rows` sequences of about `context` tokens decode, greedily."""
        with self._decoding(rows, context, steps):
            return self._timed(steps)

    def while_decoding(self, *, rows: int, context: int, steps: int, act: Callable[[Callable[[], Any]], Any]) -> Any:
        """What `act` gives, called with a function that takes one decoding step; it may be called `steps` times."""
        with self._decoding(rows, context, steps):
            return act(self.core.step)

    def tokens(self, *, rows: int, context: int, new_tokens: int) -> list[tuple[int, ...]]:
        """What `rows` prompts go on with, greedily, decoded together."""
        return self.complete(self._taken(rows, context), new_tokens)

    def complete(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[tuple[int, ...]]:
        """What these prompts, ids of tokens, go on with, greedily, computed together."""
        programs = [self._start(prompt, new_tokens) for prompt in prompts]
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

    @contextmanager
    def plain_steps(self) -> Iterator[None]:
        """Steps do not overlap meanwhile: the host looks at each result before it begins the next."""
        before = self.core.config
        self.core.apply(msgspec.structs.replace(before, disable_overlap_schedule=True), self.core.limits)
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
    def _decoding(self, rows: int, context: int, steps: int) -> Iterator[None]:
        """Meanwhile so many rows decode, for `steps` steps at least."""
        if self._computed.get(context, 0) < rows:
            # Beforehand: or the first rows would be done before the last prompt is computed.
            self._finish([self._start(prompt, 1) for prompt in self._taken(rows, context)])
            self._computed[context] = rows
        budget = steps + 2 * _WARM_STEPS + 8
        programs = [self._start(prompt, budget + row % 2) for row, prompt in enumerate(self._taken(rows, context))]
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
        before = msgspec.structs.replace(self.core.snapshot())
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
        )

    def _start(self, prompt: Sequence[int], new_tokens: int) -> int:
        number, self._next = self._next, self._next + 1
        gen = Gen(id=1, name="x", sampling=Sampling(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True))
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
