"""The harness without a clock: invented load, invented times. What counts, what is dropped, and what is no figure."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import pytest

from sgl.bench.harness import PairPlan, measure_pairs
from sgl.bench.load import CleanRule, Fault, ProcSampler, Snapshot, Window, between, judge, least_busy
from sgl.bench.pairs import Pair, Trial, median_interval, orders, summarise
from sgl.errors import InvalidParameter

A, B = 101, 202
"""Process ids of the two sides."""
CORES = 2


class Machine:
    """Two invented cores with an invented clock. Sides work on one core each second; `foreign` says what others use."""

    cores = CORES

    def __init__(self, foreign: Callable[[float], float] = lambda at: 0.0) -> None:
        self.now = 0.0
        self.foreign = foreign
        self.steal = 0.0
        self._busy = 0.0
        self._own = 0.0
        self._sides = {A: 0.0, B: 0.0}
        self.spinning: int | None = None
        self.hidden = False

    def read(self, sides: Collection[int] = ()) -> Snapshot:
        return Snapshot(
            at_s=self.now,
            busy_s=None if self.hidden else self._busy,
            steal_s=self.steal * self.now,
            own_s=self._own,
            sides_s=tuple(self._sides[side] for side in sides),
        )

    def sleep(self, seconds: float) -> None:
        """Time passes; others work their share of all cores."""
        self._busy += self.foreign(self.now) * seconds * self.cores
        if self.spinning is not None:
            self._use(self.spinning, seconds)
        self.now += seconds

    def work(self, side: int, seconds: float) -> None:
        self._use(side, seconds)
        self.sleep(seconds)

    def _use(self, side: int, seconds: float) -> None:
        for total in ("_busy", "_own"):
            setattr(self, total, getattr(self, total) + seconds)
        self._sides[side] += seconds


def constant(machine: Machine, side: int, seconds: float) -> Callable[[int], Mapping[str, float]]:
    """A side whose calls take the same time."""

    def call(number: int) -> dict[str, float]:
        del number
        machine.work(side, seconds)
        return {"whole": seconds}

    return call


def run(machine: Machine, plan: PairPlan, a_s: float = 1.0, b_s: float = 2.0) -> tuple[Pair, ...]:
    a, b = constant(machine, A, a_s), constant(machine, B, b_s)
    return measure_pairs(a, b, machine, plan, sides=[A, B], sleep=machine.sleep).pairs


def window(**changes: float | None) -> Window:
    fields = {"elapsed_s": 1.0, "busy_s": 1.0, "own_s": 1.0, "steal_s": 0.0, "resting_s": 0.0} | changes
    return Window(cores=CORES, **fields)  # type: ignore[arg-type]


def pair(a_s: float, b_s: float, *faults: str) -> Pair:
    return Pair(
        index=0,
        order="AB",
        before=window(),
        a=Trial({"whole": a_s}, window()),
        b=Trial({"whole": b_s}, window()),
        dirty=tuple(map(Fault, faults)),
    )


# --- the rule -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({}, []),
        ({"busy_s": 1.05}, []),  # 2 % of two cores and two ticks of rounding are 0.06 s
        ({"busy_s": 1.07}, ["foreign load"]),
        ({"busy_s": 0.9}, []),  # counters of two kinds may disagree by a little; less than nothing is nothing
        ({"steal_s": 0.11}, []),
        ({"steal_s": 0.13}, ["stolen time"]),
        ({"resting_s": 0.05}, ["resting side busy"]),
        ({"busy_s": 2.0, "steal_s": 1.0}, ["foreign load", "stolen time"]),
        ({"elapsed_s": 0.1}, ["too short to sample"]),
        ({"busy_s": None}, ["the load of this machine cannot be read"]),
    ],
)
def test_the_rule(changes: dict[str, float | None], faults: list[str]) -> None:
    assert [fault.what for fault in judge(window(**changes), CleanRule())] == faults


def test_a_stricter_rule_drops_more() -> None:
    assert not judge(window(busy_s=1.05), CleanRule())
    assert judge(window(busy_s=1.05), CleanRule(max_foreign=0.0))


def test_a_window_is_the_difference_of_its_ends() -> None:
    before = Snapshot(at_s=5.0, busy_s=10.0, steal_s=1.0, own_s=3.0, sides_s=(1.0, 2.0), pressure_s=0.5)
    after = Snapshot(at_s=7.0, busy_s=13.0, steal_s=1.5, own_s=4.0, sides_s=(1.75, 2.25), pressure_s=0.6)
    seen = between(before, after, cores=2, resting=[1])
    assert (seen.elapsed_s, seen.busy_s, seen.own_s, seen.steal_s, seen.resting_s) == (2.0, 3.0, 1.0, 0.5, 0.25)
    assert seen.foreign_s == 2.0
    assert seen.pressure_s == pytest.approx(0.1)


# --- the figure -----------------------------------------------------------------------------------------------------


def test_ratio_is_the_median_of_the_pairs_ratios() -> None:
    pairs = [pair(1.0, 2.0), pair(2.0, 6.0), pair(4.0, 10.0)]
    result = summarise(pairs, "whole", needed=3)
    assert result.ratio is not None
    assert (result.ratio.median, result.ratio.a_s, result.ratio.b_s) == (2.5, 2.0, 6.0)
    assert (result.ratio.interval.low, result.ratio.interval.high) == (2.0, 3.0)


def test_too_few_clean_pairs_are_no_figure() -> None:
    pairs = [pair(1.0, 2.0), pair(1.0, 2.0), pair(1.0, 9.0, "foreign load"), pair(1.0, 9.0, "foreign load")]
    result = summarise(pairs, "whole", needed=3)
    assert result.ratio is None
    assert (result.clean, result.attempted, result.dirty) == (2, 4, {"foreign load": 2})
    assert result.verdict == "not measured: 2 clean pairs of 4, 3 needed"
    assert summarise([], "whole", needed=1).ratio is None


def test_dirty_pairs_never_reach_the_figure() -> None:
    clean = [pair(1.0, 2.0)] * 3
    wild = [pair(1.0, 1000.0, "stolen time"), pair(1000.0, 1.0, "foreign load")]
    assert summarise(clean + wild, "whole", needed=3).ratio == summarise(clean, "whole", needed=3).ratio


def test_an_outlier_that_is_clean_moves_the_interval_and_not_the_median() -> None:
    usual = [pair(1.0, 2.0 + 0.01 * i) for i in range(8)]
    calm, shaken = summarise(usual, "whole", 5).ratio, summarise([*usual, pair(1.0, 50.0)], "whole", 5).ratio
    assert calm is not None
    assert shaken is not None
    assert shaken.median == pytest.approx(calm.median, abs=0.01)
    assert shaken.interval.high < 3  # of nine values the interval leaves out the extremes
    few = summarise([*usual[:4], pair(1.0, 50.0)], "whole", 5).ratio
    assert few is not None
    assert few.interval.high == 50.0  # of five it cannot
    assert few.interval.confidence == pytest.approx(0.9375)


@pytest.mark.parametrize(
    ("count", "low", "high", "confidence"),
    [
        (1, 0, 0, 0.0),
        (3, 0, 2, 0.75),
        (5, 0, 4, 0.9375),
        (6, 0, 5, 0.96875),
        (8, 0, 7, 0.9921875),
        (9, 1, 7, 0.9609375),
        (20, 5, 14, 0.9586),
    ],
)
def test_interval_by_order_statistics(count: int, low: int, high: int, confidence: float) -> None:
    values = [float(i) for i in range(count)]
    random.Random(0).shuffle(values)
    interval = median_interval(values)
    assert (interval.low, interval.high) == (low, high)
    assert interval.confidence == pytest.approx(confidence, abs=1e-4)


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    draw = random.Random(7)
    covered = sum(
        interval.low <= 1.0 <= interval.high
        for interval in (median_interval([draw.lognormvariate(0.0, 0.2) for _ in range(9)]) for _ in range(1000))
    )
    assert 940 <= covered <= 980  # 961 are promised; four standard errors are 25


# --- the pairs ------------------------------------------------------------------------------------------------------


def test_a_quiet_machine_gives_the_ratio() -> None:
    machine = Machine()
    pairs = run(machine, PairPlan(pairs=4))
    assert len(pairs) == 4
    assert sorted(pair.order for pair in pairs) == ["AB", "AB", "BA", "BA"]
    result = summarise(pairs, "whole", needed=4)
    assert result.ratio is not None
    assert result.ratio.median == pytest.approx(2.0)


def test_orders_are_balanced_and_follow_the_seed() -> None:
    drawn = orders(40, seed=3)
    assert drawn == orders(40, seed=3) != orders(40, seed=4)
    assert drawn.count("AB") == 20
    assert all({*drawn[i : i + 2]} == {"AB", "BA"} for i in range(0, 40, 2))


def test_equal_sides_give_one_under_noise_and_drift() -> None:
    """A against A: each call takes a noisy time on a machine that slows down; the interval holds 1 as often as said."""
    holds = 0
    for seed in range(200):
        machine, draw = Machine(), random.Random(seed)

        def noisy(
            side: int, machine: Machine = machine, draw: random.Random = draw
        ) -> Callable[[int], dict[str, float]]:
            def call(number: int) -> dict[str, float]:
                seconds = draw.lognormvariate(0.0, 0.05) * (1 + machine.now / 300)
                machine.work(side, seconds)
                return {"whole": seconds}

            return call

        plan = PairPlan(pairs=9, seed=seed)
        done = measure_pairs(noisy(A), noisy(B), machine, plan, sides=[A, B], sleep=machine.sleep)
        ratio = summarise(done.pairs, "whole", 9).ratio
        assert ratio is not None
        holds += ratio.interval.low <= 1.0 <= ratio.interval.high
    assert holds >= 180


def test_a_busy_machine_is_not_measured_and_its_sides_are_left_alone() -> None:
    machine = Machine(foreign=lambda at: 0.5)
    pairs = run(machine, PairPlan(pairs=2, attempts=5, patience_s=3.0))
    assert len(pairs) == 5
    assert all(pair.a is None and pair.b is None for pair in pairs), "no turn is worth its time"
    assert {fault.what for pair in pairs for fault in pair.dirty} == {"foreign load"}
    assert summarise(pairs, "whole", needed=2).ratio is None


def test_it_waits_for_a_quiet_moment() -> None:
    machine = Machine(foreign=lambda at: 0.9 if at < 20 else 0.0)
    pairs = run(machine, PairPlan(pairs=2, patience_s=60.0))
    assert [pair.clean for pair in pairs] == [True, True]


def test_load_during_a_turn_drops_its_pair_and_another_is_tried() -> None:
    machine = Machine()
    begun: list[float] = []

    def disturbed(number: int) -> dict[str, float]:
        begun.append(machine.now)
        machine.foreign = (lambda at: 0.4) if len(begun) == 3 else (lambda at: 0.0)  # one warm-up, then the second pair
        machine.work(A, 1.0)
        machine.foreign = lambda at: 0.0
        return {"whole": 1.0}

    done = measure_pairs(
        disturbed, constant(machine, B, 2.0), machine, PairPlan(pairs=3, turn_s=1.0), sides=[A, B], sleep=machine.sleep
    )
    assert [pair.clean for pair in done.pairs] == [True, False, True, True]
    assert [fault.what for fault in done.pairs[1].dirty] == ["foreign load"]
    assert done.clean == 3


def test_a_side_that_does_not_rest_makes_every_pair_dirty() -> None:
    machine = Machine()
    machine.spinning = B
    pairs = run(machine, PairPlan(pairs=1, attempts=2, patience_s=1.0))
    assert [fault.what for pair in pairs for fault in pair.dirty] == ["resting side busy"] * 2


def test_stolen_time_and_hidden_counters_make_pairs_dirty() -> None:
    machine = Machine()
    machine.steal = 0.2
    assert {fault.what for pair in run(machine, PairPlan(pairs=1, patience_s=1.0)) for fault in pair.dirty} == {
        "stolen time"
    }
    machine = Machine()
    machine.hidden = True
    assert not any(pair.clean for pair in run(machine, PairPlan(pairs=1, patience_s=1.0)))


def test_short_calls_are_repeated_until_a_turn_can_be_sampled() -> None:
    machine = Machine()
    a, b = constant(machine, A, 0.01), constant(machine, B, 0.05)
    done = measure_pairs(a, b, machine, PairPlan(pairs=2, turn_s=0.5), sides=[A, B], sleep=machine.sleep)
    assert done.calls == 50
    assert done.clean == 2
    first = done.pairs[0]
    assert first.a is not None
    assert first.a.seconds["whole"] == pytest.approx(0.01)
    assert first.a.window.elapsed_s == pytest.approx(0.5)


def test_both_sides_get_the_same_calls_and_no_call_twice() -> None:
    machine = Machine()
    calls: dict[int, list[int]] = {A: [], B: []}

    def noting(side: int) -> Callable[[int], dict[str, float]]:
        def call(number: int) -> dict[str, float]:
            calls[side].append(number)
            machine.work(side, 0.4)
            return {"whole": 0.4}

        return call

    measure_pairs(noting(A), noting(B), machine, PairPlan(pairs=3, turn_s=1.0), sides=[A, B], sleep=machine.sleep)
    assert calls[A] == calls[B] == [-1, *range(9)]


def test_a_difference_that_is_no_time_drops_the_pair() -> None:
    machine = Machine()

    def odd(number: int) -> dict[str, float]:
        machine.work(A, 1.0)
        return {"whole": 1.0, "decode": -0.01}

    done = measure_pairs(odd, odd, machine, PairPlan(pairs=1, attempts=1), sleep=machine.sleep)
    assert [str(fault) for fault in done.pairs[0].dirty] == ["no time for decode"]


@pytest.mark.parametrize("fields", [{"pairs": 0}, {"pairs": 5, "attempts": 4}, {"warm_ups": 0}])
def test_a_plan_that_cannot_give_a_figure_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(InvalidParameter, match="expected at least 1"):
        PairPlan(**fields)  # type: ignore[arg-type]


# --- the counters of this machine -----------------------------------------------------------------------------------


def test_counters_of_a_machine_on_paper(tmp_path: Path) -> None:
    tick = os.sysconf("SC_CLK_TCK")
    (tmp_path / "stat").write_text(
        "cpu  9 9 9 9 9 9 9 9 0 0\n"
        f"cpu0 {1 * tick} {2 * tick} {3 * tick} {100 * tick} {50 * tick} {4 * tick} {5 * tick} {6 * tick} 0 0\n"
        f"cpu1 {7 * tick} 0 0 0 0 0 0 {tick} 0 0\ncpu2 {99 * tick} 0 0 0 0 0 0 0 0 0\nintr 5\n"
    )
    me = os.getpid()
    for pid, parent, ticks in ((me, 1, 100), (A, me, 200), (A + 1, A, 300), (999, 1, 5000)):
        (tmp_path / str(pid)).mkdir()
        times = f"{ticks} {ticks // 2} {ticks // 4} {ticks // 4}"
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a (b) c) S {parent} 0 0 0 0 0 0 0 0 0 {times} 20 0\n")
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "cpu").write_text("some avg10=1.0 avg60=1.0 avg300=1.0 total=2500000\nfull total=9\n")
    seen = ProcSampler([0, 1], tmp_path).read([A])
    assert (seen.busy_s, seen.steal_s) == (15.0 + 7.0, 7.0)
    assert (seen.own_s, seen.sides_s) == (600 * 2 / tick, (500 * 2 / tick,))
    assert seen.pressure_s == 2.5


def test_counters_that_are_not_there_make_a_window_dirty(tmp_path: Path) -> None:
    sampler = ProcSampler([0], tmp_path)
    seen = sampler.read()
    assert seen.busy_s is None
    assert judge(between(seen, sampler.read(), cores=1), CleanRule())


def test_work_of_a_child_is_our_own_while_it_lives_and_after() -> None:
    sampler = ProcSampler(os.sched_getaffinity(0))
    before = sampler.read()
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        living = sampler.read([child.pid])
        assert living.sides_s[0] >= 0.29
        child.communicate(b"\n")
    ended = sampler.read([child.pid])
    assert ended.sides_s == (0.0,)
    assert ended.own_s - before.own_s >= living.own_s - before.own_s >= 0.29 - 1e-6  # differences of sums of ticks


def test_cores_are_those_we_may_use() -> None:
    cores = os.sched_getaffinity(0)
    assert least_busy(cores, 10_000) == sorted(cores)
    assert set(least_busy(cores, 1, sample_s=0.01)) < cores or len(cores) == 1
