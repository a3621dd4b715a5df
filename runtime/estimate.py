"""How much a running generation will still grow: what admission reserves for it.

Owns the lengths of the generations that ended last, and a safety factor. The scheduler records each ending and each
retraction, and asks before it admits a request. A guess that is too small costs a retraction, one that is too large
leaves the pool half empty, so the guess follows what generations do: after `g` tokens, the mean of what the recorded
ones that were longer than `g` still produced. A retraction raises the safety factor; endings let it decay.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from itertools import accumulate

_HISTORY = 256
_FEW = 8
"""Below so many endings nothing is known yet, and half of the allowance is reserved."""

_RAISE, _DECAY, _MOST = 1.5, 0.98, 4.0


class OutputEstimate:
    """Expected growth, learned from the lengths of the generations that ended last.

    Args:
        conservativeness: factor on every estimate; above 1 reserves more and retracts less (SGLang's
            `schedule_conservativeness`).

    Example:
        >>> estimate = OutputEstimate()
        >>> estimate.remaining(0, 100)
        50
        >>> for length in (10, 10, 10, 10, 30, 30, 30, 30):
        ...     estimate.ended(length)
        >>> estimate.remaining(0, 100), estimate.remaining(12, 100), estimate.remaining(40, 100)
        (20, 18, 16)
    """

    def __init__(self, conservativeness: float = 1.0) -> None:
        self.conservativeness = conservativeness
        self.factor = 1.0
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] = []  # of the first ones of `_sorted`; empty until asked for

    def ended(self, num_tokens: int) -> None:
        """A generation ended by itself or at its bound after `num_tokens`."""
        if len(self._recent) == _HISTORY:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._recent.append(num_tokens)
        insort(self._sorted, num_tokens)
        self._sums.clear()
        self.factor = max(1.0, self.factor * _DECAY)

    def retracted(self) -> None:
        """The pool was full although every admission had room by this estimate."""
        self.factor = min(_MOST, self.factor * _RAISE)

    def remaining(self, produced: int, allowed: int) -> int:
        """Tokens that a generation of at most `allowed` tokens is expected to add after `produced`."""
        left = allowed - produced
        if left <= 0:
            return 0
        known = len(self._sorted)
        shorter = bisect_right(self._sorted, produced)
        if known < _FEW:
            mean = left / 2
        elif shorter < known:
            self._sums = self._sums or [0, *accumulate(self._sorted)]
            mean = (self._sums[known] - self._sums[shorter]) / (known - shorter) - produced
        else:
            mean = 16.0  # longer than anything seen: room for a few steps, as nothing says how far it goes
        return min(left, max(1, round(mean * self.factor * self.conservativeness)))
