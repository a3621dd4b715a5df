"""`sgl bench simulate`: what a recorded load would have cost under other settings, on virtual time.

Owns the comparison: the programs of a `message_log` go through the simulator once per variant. Counters are those of
the real scheduler, tree and pool; seconds are the latency model's, fitted to a `trace_file` of the same machine when
one is given. Model and options are those of the engine that wrote the log, unless others are given. Loads the model's
tokenizer, never its weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from sgl.environment import parse_option
from sgl.errors import ConfigError
from sgl.runtime.config import EngineConfig, config_from_mapping
from sgl.runtime.loading.checkpoint import open_checkpoint
from sgl.runtime.loading.sources import locate
from sgl.runtime.resolution import resolve
from sgl.runtime.simulator import LatencyModel, SimulatedProgram, Simulation, load_log, poisson
from sgl.runtime.text.tokenizer import Tokenizer


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One row: the fields that it sets, and what they led to. Seconds are virtual, tokens are counted; latencies are of
    the programs that ended, `None` when none did."""

    fields: dict[str, Any]
    programs: int
    failed: int
    makespan_s: float
    latency_p50_s: float | None
    latency_p99_s: float | None
    busy_share: float
    prompt_tokens: int
    cached_tokens: int
    prefill_tokens: int
    decode_tokens: int
    forwards: int
    retractions: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The model whose tokenizer was used, the fields of every variant, the latency model, and a row per variant."""

    model: str
    engine: dict[str, Any]
    latency: LatencyModel
    variants: tuple[Variant, ...]


def variants_of(given: Sequence[str]) -> list[dict[str, Any]]:
    """Every combination of `FIELD=V1,V2,...`, fields of `EngineConfig`.

    Raises:
        ConfigError: one has another form, is no field, or no value of it.

    Example:
        >>> variants_of(["schedule_policy=fcfs,lpm", "page_size=1,16"])[1]
        {'schedule_policy': 'fcfs', 'page_size': 16}
    """
    hints = get_type_hints(EngineConfig, include_extras=True)
    choices = []
    for each in given:
        field, equals, values = each.partition("=")
        if not equals or not field or not all(values.split(",")):
            raise ConfigError(
                f"--vary is {each!r}; expected FIELD=V1,V2,...",
                hint="for example --vary schedule_policy=program,fcfs",
                param="vary",
            )
        field = field.replace("-", "_")
        if field not in hints:
            config_from_mapping({field: None})  # says which one was meant
        choices.append([(field, parse_option(value, hints[field], f"--vary {field}")) for value in values.split(",")])
    return [dict(combination) for combination in itertools.product(*choices)]


def run(
    log: Path,
    fields: Mapping[str, Any],
    *,
    vary: Sequence[str] = (),
    trace: Path | None = None,
    rate: float | None = None,
    seed: int = 0,
) -> Report:
    """Simulate the programs in `log`.

    Args:
        fields: of `EngineConfig`, for every variant, over those that the log was written with.
        vary: `FIELD=V1,V2,...`; every combination is a variant.
        trace: a `trace_file` to fit the latency model to.
        rate: programs that arrive per second, at random; all at once without it.

    Raises:
        ConfigError: a file cannot be read, or a field has a wrong value.
    """
    recorded = load_log(log)
    programs: Sequence[SimulatedProgram] = recorded.programs
    fields = {**recorded.fields, **fields}
    if rate is not None:
        programs = poisson(programs, rate, seed)
    latency = LatencyModel.from_trace(trace) if trace is not None else LatencyModel()
    base = config_from_mapping(fields)
    source = locate(base.model_path, load_format=base.load_format, offline=base.offline, revision=base.revision)
    checkpoint = open_checkpoint(source, base.json_model_override_args)
    path = base.tokenizer_path
    tokenizer = checkpoint.tokenizer() if path is None else Tokenizer.from_folder(path)
    facts = checkpoint.facts()
    rows = []
    for changed in variants_of(vary):
        config = config_from_mapping({**fields, **changed})
        result = Simulation(resolve(config, facts), latency, tokenizer).run(programs)
        stats = result.stats
        rows.append(
            Variant(
                fields=changed,
                programs=len(result.programs),
                failed=sum(times.error is not None for times in result.programs),
                makespan_s=result.makespan_s,
                latency_p50_s=result.latency_s(0.5),
                latency_p99_s=result.latency_s(0.99),
                busy_share=result.busy_share,
                prompt_tokens=stats.prompt_tokens,
                cached_tokens=stats.cached_tokens,
                prefill_tokens=stats.prefill_tokens,
                decode_tokens=stats.decode_tokens,
                forwards=stats.forwards,
                retractions=stats.retractions,
            )
        )
    return Report(model=source.name, engine=fields, latency=latency, variants=tuple(rows))
