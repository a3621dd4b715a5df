"""Kernels that begin while the one before them ends, on Hopper and later (programmatic dependent launch).

Owns whether the kernels of a step are launched so. Such a kernel tells at its beginning that the next one may be put
beside it, and waits for the one before it before it reads or writes what others do; until then it may fetch what nobody
writes, as weights. Every kernel that is launched so has to wait, whatever else it does: then the end of one kernel is
the end of all before it, and no order is lost. A kernel that is launched plainly waits for all of them.

In a decoding step of one row a kernel takes a few microseconds, of which its start and its end are a third.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

_FIRST_CAPABILITY = 9
_is_on = True
UNCHAINED: dict[str, Any] = {"PDL": False}
"""What a launch is given that is not chained."""


def chained(device: torch.device) -> dict[str, Any]:
    """What a launch on `device` is given besides its own arguments: `PDL` for the kernel, and the launcher's option."""
    if _is_on and device.type == "cuda" and _capability(device) >= _FIRST_CAPABILITY:
        return {"PDL": True, "launch_pdl": True}
    return UNCHAINED


@contextmanager
def plain_launches() -> Iterator[None]:
    """Launch kernels one after another meanwhile: what a measurement compares with. Recorded steps stay as they are."""
    global _is_on
    before, _is_on = _is_on, False
    try:
        yield
    finally:
        _is_on = before


@cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]
