"""Runs pairs: waits for a quiet machine, lets the two sides take turns, watches the cores, keeps what happened.

Called by `sgl.bench.comparison`. The sides are processes of their own, of which at most one has something to do at any
time; the harness itself sleeps meanwhile. Sides, sampler and sleep are arguments, so that tests run it without a clock.

Invariants: a pair is counted by the rule alone, never by its times; both sides make the same number of calls; the seed
decides the order of turns. A side that fails ends the measurement with its own error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from sgl.bench.load import CleanRule, Fault, Sampler, Window, between, judge
from sgl.bench.pairs import Pair, Trial, orders
from sgl.errors import InvalidParameter

Call = Callable[[int], Mapping[str, float]]
"""One call to a side: number of the call (both sides get the same numbers) -> seconds by metric."""

_MAX_CALLS = 1000
"""In one turn."""


class PairPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How to measure.

    Args:
        pairs: clean pairs wanted; with fewer there is no figure.
        attempts: pairs tried at most, `4 * pairs` by default.
        seed: of the order of turns and of the prompts.
        patience_s: how long to wait for a quiet machine before each pair.
        quiet_s: length of the quiet time before a pair.
        turn_s: a side's turn lasts about this long at least, by repeating calls. The counters of ticks and of run time
            disagree by some 1 % of the cores' time in two seconds, by more in a shorter time.
    """

    pairs: int = 5
    attempts: int | None = None
    seed: int = 0
    warm_ups: int = 1
    patience_s: float = 10.0
    quiet_s: float = 0.5
    turn_s: float = 2.0
    rule: CleanRule = CleanRule()

    def __post_init__(self) -> None:
        if self.pairs < 1 or self.max_attempts < self.pairs:
            raise InvalidParameter(
                f"pairs is {self.pairs} and attempts {self.max_attempts}; expected at least 1, and attempts >= pairs",
                hint="raise attempts, or leave it out",
                param="pairs",
            )
        if self.warm_ups < 1:
            raise InvalidParameter(
                f"warm_ups is {self.warm_ups}; expected at least 1: the first call is not what is asked for",
                param="warm_ups",
            )

    @property
    def max_attempts(self) -> int:
        """Pairs tried at most."""
        return 4 * self.pairs if self.attempts is None else self.attempts


class Run(msgspec.Struct, frozen=True):
    """What was done: calls per turn, and all pairs, dirty ones included."""

    calls: int
    pairs: tuple[Pair, ...]

    @property
    def clean(self) -> int:
        """Pairs that count."""
        return sum(pair.clean for pair in self.pairs)


def measure_pairs(
    a: Call,
    b: Call,
    sampler: Sampler,
    plan: PairPlan,
    *,
    sides: Sequence[int] = (),
    calls: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
    progress: Callable[[str], None] = lambda what: None,
) -> Run:
    """Let `a` and `b` take turns until `plan.pairs` pairs are clean or the attempts are used up.

    Args:
        sides: process ids of `a` and `b`, when they live through the measurement: that the one rests while the other
            works is then checked.
        calls: of a turn, where both sides are warm already; else both are warmed up here, which tells.
    """
    calls = _warm_up(a, b, sampler, plan) if calls is None else calls
    pairs: list[Pair] = []
    clean = 0
    for index, order in enumerate(orders(plan.max_attempts, plan.seed)):
        if clean == plan.pairs:
            break
        before, restless = wait_for_quiet(sampler, plan, sides, sleep)
        turns: dict[str, Trial] = {}
        faults = {fault.what: fault for fault in restless}
        numbers = range(index * calls, (index + 1) * calls)
        for name in order:
            if faults:
                break  # the other turn cannot save the pair
            side = "AB".index(name)
            turns[name] = _turn((a, b)[side], numbers, sampler, sides, [1 - side] if sides else [])
            faults = {fault.what: fault for fault in _faults(turns[name], plan.rule)}
        pair = Pair(
            index=index, order=order, before=before, a=turns.get("A"), b=turns.get("B"), dirty=tuple(faults.values())
        )
        pairs.append(pair)
        clean += pair.clean
        state = "clean" if pair.clean else ", ".join(map(str, pair.dirty))
        progress(f"pair {index + 1}: {state} ({clean} of {plan.pairs} clean)")
    return Run(calls, tuple(pairs))


def _warm_up(a: Call, b: Call, sampler: Sampler, plan: PairPlan) -> int:
    """Call both sides untimed; the calls per turn that give the faster one a turn of `turn_s`."""
    fastest = math.inf
    for number in range(-plan.warm_ups, 0):
        for call in (a, b):
            window = _turn(call, range(number, number + 1), sampler, (), ()).window
            fastest = min(fastest, window.elapsed_s)
    return max(1, min(_MAX_CALLS, math.ceil(plan.turn_s / max(fastest, 1e-6))))


def wait_for_quiet(
    sampler: Sampler, plan: PairPlan, sides: Sequence[int] = (), sleep: Callable[[float], None] = time.sleep
) -> tuple[Window, tuple[Fault, ...]]:
    """Watch the cores while nothing runs until they are quiet, or patience ends; the last window, and its faults."""
    waited = 0.0
    while True:
        start = sampler.read(sides)
        sleep(plan.quiet_s)
        window = between(start, sampler.read(sides), cores=sampler.cores, resting=range(len(sides)))
        restless = judge(window, plan.rule)
        waited += window.elapsed_s
        if not restless or waited >= plan.patience_s:
            return window, restless


def _turn(call: Call, numbers: range, sampler: Sampler, sides: Sequence[int], resting: Sequence[int]) -> Trial:
    """Some calls to one side; times are means over them."""
    start = sampler.read(sides)
    seconds = [call(number) for number in numbers]
    window = between(start, sampler.read(sides), cores=sampler.cores, resting=resting)
    return Trial({metric: sum(each[metric] for each in seconds) / len(seconds) for metric in seconds[0]}, window)


def _faults(turn: Trial, rule: CleanRule) -> tuple[Fault, ...]:
    """Why a turn does not count: the load, or a difference of times that came out as nothing."""
    senseless = tuple(Fault(f"no time for {metric}") for metric, seconds in turn.seconds.items() if not seconds > 0)
    return (*judge(turn.window, rule), *senseless)
