"""Prompts for measurements: pseudo-random token ids, all different, so that no cache can answer for the model."""

from __future__ import annotations

import random

_LOWEST = 3
"""Ids below it are most models' padding and end."""


class Prompts:
    """Distinct prompts of token ids below `high`. Deterministic.

    Example:
        >>> Prompts(100, seed=1).take(2, 3) == Prompts(100, seed=1).take(2, 3)
        True
    """

    def __init__(self, high: int, seed: int | str = 0) -> None:
        self._random = random.Random(seed)
        self._high = high

    def take(self, count: int, length: int) -> list[list[int]]:
        """`count` prompts of `length` tokens."""
        return [[self._random.randrange(_LOWEST, self._high) for _ in range(length)] for _ in range(count)]
