"""`sgl bench program --wall`: programs against the same calls as plain requests, on our own engine.

Owns the two comparisons and what is run in them; the pairs, the watch over the cores and the statistics are those of
`sgl.bench.harness`. Both sides use the same model, threads and calls; every run starts with an empty cache.

* One by one, cache off: plain requests to an engine without prefix cache, each sent when the one before has ended.
* Together, cache on: plain requests to the same engine, as many at a time as the programs have under way.

The programs run in the ordinary way in both: all calls of a wave together, on an engine with its cache. Besides, what
the cache costs when it finds nothing: prompts that share nothing, with the cache and without it.

`compare_engines` is the other command (`--against NAME=VALUE`): the same programs on two engines that differ in some
options, as kernels of this project and torch's.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from sgl.bench.harness import PairPlan, measure_pairs
from sgl.bench.load import ProcSampler, Sampler, least_busy
from sgl.bench.pairs import Pair, Result, summarise
from sgl.bench.peers.engine_adapter import parsed_options
from sgl.bench.plain import PlainBackend
from sgl.bench.program import unit_of, waves
from sgl.bench.provenance import Provenance, provenance, side_variables
from sgl.bench.workloads import NO_REUSE, Call, Workload
from sgl.errors import ConfigError
from sgl.lang.backend import Backend
from sgl.runtime.config import config_from_mapping
from sgl.runtime.engine import Engine
from sgl.runtime.loading.facts import cpu_count

ONE_BY_ONE = "one by one, cache off"
TOGETHER = "together, cache on"
SEVERAL = "together, cache on, programs of several requests"
CACHE_OFF = "the same programs, cache off"
_MOST_TOGETHER = 96
"""Programs under way at a time, as in `run_batch`."""


class FormTokens(msgspec.Struct, frozen=True, kw_only=True):
    """What one form of a workload cost, in tokens and steps: computed prompt tokens, drawn tokens, model steps."""

    prefill_tokens: int
    decode_tokens: int
    forwards: int
    requests: int


class FormComparison(msgspec.Struct, frozen=True, kw_only=True):
    """One workload against one baseline (`plain`); the ratio is the baseline's time over the programs'.

    Where each of `num_programs` is one plain request, both forms are the same work together with the cache on: such a
    ratio is 1.0, but for noise.
    """

    workload: str
    baseline: str
    num_programs: int
    programs: FormTokens
    plain: FormTokens
    result: Result
    pairs: tuple[Pair, ...]


class GeometricMean(msgspec.Struct, frozen=True, kw_only=True):
    """Of the ratios to one baseline, over the workloads that could be measured; None when none could."""

    baseline: str
    measured: int
    asked: int
    mean: float | None
    lowest: float | None


class WallReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `sgl bench program --wall` prints."""

    model: str
    scale: float
    seed: int
    engine: dict[str, Any]
    provenance: Provenance
    comparisons: tuple[FormComparison, ...]
    means: tuple[GeometricMean, ...]
    not_reached: tuple[str, ...] = ()
    """What was left out for want of time, and why."""


def compare_forms(
    workloads: Sequence[Workload],
    *,
    scale: float,
    seed: int,
    plan: PairPlan,
    fields: Mapping[str, Any],
    no_reuse: bool | Workload = True,
    until: float = math.inf,
    most_seconds: float = math.inf,
    sampler: Sampler | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> WallReport:
    """Measure every workload against both baselines.

    Args:
        no_reuse: measure prompts that share nothing, too; or this workload in their place.
        until: on the monotonic clock: what would not end by then is left out.
        most_seconds: a comparison that would take longer is left out.
        fields: of `EngineConfig`, for both sides.
        sampler: of the load; that of the least busy cores by default. Tests invent one.

    Raises:
        ConfigError: `disable_radix_cache` is given: one side has the cache and the other has not.
    """
    if "disable_radix_cache" in fields:
        raise ConfigError(
            "disable_radix_cache is what is compared here; it cannot be given",
            hint="leave it out",
            param="disable_radix_cache",
        )
    bench = _Bench(fields, plan, sampler, progress, until, most_seconds)
    compare, given, unit = bench.compare, bench.given, bench.unit
    with Engine(**given) as engine, Engine(**given, disable_radix_cache=True) as uncached:
        one_by_one, together = PlainBackend(uncached, in_flight=1), PlainBackend(engine)
        for workload in workloads:
            calls = workload.build(seed, scale, unit)
            programs = _Form(engine, engine, calls, _MOST_TOGETHER)
            compare(workload, ONE_BY_ONE, programs, _Form(uncached, one_by_one, calls, 1))
            compare(workload, TOGETHER, programs, _Form(engine, together, calls, _MOST_TOGETHER))
        if no_reuse:
            apart = NO_REUSE if no_reuse is True else no_reuse
            calls = apart.build(seed, scale, unit)
            cached, bare = (_Form(each, each, calls, _MOST_TOGETHER) for each in (engine, uncached))
            compare(apart, CACHE_OFF, cached, bare)
        return bench.report(engine, scale, seed)


def compare_engines(
    workloads: Sequence[Workload],
    against: Mapping[str, Any],
    *,
    scale: float,
    seed: int,
    plan: PairPlan,
    fields: Mapping[str, Any],
    sampler: Sampler | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> WallReport:
    """Measure every workload's programs against the same programs on an engine whose options `against` changes.

    Raises:
        ConfigError: nothing is changed.
    """
    if not against:
        raise ConfigError("both engines would be the same", hint="give --against NAME=VALUE", param="against")
    bench = _Bench(fields, plan, sampler, progress)
    other = {**bench.given, **parsed_options(against, "--against")}
    baseline = "the same programs with " + ", ".join(f"{name}={value}" for name, value in against.items())
    with Engine(**bench.given) as engine, Engine(**other) as changed:
        for workload in workloads:
            calls = workload.build(seed, scale, bench.unit)
            ours, theirs = (_Form(each, each, calls, _MOST_TOGETHER) for each in (engine, changed))
            bench.compare(workload, baseline, ours, theirs)
        return bench.report(engine, scale, seed)


class _Bench:
    """Where and how forms are measured, and what was found so far."""

    def __init__(
        self,
        fields: Mapping[str, Any],
        plan: PairPlan,
        sampler: Sampler | None,
        progress: Callable[[str], None],
        until: float = math.inf,
        most_seconds: float = math.inf,
    ) -> None:
        config = config_from_mapping(fields)
        self._until = until
        self._most_seconds = most_seconds
        self._not_reached: list[str] = []
        threads = config.num_threads or (1 if config.model_path == "dummy" else cpu_count())
        self.given = {**fields, "num_threads": threads}
        self.unit = unit_of(config.model_path)
        self._threads = threads
        self._cores = least_busy(os.sched_getaffinity(0), threads)
        self._sampler = ProcSampler(self._cores) if sampler is None else sampler
        self._plan = plan
        self._progress = progress
        self._comparisons: list[FormComparison] = []

    def compare(self, workload: Workload, baseline: str, programs: _Form, plain: _Form) -> None:
        """Measure one workload in two forms."""
        self._progress(f"{workload.name}: programs against {baseline}")
        most = min(self._most_seconds, self._until - time.monotonic())
        found = None
        if most > 0:
            found = _compare(workload.name, baseline, programs, plain, self._sampler, self._plan, self._progress, most)
        if found is None:
            self._not_reached.append(f"{workload.name} against {baseline}")
            self._progress(f"{workload.name}: not reached against {baseline}, for want of time")
            return
        self._comparisons.append(found)
        if (ratio := found.result.ratio) is not None:
            interval = f"{ratio.interval.low:.2f} to {ratio.interval.high:.2f}"
            self._progress(f"{workload.name}: {ratio.median:.2f}x of {baseline} ({interval})")

    def report(self, engine: Engine, scale: float, seed: int) -> WallReport:
        """All comparisons, with the means."""
        found = self._comparisons
        return WallReport(
            model=str(engine.server_info()["model"]),
            scale=scale,
            seed=seed,
            engine=self.given,
            provenance=provenance(self._cores, side_variables(self._threads), ()),
            comparisons=tuple(found),
            means=(
                *(_mean(baseline, found) for baseline in dict.fromkeys(each.baseline for each in found)),
                *_mean_of_several(found),
            ),
            not_reached=tuple(self._not_reached),
        )


class _Form:
    """The calls of a workload on one backend.

    Args:
        engine: what computes.
        backend: what the programs are given: the engine itself, or plain requests to it.
        together: programs under way at a time.
    """

    def __init__(self, engine: Engine, backend: Backend, calls: Sequence[Call], together: int) -> None:
        self._engine = engine
        self._backend = backend
        self._calls = calls
        self._together = together

    @property
    def num_programs(self) -> int:
        """Programs of one run."""
        return len(self._calls)

    def seconds(self, number: int) -> dict[str, float]:
        """One run on an empty cache. Each run is the same, whatever its number."""
        self._engine.flush_cache()
        return {"wall": timed_waves(self._calls, self._backend, self._together)}

    def tokens(self) -> FormTokens:
        """What one run costs."""
        return cost_of(self._engine, lambda: self.seconds(0))


def timed_waves(calls: Sequence[Call], backend: Backend, together: int = _MOST_TOGETHER) -> float:
    """Seconds of all calls, wave after wave, so many programs at a time."""
    start = time.perf_counter()
    for wave in waves(calls):
        with ThreadPoolExecutor(min(len(wave), together), thread_name_prefix="sgl-bench") as pool:
            for _ in pool.map(lambda call: call.run(backend), wave):
                pass
    return time.perf_counter() - start


def cost_of(engine: Engine, run: Callable[[], object]) -> FormTokens:
    """What `run` makes the engine do."""
    before = engine.stats()
    run()
    after = engine.stats()
    return FormTokens(**{name: after[name] - before[name] for name in FormTokens.__struct_fields__})


def _compare(
    workload: str,
    baseline: str,
    programs: _Form,
    plain: _Form,
    sampler: Sampler,
    plan: PairPlan,
    progress: Callable[[str], None],
    most_seconds: float = math.inf,
) -> FormComparison | None:
    """`None` where its first calls say that it takes longer than `most_seconds`."""
    begun = time.monotonic()
    costs = programs.tokens(), plain.tokens()
    if math.isinf(most_seconds):
        run = measure_pairs(programs.seconds, plain.seconds, sampler, plan, progress=progress)
    else:
        # They are warm by now; timed once more, since what runs first compiles and records.
        if time.monotonic() - begun > most_seconds:
            return None
        lasted = [form.seconds(0)["wall"] for form in (programs, plain)]
        calls = max(1, math.ceil(plan.turn_s / min(lasted)))
        expected = plan.pairs * (calls * sum(lasted) + plan.quiet_s)
        if time.monotonic() - begun + expected > most_seconds:
            return None
        run = measure_pairs(programs.seconds, plain.seconds, sampler, plan, calls=calls, progress=progress)
    return FormComparison(
        workload=workload,
        baseline=baseline,
        num_programs=programs.num_programs,
        programs=costs[0],
        plain=costs[1],
        result=summarise(run.pairs, "wall", plan.pairs),
        pairs=run.pairs,
    )


def _mean_of_several(comparisons: Sequence[FormComparison]) -> list[GeometricMean]:
    """The mean together over the workloads whose programs are more than one plain request each, if not all are."""
    together = [each for each in comparisons if each.baseline == TOGETHER]
    several = [
        msgspec.structs.replace(each, baseline=SEVERAL) for each in together if each.plain.requests > each.num_programs
    ]
    return [_mean(SEVERAL, several)] if 0 < len(several) < len(together) else []


def _mean(baseline: str, comparisons: Sequence[FormComparison]) -> GeometricMean:
    results = [each.result for each in comparisons if each.baseline == baseline]
    ratios = [result.ratio.median for result in results if result.ratio is not None]
    return GeometricMean(
        baseline=baseline,
        measured=len(ratios),
        asked=len(results),
        mean=math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None,
        lowest=min(ratios, default=None),
    )
