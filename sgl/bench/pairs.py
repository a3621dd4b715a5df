"""What a paired measurement is, and what follows from its pairs. Pure: no process, no clock.

A pair is both sides measured right after each other, so that what drifts (frequency, temperature, page cache) meets
both. The figure is the median of the pairs' ratios; its interval is made of order statistics, which assumes nothing
about the distribution. Dirty pairs are kept in the record and never in a figure, and too few clean ones give no figure.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from sgl.bench.load import Fault, Window

Order = Literal["AB", "BA"]

CONFIDENCE = 0.95


class Trial(msgspec.Struct, frozen=True):
    """One side's turn: seconds by metric (mean of the turn's calls), and what the cores did meanwhile."""

    seconds: dict[str, float]
    window: Window


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt. `a` is ours, `b` the peer; a side is None when the pair was given up before its turn."""

    index: int
    order: Order
    before: Window
    """The quiet time before the pair, in which both sides rested."""
    a: Trial | None = None
    b: Trial | None = None
    dirty: tuple[Fault, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether it counts."""
        return not self.dirty and self.a is not None and self.b is not None


class Interval(msgspec.Struct, frozen=True):
    """Bounds of a median; `confidence` is what they have, which few values may keep below what was asked for."""

    low: float
    high: float
    confidence: float


class Ratio(msgspec.Struct, frozen=True):
    """How many times longer the peer takes: above 1 we are faster. Seconds are medians of the clean pairs."""

    a_s: float
    b_s: float
    median: float
    interval: Interval


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One metric over all pairs; `ratio` is None, and never a number, when it was not measured."""

    metric: str
    clean: int
    attempted: int
    needed: int
    ratio: Ratio | None
    dirty: dict[str, int]
    """What pairs were dropped for, with how many of them."""

    @property
    def verdict(self) -> str:
        """In words."""
        if self.ratio is None:
            return f"not measured: {self.clean} clean pairs of {self.attempted}, {self.needed} needed"
        interval = self.ratio.interval
        return f"{self.ratio.median:.2f}x [{interval.low:.2f}, {interval.high:.2f}] at {interval.confidence:.0%}"


def orders(count: int, seed: int) -> list[Order]:
    """Who goes first in each pair: both orders in every two pairs, shuffled.

    Example:
        >>> orders(4, seed=1)
        ['BA', 'AB', 'BA', 'AB']
    """
    shuffle = random.Random(seed)
    drawn: list[Order] = []
    while len(drawn) < count:
        block: list[Order] = ["AB", "BA"]
        shuffle.shuffle(block)
        drawn += block
    return drawn[:count]


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Distribution-free interval of the median: the narrowest pair of order statistics that has the confidence.

    With fewer than six values not even the extremes have 95 %; they are returned with the confidence that they have.

    Example:
        >>> median_interval([1.0, 1.2, 0.9, 1.1, 1.3])
        Interval(low=0.9, high=1.3, confidence=0.9375)
    """
    ordered = sorted(values)
    count = len(ordered)
    if not count:
        raise ValueError("no values")
    outside = 0.0  # chance that the median lies below the k-th smallest value, or as far above
    rank, reached = 0, 0.0
    for k in range((count + 1) // 2):
        outside += math.comb(count, k) / 2**count
        if k == 0 or 1 - 2 * outside >= confidence:
            rank, reached = k, 1 - 2 * outside
    return Interval(ordered[rank], ordered[count - 1 - rank], max(0.0, reached))


def summarise(pairs: Sequence[Pair], metric: str, needed: int) -> Result:
    """The figure of one metric, or that there is none."""
    times = [
        (pair.a.seconds[metric], pair.b.seconds[metric])
        for pair in pairs
        if pair.clean and pair.a is not None and pair.b is not None
    ]
    ratio = None
    if len(times) >= max(1, needed):
        ratios = [b / a for a, b in times]
        ratio = Ratio(
            statistics.median(a for a, _ in times),
            statistics.median(b for _, b in times),
            statistics.median(ratios),
            median_interval(ratios),
        )
    reasons = Counter(fault.what for pair in pairs for fault in pair.dirty)
    return Result(
        metric=metric,
        clean=len(times),
        attempted=len(pairs),
        needed=needed,
        ratio=ratio,
        dirty=dict(reasons.most_common()),
    )
