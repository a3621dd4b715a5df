"""`sgl bench throughput`: tokens and bytes per second of decoding, by path, rows and context.

Owns the grid and what a cell of it is: `rows` sequences of `context` tokens each, decoded together. The prompts are
computed once and then found in the prefix cache, so that a sample is decoding: a whole generation less one that stops
at its first token; on a GPU less one of half its length, as there the steps that run while requests still come in take
longer than the others. It is repeated until it lasts `TURN_S`, and the load of the cores is read around it; a sample
that others disturbed is marked, and does not count as long as there is another.

Bytes are what a step must read, not what a counter saw: all weights once, and keys and values of every row. On a GPU
the rate of a large copy is measured beside, and says how quick a step could be (its floor); the share of the time in
which it waited for the host comes from the engine's own clock, and each cell is measured again with steps that do not
overlap. A path that the model or the machine does not allow has the engine's reason in its place, and no cells.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from sgl.bench.ceilings import Ceilings, measure_ceilings
from sgl.bench.harness import PairPlan, wait_for_quiet
from sgl.bench.load import Fault, ProcSampler, Sampler, between, judge
from sgl.bench.paths import EnginePath, chosen_paths
from sgl.bench.prompts import Prompts
from sgl.bench.provenance import Model, Provenance, model_record, provenance
from sgl.errors import ConfigError, InvalidParameter
from sgl.runtime.config import config_from_mapping
from sgl.runtime.engine import Engine
from sgl.runtime.loading.sources import locate

ROWS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (128, 1024, 4096)
TURN_S = 1.0
_MAX_CALLS = 200
_SPARE_TOKENS = 4096
"""Of the pool, beyond prompts and output."""


class Sample(msgspec.Struct, frozen=True):
    """Seconds of a step, and what disturbed it."""

    step_s: float
    dirty: tuple[Fault, ...] = ()


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One place of the grid. Rates follow from the median of the clean samples; of all, if none is clean (`dirty`).

    On a GPU: `host_gap` is the share of the time in which it waited for the host, `plain_step_s` a step where the host
    looks at each result before it begins the next.
    """

    path: str
    rows: int
    context: int
    step_s: float
    tokens_per_s: float
    weight_bytes_per_s: float
    kv_bytes_per_s: float
    dirty: bool
    samples: tuple[Sample, ...]
    host_gap: float | None = None
    plain_step_s: float | None = None


class PathRun(msgspec.Struct, frozen=True, kw_only=True):
    """How a path ran, or why it could not (`unavailable`)."""

    path: str
    resolved: dict[str, Any] = {}
    unavailable: str = ""


class ThroughputReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `sgl bench throughput` found."""

    model: Model
    provenance: Provenance
    plan: PairPlan
    new_tokens: int
    ceilings: Ceilings | None
    paths: tuple[PathRun, ...]
    cells: tuple[Cell, ...]


def run(
    fields: Mapping[str, Any],
    *,
    plan: PairPlan,
    paths: Iterable[str] = (),
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS,
    new_tokens: int = 64,
    sampler: Sampler | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> ThroughputReport:
    """Measure the grid on every path, one engine after the other.

    Args:
        fields: those of `EngineConfig`; a path's own win. The pool is made for the grid unless they say otherwise.
        plan: `pairs` samples for each cell; how long to wait for a quiet machine, and what makes a sample dirty.
        new_tokens: decoded in a call.

    Raises:
        InvalidParameter: an unknown path, or an empty grid.
        SglError: the engine's own, but for options that it refuses.
    """
    if not rows or not contexts or min(*rows, *contexts) < 1 or new_tokens < 2:
        raise InvalidParameter(
            f"rows {list(rows)}, contexts {list(contexts)}, new_tokens {new_tokens}; expected at least 1, 1 and 2",
            param="rows",
        )
    chosen = chosen_paths(paths)
    config = config_from_mapping(fields)
    source = locate(config.model_path, load_format=config.load_format, offline=config.offline)
    cores = os.sched_getaffinity(0)
    sampler = sampler or ProcSampler(cores)
    pool = max(rows) * (max(contexts) + new_tokens) + _SPARE_TOKENS
    ceilings = None if config.device == "cpu" or not _has_gpu() else measure_ceilings()
    runs: list[PathRun] = []
    cells: list[Cell] = []
    for path in chosen:
        try:
            engine = Engine(**{"max_total_tokens": pool, **path.applied(fields)})
        except ConfigError as error:
            runs.append(PathRun(path=path.name, unavailable=error.message))
            continue
        with engine:
            resolved = engine.server_info()["resolved"]
            names = ("dtype", "quantization", "kernels", "num_threads", "weights_bytes", "kv_bytes_per_token")
            shown = {name: resolved[name] for name in names}
            shown["step_weights_bytes"] = engine.server_info()["step_weights_bytes"]
            runs.append(PathRun(path=path.name, resolved=shown))
            for context in contexts:
                cells += _measure(path, engine, context, rows, new_tokens, plan, sampler, progress)
    return ThroughputReport(
        model=model_record(source),
        provenance=provenance(cores, {}, ()),
        plan=plan,
        new_tokens=new_tokens,
        ceilings=ceilings,
        paths=tuple(runs),
        cells=tuple(cells),
    )


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _measure(
    path: EnginePath,
    engine: Engine,
    context: int,
    rows: Sequence[int],
    new_tokens: int,
    plan: PairPlan,
    sampler: Sampler,
    progress: Callable[[str], None],
) -> list[Cell]:
    """The cells of one context; the prompts of the widest row hold those of all."""
    info = engine.server_info()
    engine.flush_cache(wait_s=10.0)
    prompts = Prompts(info["vocab_size"], seed=f"{plan.seed} {context}").take(max(rows), context)
    progress(f"{path.name}: computing {len(prompts)} prompts of {context} tokens")
    generate(engine, prompts, 1)
    cells = []
    for count in rows:
        progress(f"{path.name}: {count} rows at {context}")
        clock = _Clock(engine)
        short = new_tokens // 2 if info["resolved"]["device"] == "cuda" else 1

        def call(count: int = count, short: int = short, clock: _Clock = clock) -> float:
            return clock.between(prompts[:count], short, new_tokens) / (new_tokens - short)

        sizes = {**info["resolved"], "weights_bytes": info["step_weights_bytes"]}
        made = cell(path.name, count, context, new_tokens, take(call, sampler, plan), sizes, first=short)
        if (host_gap := clock.host_gap) is not None and not info["resolved"]["disable_overlap_schedule"]:
            engine.override(disable_overlap_schedule=True, why="sgl bench throughput compares")
            plain = cell(path.name, count, context, new_tokens, take(call, sampler, plan), sizes, first=short)
            engine.override(disable_overlap_schedule=False, why="sgl bench throughput has compared")
            made = msgspec.structs.replace(made, plain_step_s=plain.step_s)
        cells.append(msgspec.structs.replace(made, host_gap=host_gap))
    return cells


class _Clock:
    """Times pairs of calls, and sums what the device did in a long one beyond a short one. The first pair does not
    count: kernels are compiled and steps recorded in it, for seconds that look as if the device computed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._device_s: list[tuple[float, float]] = []

    def between(self, prompts: list[list[int]], short: int, long: int) -> float:
        """Seconds by which a call with `long` new tokens lasts longer than one with `short`."""
        less, more = (self._timed(prompts, new_tokens) for new_tokens in (short, long))
        self._device_s.append((more[1] - less[1], more[2] - less[2]))
        return more[0] - less[0]

    def _timed(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, float]:
        """Seconds of one call; of these, that the device computed and waited."""
        before = self._engine.stats()
        seconds = generate(self._engine, prompts, new_tokens)
        after = self._engine.stats()
        busy, idle = (after[name] - before[name] for name in ("device_busy_s", "device_idle_s"))
        return seconds, busy, idle

    @property
    def host_gap(self) -> float | None:
        """The share of the time in which the device waited for the host; `None` where nobody measures."""
        busy, idle = (sum(spent) for spent in zip((0.0, 0.0), *self._device_s[1:], strict=True))
        return max(0.0, idle) / (busy + max(0.0, idle)) if busy > 0 else None


def generate(engine: Engine, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds of one call; what is cached stays."""
    sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    start = time.perf_counter()
    engine.generate(input_ids=prompts, sampling_params=sampling)
    return time.perf_counter() - start


def take(call: Callable[[], float], sampler: Sampler, plan: PairPlan) -> list[Sample]:
    """`plan.pairs` samples of `call`, each a mean over as many calls as fill `TURN_S`."""
    start = sampler.read()
    call()  # warms up, and says how many calls make a sample
    once_s = sampler.read().at_s - start.at_s
    calls = max(1, min(_MAX_CALLS, math.ceil(TURN_S / max(once_s, 1e-6))))
    samples = []
    for _ in range(plan.pairs):
        _, restless = wait_for_quiet(sampler, plan)
        start = sampler.read()
        step_s = statistics.fmean(call() for _ in range(calls))
        faults = judge(between(start, sampler.read(), cores=sampler.cores), plan.rule)
        if not step_s > 0:
            faults = (*faults, Fault("no time for a step"))
        samples.append(Sample(step_s, tuple({fault.what: fault for fault in (*restless, *faults)}.values())))
    return samples


def cell(
    path: str,
    rows: int,
    context: int,
    new_tokens: int,
    samples: Sequence[Sample],
    resolved: Mapping[str, Any],
    *,
    first: int = 0,
) -> Cell:
    """Rates from samples.

    Args:
        first: new tokens that the measured steps come after.

    Example:
        >>> sizes = {"weights_bytes": 100, "kv_bytes_per_token": 2}
        >>> made = cell("x", 4, 10, 2, [Sample(0.5), Sample(9.0, (Fault("foreign load"),))], sizes)
        >>> made.tokens_per_s, made.weight_bytes_per_s, made.kv_bytes_per_s, made.dirty
        (8.0, 200.0, 176.0, False)
    """
    clean = [sample.step_s for sample in samples if not sample.dirty]
    step_s = max(statistics.median(clean or [sample.step_s for sample in samples]), 1e-9)
    read_len = context + (first + new_tokens) / 2
    return Cell(
        path=path,
        rows=rows,
        context=context,
        step_s=step_s,
        tokens_per_s=rows / step_s,
        weight_bytes_per_s=resolved["weights_bytes"] / step_s,
        kv_bytes_per_s=rows * read_len * resolved["kv_bytes_per_token"] / step_s,
        dirty=not clean,
        samples=tuple(samples),
    )
