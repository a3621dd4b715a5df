"""What this process may use: CPUs, memory, CUDA. Becomes the `Facts` that `runtime.resolution.resolve` decides on.

Reads the affinity mask, `/proc`, control groups (versions 1 and 2), resource limits and torch. A container's limits
count, not the host's sizes. What cannot be found out does not limit: a missing file means no limit from there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import get_args

from sgl.kernels.native import library
from sgl.runtime.config import Facts
from sgl.runtime.loading.cache import cache_folder
from sgl.runtime.memory_plan import MemoryLimit, MiB
from sgl.runtime.models.registry import ModelConfig
from sgl.runtime.numerics import Dtype

_ROOT = Path("/")
_RESOURCE_LIMITS = {
    # In /proc/self/limits -> (name, what counts against it in /proc/self/status, and what is counted beyond the pages
    # in use: stacks of threads, arenas of malloc, and for RLIMIT_AS also libraries and mapped weights still to come).
    "Max address space": ("RLIMIT_AS", "VmSize", 1024 * MiB),
    "Max data size": ("RLIMIT_DATA", "VmData", 192 * MiB),
}


def gather_facts(
    config: ModelConfig, parameter_sizes: Sequence[int], *, weights_kind: str = "safetensors", packed_bytes: int = 0
) -> Facts:
    """The machine as this process sees it now, beside the model's shape and the numbers in each of its parameters."""
    import torch

    from sgl.kernels import prepacked

    native, native_obstacle = native_kernels()

    has_cuda = torch.cuda.is_available()
    limits = memory_limits()
    tightest = min(limits, key=lambda limit: limit.bytes, default=MemoryLimit("unknown", 0))
    return Facts(
        cpu_count=cpu_count(),
        available_bytes=tightest.bytes,
        available_source=tightest.source,
        memory_limits=limits,
        cuda_bytes=torch.cuda.mem_get_info()[0] if has_cuda else 0,
        cuda_name=torch.cuda.get_device_name() if has_cuda else "",
        model_context_len=config.max_position_embeddings,
        longest_context_len=config.longest_context_len,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        intermediate_size=config.feed_forward_size,
        attention_window=config.longest_window,
        attention_softcap=config.attention_softcap,
        vocab_size=config.vocab_size,
        num_parameters=sum(parameter_sizes),
        largest_tensor=max(parameter_sizes),
        checkpoint_dtype=config.checkpoint_dtype,
        weights_kind=weights_kind,
        packed_bytes=packed_bytes,
        native=native,
        native_obstacle=native_obstacle,
        prepacked_obstacles={dtype: why for dtype in get_args(Dtype) if (why := prepacked.obstacle(dtype))},
        triton=_version("triton"),
    )


def _version(distribution: str) -> str:
    """Of a package that is installed; empty when it is not."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def native_kernels() -> tuple[str, str]:
    """What the native kernels are or would be built with, and why they cannot be; one of the two is empty."""
    try:
        build = library.plan(native_folder())
    except library.NativeUnavailable as reason:
        return "", str(reason)
    return f"{build.instruction_set}, {build.compiler}", ""


def load_native_kernels(progress: Callable[[str], None] = lambda text: None) -> str:
    """Load the native library, building it if need be; returns why that failed, or an empty string."""
    try:
        build = library.plan(native_folder())
        if not build.done:
            progress(f"compiling the native kernels for {build.instruction_set}, once")
        library.load(native_folder())
    except library.NativeUnavailable as reason:
        return str(reason)
    return ""


def native_folder() -> Path:
    """Where built kernels lie."""
    return cache_folder() / "native"


def cpu_count(root: Path = _ROOT) -> int:
    """Cores this process may run on, rounded up where a control group grants a part of one."""
    cores: float = len(os.sched_getaffinity(0))
    for folder in _cgroup_folders(root, "cpu"):
        quota_text, _, period_text = _read(folder / "cpu.max").partition(" ")
        quota = _integer(quota_text) or _integer(_read(folder / "cpu.cfs_quota_us"))
        period = _integer(period_text) or _integer(_read(folder / "cpu.cfs_period_us"))
        if quota and period:
            cores = min(cores, quota / period)
    return max(1, math.ceil(cores))


def available_bytes(root: Path = _ROOT) -> int:
    """Memory that can still be allocated, as the tightest limit has it; 0 when nothing limits."""
    limits = memory_limits(root)
    return max(0, min(limit.bytes for limit in limits) - held_bytes(root)) if limits else 0


def memory_limits(root: Path = _ROOT) -> tuple[MemoryLimit, ...]:
    """Everyone who limits what this process may hold: the machine, its control groups, its resource limits."""
    held = held_bytes(root)
    free = [*_machine(root), *_control_groups(root), *_resource_limits(root)]
    return tuple(MemoryLimit(limit.source, max(limit.bytes, 0) + held) for limit in free)


def held_bytes(root: Path = _ROOT, pid: str = "self") -> int:
    """What a process holds now and could not give back: anonymous and shared pages. 0 when it is gone."""
    status = _table(root / "proc" / pid / "status")
    return status.get("RssAnon", 0) + status.get("RssShmem", 0)


def _machine(root: Path) -> list[MemoryLimit]:
    available = _table(root / "proc/meminfo").get("MemAvailable")
    return [] if available is None else [MemoryLimit("MemAvailable of the machine", available)]


def _control_groups(root: Path) -> list[MemoryLimit]:
    """What each group around this process leaves, the innermost first."""
    found = []
    for folder in _cgroup_folders(root, "memory"):
        for version, (limit_file, used_file) in enumerate(_CGROUP_FILES, start=1):
            limit = _integer(_read(folder / limit_file))
            if limit is None:
                continue
            used = _integer(_read(folder / used_file)) or 0
            # Cached files are counted as used but given back under pressure.
            name = folder.relative_to(root / "sys/fs/cgroup").as_posix()
            source = f"{limit_file} of cgroup v{version} /{'' if name == '.' else name}"
            found.append(MemoryLimit(source, limit - used + _inactive_file_bytes(folder)))
    return found


_CGROUP_FILES = (("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current"))
"""Limit and use, by version of the interface."""


def _resource_limits(root: Path) -> list[MemoryLimit]:
    status = _table(root / "proc/self/status")
    found = []
    for line in _read(root / "proc/self/limits").splitlines():
        for title, (name, counter, beyond) in _RESOURCE_LIMITS.items():
            soft = _integer(line.removeprefix(title).split()[0]) if line.startswith(title + " ") else None
            if soft is not None:
                found.append(MemoryLimit(name, soft - status.get(counter, 0) - beyond))
    return found


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


def _table(path: Path) -> dict[str, int]:
    """The lines `Name: 123 kB` of a file of `/proc`, in bytes."""
    found = {}
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if unit == "kB" and number.isdigit():
            found[name] = int(number) * 1024
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _integer(text: str) -> int | None:
    """A positive number, or `None` for what sets no limit: nothing there, `max`, `-1`, or version 1's huge default."""
    return int(text) if text.isdigit() and 0 < int(text) < 2**60 else None
