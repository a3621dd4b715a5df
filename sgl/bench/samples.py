"""A measurement that is repeated and reported with every sample: what the unpaired benches are made of."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement. `median` is of `samples`, in `unit`."""

    what: str
    unit: str
    median: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, what: str, unit: str, samples: Sequence[float]) -> Sampled:
        """The measurement that gave these samples.

        Example:
            >>> Sampled.of("x", "s", [3.0, 1.0, 2.0]).median
            2.0
        """
        return cls(what=what, unit=unit, median=statistics.median(samples), samples=tuple(samples))


def measure(what: str, unit: str, repeats: int, once: Callable[[], float]) -> Sampled:
    """`once()` repeated; a list of samples says more than an average."""
    return Sampled.of(what, unit, [once() for _ in range(repeats)])


def import_seconds() -> float:
    """`import sgl` in a fresh interpreter, without the interpreter's own start."""
    code = "import time; start = time.perf_counter(); import sgl; print(time.perf_counter() - start)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)
