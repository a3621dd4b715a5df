"""What a GPU can do, measured in the same run as what is measured on it.

Owns three numbers: bytes that a copy moves per second, read and written ones together; bytes that a sum reads; and
floating-point operations of a large bfloat16 product per second. No step is quicker than its bytes over the faster of
the first two, nor than its products over the third.
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
        copied_bytes_per_s: read and written by a copy of 1 GiB.
        read_bytes_per_s: by a sum over 1 GiB.
        flops_per_s: of a product of two bfloat16 matrices of 8,192 x 8,192 random numbers.
    """

    card: str
    copied_bytes_per_s: float
    read_bytes_per_s: float
    flops_per_s: float

    @property
    def bytes_per_s(self) -> float:
        """What floors are made of: the faster of reading and copying."""
        return max(self.copied_bytes_per_s, self.read_bytes_per_s)

    def __str__(self) -> str:
        copied, read = self.copied_bytes_per_s / 1e12, self.read_bytes_per_s / 1e12
        return f"copy {copied:.3g} TB/s, read {read:.3g} TB/s, product {self.flops_per_s / 1e12:.4g} TFLOP/s"


def measure_ceilings() -> Ceilings:
    """Measure the current CUDA device, on which nothing else may run meanwhile."""
    import torch

    ceilings = Ceilings(
        card=torch.cuda.get_device_name(),
        copied_bytes_per_s=2 * _COPIED / _copy_seconds(),
        read_bytes_per_s=_COPIED / _read_seconds(),
        flops_per_s=2 * _SIDE**3 / _product_seconds(),
    )
    torch.cuda.empty_cache()  # an engine in another process needs it
    return ceilings


def _copy_seconds() -> float:
    import torch

    source = torch.randn(_COPIED // 2, device="cuda").bfloat16()
    target = torch.empty_like(source)
    return device_seconds(lambda: target.copy_(source))


def _read_seconds() -> float:
    import torch

    source = torch.randn(_COPIED // 4, device="cuda").view(-1, 2**16)
    return device_seconds(lambda: source.sum(dim=1))


def _product_seconds() -> float:
    import torch

    left, right = (torch.randn(_SIDE, _SIDE, device="cuda").bfloat16() for _ in range(2))
    return device_seconds(lambda: left @ right)


def device_seconds(work: Callable[[], object]) -> float:
    """Of the current device, for one call; the median of 15."""
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
