"""What a GPU can do, measured in the same run as what is measured on it.

Owns two numbers: bytes that a copy moves per second, read and written ones together, and floating-point operations of
a large bfloat16 product per second. No step is quicker than its bytes over the one and its products over the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import msgspec

_COPIED = 2**30
"""Bytes of the tensor that is copied: far more than a cache holds."""
_SIDE = 8192
_REPEATS = 15


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one card, medians of 15.

    Attributes:
        card: its name.
        bytes_per_s: read and written by a copy of 1 GiB.
        flops_per_s: of a product of two bfloat16 matrices of 8,192 x 8,192 random numbers.
    """

    card: str
    bytes_per_s: float
    flops_per_s: float


def measure_ceilings() -> Ceilings:
    """Measure the current CUDA device, on which nothing else may run meanwhile."""
    import torch

    ceilings = Ceilings(
        card=torch.cuda.get_device_name(),
        bytes_per_s=2 * _COPIED / _copy_seconds(),
        flops_per_s=2 * _SIDE**3 / _product_seconds(),
    )
    torch.cuda.empty_cache()  # an engine in another process needs it
    return ceilings


def _copy_seconds() -> float:
    import torch

    source = torch.randn(_COPIED // 2, device="cuda").bfloat16()
    target = torch.empty_like(source)
    return _seconds(lambda: target.copy_(source))


def _product_seconds() -> float:
    import torch

    left, right = (torch.randn(_SIDE, _SIDE, device="cuda").bfloat16() for _ in range(2))
    return _seconds(lambda: left @ right)


def _seconds(work: Callable[[], object]) -> float:
    """Of the device, for one call."""
    import torch

    work()
    samples: list[float] = []
    for _ in range(_REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(samples)
