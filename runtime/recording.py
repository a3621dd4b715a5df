"""A computation on a GPU, recorded as a CUDA graph: replayed, all its kernels are one launch.

Called by `gpu_steps.py` and `gpu_verification.py`, which own what is recorded and the memory that it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def record(compute: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """Run `compute` once, so that its kernels are compiled, then record it: the graph, and what it gives, which each
    replay overwrites. Graphs share `pool` (that of the one before, or `None`), one at a time."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        compute()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = compute()
    return graph, result
