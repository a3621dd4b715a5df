"""What this process may use: CPUs, memory, CUDA. Becomes the `Facts` that `runtime.config.resolve` decides on.

Reads the affinity mask, `/proc`, control groups (versions 1 and 2) and torch. A container's limits count, not the
host's sizes. What cannot be found out does not limit: a missing file means no limit from there.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from sgl.runtime.config import Facts
from sgl.runtime.models.registry import ModelConfig


def gather_facts(config: ModelConfig) -> Facts:
    """The machine as this process sees it now, beside the model's shape."""
    import torch

    has_cuda = torch.cuda.is_available()
    return Facts(
        cpu_count=cpu_count(),
        available_bytes=available_bytes(),
        cuda_bytes=torch.cuda.mem_get_info()[0] if has_cuda else 0,
        cuda_name=torch.cuda.get_device_name() if has_cuda else "",
        model_context_len=config.max_position_embeddings,
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        num_parameters=config.num_parameters,
        checkpoint_dtype=config.checkpoint_dtype,
    )


def cpu_count(root: Path = Path("/")) -> int:
    """Cores this process may run on, rounded up where a control group grants a part of one."""
    cores: float = len(os.sched_getaffinity(0))
    for folder in _cgroup_folders(root, "cpu"):
        quota_text, _, period_text = _read(folder / "cpu.max").partition(" ")
        quota = _integer(quota_text) or _integer(_read(folder / "cpu.cfs_quota_us"))
        period = _integer(period_text) or _integer(_read(folder / "cpu.cfs_period_us"))
        if quota and period:
            cores = min(cores, quota / period)
    return max(1, math.ceil(cores))


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that can still be allocated: the host's available memory, or less where a control group says so."""
    available = 0
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for folder in _cgroup_folders(root, "memory"):
        limit = _integer(_read(folder / "memory.max")) or _integer(_read(folder / "memory.limit_in_bytes"))
        used = _integer(_read(folder / "memory.current")) or _integer(_read(folder / "memory.usage_in_bytes"))
        if limit:
            # Cached files are counted as used but given back under pressure.
            free = limit - (used or 0) + _inactive_file_bytes(folder)
            available = min(available, max(free, 0)) if available else max(free, 0)
    return available


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """This process's control group and those above it, in both versions of the interface; also the mount itself,
    which is all that is visible inside a container."""
    folders = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        inner = Path(path.lstrip("/"))
        folders += [base / part for part in (inner, *inner.parents)]
    return folders


def _inactive_file_bytes(folder: Path) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _integer(text: str) -> int | None:
    """A positive number, or `None` for what sets no limit: nothing there, `max`, `-1`, or version 1's huge default."""
    return int(text) if text.isdigit() and 0 < int(text) < 2**60 else None
