"""`sgl bench serve --attack`: what clean clients wait for their first token while somebody misbehaves.

Owns the comparison: rounds with and without each attack in turn, on the same server with the same clean load. The
server is warmed up once, for all of them. What attackers do is in `sgl.bench.attackers`.
"""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx2
import msgspec

from sgl.bench.attackers import Attack, attack_of
from sgl.bench.harness import PairPlan, measure_pairs
from sgl.bench.load import ProcSampler, Sampler
from sgl.bench.pairs import Pair, Result, summarise
from sgl.bench.provenance import Provenance, provenance, side_variables
from sgl.bench.serve import Load, own_server, percentile, run_load, served_model
from sgl.errors import BenchError
from sgl.runtime.config import config_from_mapping
from sgl.runtime.loading.facts import cpu_count

METRIC = "p99 TTFT"


class Attacked(msgspec.Struct, frozen=True, kw_only=True):
    """One attack: the ratio is p99 TTFT with it over that without it (1 is unharmed)."""

    name: str
    row: int
    result: Result
    pairs: tuple[Pair, ...]


class AttackReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `sgl bench serve --attack` prints."""

    model: str
    load: Load
    rate: float
    engine: dict[str, Any]
    provenance: Provenance
    attacks: tuple[Attacked, ...]


@contextmanager
def attacking(name: str, url: str, rate: float) -> Iterator[None]:
    """An attack in a process of its own, while the block runs."""
    command = [sys.executable, "-P", "-m", "sgl.bench.attackers", name, url, str(rate)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as attacker:
        try:
            if attacker.stdout is None or not attacker.stdout.readline():
                raise BenchError(f"the attacker {name} does not start")
            yield
            if attacker.poll() is not None:
                raise BenchError(f"the attacker {name} ended with status {attacker.returncode}")
        finally:
            attacker.kill()


def compare_attacks(
    fields: Mapping[str, Any],
    names: Sequence[str],
    load: Load,
    plan: PairPlan,
    *,
    rate: float = 2.0,
    sampler: Sampler | None = None,
    progress: Callable[[str], None] = lambda what: None,
    measured: Callable[[AttackReport], None] = lambda report: None,
) -> AttackReport:
    """The same clean load with and without each attack, in paired rounds on one server.

    Args:
        rate: strikes a second that each attacker begins at most.
        measured: is given the report so far after each attack.

    Raises:
        InvalidParameter: there is no such attack.
        BenchError: a clean request failed, or the server ended.
    """
    chosen = {name: attack_of(name) for name in names}
    config = config_from_mapping(fields)
    threads = config.num_threads or (1 if config.model_path == "dummy" else cpu_count())
    given = {**fields, "num_threads": threads}
    cores = sorted(os.sched_getaffinity(0))
    with own_server(given) as url:
        model = served_model(url)
        vocab = int(httpx2.get(f"{url}/server_info", timeout=30, trust_env=False).json()["vocab_size"])
        prompts = load.prompts(vocab)
        report = AttackReport(
            model=model,
            load=load,
            rate=rate,
            engine=given,
            provenance=provenance(cores, side_variables(threads), ()),
            attacks=(),
        )

        def calm(number: int) -> dict[str, float]:
            answers = asyncio.run(run_load(url, load, prompts, model))
            if wrong := [answer.error for answer in answers if answer.error]:
                raise BenchError(f"{len(wrong)} of {len(answers)} clean requests failed: {wrong[0]}")
            return {METRIC: percentile([answer.pieces_s[0] for answer in answers], 0.99)}

        def attacked(name: str, attack: Attack) -> Callable[[int], dict[str, float]]:
            def call(number: int) -> dict[str, float]:
                with attacking(name, url, rate):
                    seconds = calm(number)
                time.sleep(attack.settle_s)
                return seconds

            return call

        calls = _calls_in_a_turn(calm, plan)
        for number, (name, attack) in enumerate(chosen.items(), start=1):
            progress(f"{number} of {len(chosen)}, {name}: {attack.about}")
            watched = ProcSampler(cores) if sampler is None else sampler
            run = measure_pairs(calm, attacked(name, attack), watched, plan, calls=calls, progress=progress)
            result = summarise(run.pairs, METRIC, plan.pairs)
            progress(f"{name}: {result.verdict}")
            found = Attacked(name=name, row=attack.row, result=result, pairs=run.pairs)
            report = msgspec.structs.replace(report, attacks=(*report.attacks, found))
            measured(report)
    return report


def _calls_in_a_turn(calm: Callable[[int], object], plan: PairPlan) -> int:
    """Warm the server up; how often a turn repeats the clean load to last as long as the plan wants."""
    for number in range(-plan.warm_ups - 1, 0):
        begun = time.perf_counter()
        calm(number)
        seconds = time.perf_counter() - begun
    return max(1, math.ceil(plan.turn_s / seconds))
