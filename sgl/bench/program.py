"""`sgl bench program --counters`: what the cache finds of each workload, beside what it could have found.

Owns the measurement: a workload runs once with room to see how many distinct tokens it has, then with each eviction
policy in a pool of half of them, on an engine in this process. Everything is counted and nothing timed, so the figures
hold on any machine; of static programs they are the same in each run. The counts do not depend on the model, only on
the tokenizer's lengths, so the `dummy` model is enough.

What is compared with what: hits are prompt tokens that were found in the cache and not lost again before they were
used: a request's `cached_tokens` less its `recomputed_tokens`, but not below 0. They are summed over all requests of
the workload's programs (options of selects aside: they are computed in any case). Belady's bound and the unbounded
optimum are computed for the very requests of that run, in the order in which the engine admitted them
(`sgl.bench.belady`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from typing import Any, get_args

import msgspec

from sgl.bench.belady import PrefixTree
from sgl.bench.stepped import Record, SteppedEngine
from sgl.bench.workloads import Call, Unit, Workload
from sgl.errors import ConfigError, InternalError
from sgl.lang.graph import Usage
from sgl.lang.state import ProgramState
from sgl.runtime.eviction import EvictionPolicyName
from sgl.runtime.stats import Stats

POLICIES: tuple[str, ...] = get_args(EvictionPolicyName)
"""What `radix_eviction_policy` may be."""

DEFAULT_POLICIES = ("program", "lru", "slru")
_OURS = ("max_total_tokens", "radix_eviction_policy", "disable_radix_cache")
"""Fields that the measurement sets itself."""


class PolicyCounts(msgspec.Struct, frozen=True, kw_only=True):
    """One workload under one policy; tokens unless named otherwise.

    Attributes:
        prompt_tokens, hit_tokens: of all requests but the options of selects.
        belady_tokens, lru_tokens: hits of the offline optimum, and of exact LRU one request after the other, on the
            same requests in the same order at the same capacity.
        unbounded_tokens: hits of a cache that keeps everything.
        of_belady: measured hits over those of the offline optimum; 1 where there is nothing to hit.
        recomputed_tokens, retractions, forwards: what the small pool cost besides.
    """

    policy: str
    prompt_tokens: int
    hit_tokens: int
    belady_tokens: int
    lru_tokens: int
    unbounded_tokens: int
    of_belady: float
    recomputed_tokens: int
    retractions: int
    forwards: int


class WorkloadCounts(msgspec.Struct, frozen=True, kw_only=True):
    """One workload.

    Attributes:
        programs, requests: runs, and generations and scored prompts in them.
        round_trips: most messages that one of its programs sent.
        distinct_tokens: of the union of all requests, outputs included; `capacity` is half of that, or what the longest
            request needs.
        policies: one entry for each policy.
    """

    name: str
    static: bool
    programs: int
    requests: int
    round_trips: int
    distinct_tokens: int
    capacity: int
    policies: tuple[PolicyCounts, ...]


class PolicyTotal(msgspec.Struct, frozen=True, kw_only=True):
    """All workloads under one policy, by the token; `lowest` is the smallest ratio of a single workload, of those in
    which the optimum hits at least one token in a hundred."""

    policy: str
    hit_rate: float
    belady_hit_rate: float
    lru_hit_rate: float
    unbounded_hit_rate: float
    of_belady: float
    lowest: float


class CounterReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `sgl bench program --counters` prints."""

    model: str
    scale: float
    seed: int
    engine: dict[str, Any]
    workloads: tuple[WorkloadCounts, ...]
    totals: tuple[PolicyTotal, ...]


def count(
    workloads: Sequence[Workload],
    policies: Sequence[str] = DEFAULT_POLICIES,
    *,
    scale: float = 0.01,
    seed: int = 0,
    fields: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> CounterReport:
    """Run the workloads under each policy.

    Args:
        policies: values of `radix_eviction_policy`.
        scale, seed: of the workloads.
        fields: of `EngineConfig`; the `dummy` model by default.

    Raises:
        ConfigError: an unknown policy, or a field that the measurement sets itself.
        PromptTooLong: the scale makes prompts longer than the model's context (`dummy` has 2,048 tokens: up to 0.1).
    """
    for policy in policies:
        if policy not in POLICIES:
            raise ConfigError(
                f"no eviction policy {policy!r}", hint=f"they are {', '.join(POLICIES)}", param="radix_eviction_policy"
            )
    given = dict(fields or {})
    for name in _OURS:
        if name in given:
            raise ConfigError(f"{name} is what is measured here; it cannot be given", hint="leave it out", param=name)
    given = engine_fields(given)
    counted = []
    for workload in workloads:
        progress(workload.name)
        counted.append(_count_workload(workload, policies, scale, seed, given))
    totals = tuple(_total(policy, counted) for policy in policies) if counted else ()
    return CounterReport(
        model=given["model_path"], scale=scale, seed=seed, engine=given, workloads=tuple(counted), totals=totals
    )


def engine_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the engine to measure with: the `dummy` model unless another is given, and that one on one thread,
    as its layers are too small to share."""
    fields = {"model_path": "dummy", **given}
    if fields["model_path"] == "dummy":
        fields.setdefault("num_threads", 1)
    return fields


def unit_of(model_path: str) -> Unit:
    """What is about one token for a model."""
    return "bytes" if model_path == "dummy" else "words"


def run_calls(engine: SteppedEngine, calls: Sequence[Call]) -> list[ProgramState]:
    """Run the calls wave by wave; a wave's programs arrive in order and before anything of it is computed."""
    states: list[ProgramState] = []
    for wave in waves(calls):
        with ThreadPoolExecutor(len(wave), thread_name_prefix="sgl-bench") as pool:
            futures: list[Future[ProgramState]] = []
            with engine.held():
                for call in wave:
                    arrived = len(engine.messages)
                    future = pool.submit(call.run, engine)
                    future.add_done_callback(engine.notify)
                    engine.wait_for_programs(arrived + 1, otherwise=future.done)
                    futures.append(future)
            states += [future.result() for future in futures]
    return states


def waves(calls: Sequence[Call]) -> Iterator[list[Call]]:
    """The calls that may run together, wave after wave."""
    for _, group in groupby(sorted(calls, key=lambda call: call.wave), key=lambda call: call.wave):
        yield list(group)


def _count_workload(
    workload: Workload, policies: Sequence[str], scale: float, seed: int, fields: Mapping[str, Any]
) -> WorkloadCounts:
    calls = workload.build(seed, scale, unit_of(fields["model_path"]))
    with SteppedEngine(**fields) as engine:
        run_calls(engine, calls)
        records = engine.records()
        messages = dict(engine.messages)
    distinct = PrefixTree([record.access for record in records]).num_tokens
    capacity = max(distinct // 2, max(record.needed_tokens for record in records))
    return WorkloadCounts(
        name=workload.name,
        static=workload.static,
        programs=len(messages),
        requests=len(records),
        round_trips=max(messages.values()),
        distinct_tokens=distinct,
        capacity=capacity,
        policies=tuple(_count_policy(calls, policy, capacity, fields) for policy in policies),
    )


def _count_policy(calls: Sequence[Call], policy: str, capacity: int, fields: Mapping[str, Any]) -> PolicyCounts:
    with SteppedEngine(**fields, max_total_tokens=capacity, radix_eviction_policy=policy) as engine:
        run_calls(engine, calls)
        records, stats = engine.records(), engine.stats()
    _check_complete(records, stats)
    tree = PrefixTree([record.access for record in records])
    counted = [record.usage for record in records if not record.scored]
    hits = sum(max(0, usage.cached_tokens - usage.recomputed_tokens) for usage in counted)
    belady = tree.hits_belady(capacity)
    return PolicyCounts(
        policy=policy,
        prompt_tokens=sum(usage.prompt_tokens for usage in counted),
        hit_tokens=hits,
        belady_tokens=belady,
        lru_tokens=tree.hits_lru(capacity),
        unbounded_tokens=tree.hits_forever(),
        of_belady=_share(hits, belady),
        recomputed_tokens=stats.recomputed_tokens,
        retractions=stats.retractions,
        forwards=stats.forwards,
    )


def _check_complete(records: Sequence[Record], stats: Stats) -> None:
    """The records are what the engine counted; if not, the bounds belong to other requests than the hits."""
    recorded = sum((record.usage for record in records), Usage())
    for name in ("prompt_tokens", "cached_tokens", "prefill_tokens"):
        counted, found = getattr(stats, name), getattr(recorded, name)
        if counted != found:
            raise InternalError(f"the engine counts {counted} {name}, the records of its requests {found}")


def _total(policy: str, counted: Sequence[WorkloadCounts]) -> PolicyTotal:
    rows = [row for workload in counted for row in workload.policies if row.policy == policy]
    prompt = sum(row.prompt_tokens for row in rows)
    hits = sum(row.hit_tokens for row in rows)
    belady = sum(row.belady_tokens for row in rows)
    return PolicyTotal(
        policy=policy,
        hit_rate=hits / prompt,
        belady_hit_rate=belady / prompt,
        lru_hit_rate=sum(row.lru_tokens for row in rows) / prompt,
        unbounded_hit_rate=sum(row.unbounded_tokens for row in rows) / prompt,
        of_belady=_share(hits, belady),
        lowest=min((row.of_belady for row in rows if 100 * row.belady_tokens >= row.prompt_tokens), default=1.0),
    )


def _share(hits: int, possible: int) -> float:
    return hits / possible if possible else 1.0
