"""Who else used the cores: what was busy on them, less what this process and its descendants used.

Owns the counters (`Snapshot`, read from `/proc`), their difference over a stretch of time (`Window`) and the rule that
says when a stretch is dirty (`CleanRule`, `judge`). Called by `sgl.bench.harness`; the rule and the difference are
pure, so that tests invent the counters. A machine that hides its counters gives `None` and every window on it is dirty:
what cannot be checked is not clean.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

TICK_S = 0.01
"""Resolution of the counters in `/proc`."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Counters that only grow, in seconds. `busy_s` and `steal_s` are sums over the watched cores."""

    at_s: float
    busy_s: float | None
    steal_s: float = 0.0
    own_s: float = 0.0
    sides_s: tuple[float, ...] = ()
    """CPU time of each side's process tree, which is a part of `own_s`."""
    pressure_s: float | None = None
    """Time in which some runnable task waited for a core (pressure stall information), our own tasks included."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """What the cores did between two snapshots, in CPU seconds but for `elapsed_s` and `pressure_s` (wall clock)."""

    elapsed_s: float
    cores: int
    busy_s: float | None
    own_s: float
    steal_s: float
    resting_s: float
    """CPU time of the sides that had nothing to do."""
    pressure_s: float | None = None

    @property
    def foreign_s(self) -> float | None:
        """CPU time of everybody else on our cores; None when it could not be read."""
        return None if self.busy_s is None else max(0.0, self.busy_s - self.own_s)


class CleanRule(msgspec.Struct, frozen=True, kw_only=True):
    """When a window is dirty. Shares are of the cores' time in it, beyond one tick per core of rounding."""

    max_foreign: float = 0.02
    max_steal: float = 0.05
    """Looser: a hypervisor takes from every core alike, and some always."""
    max_resting: float = 0.01
    min_window_s: float = 0.2
    """Below this the counters' ticks say nothing."""


class Fault(msgspec.Struct, frozen=True):
    """One reason to drop a pair; `share` is of the cores' time, where that is what it is about."""

    what: str
    share: float | None = None

    def __str__(self) -> str:
        return self.what if self.share is None else f"{self.what} {self.share:.1%}"


class Sampler(Protocol):
    """Reads the counters of some cores."""

    @property
    def cores(self) -> int:
        """How many cores the counters are sums over."""

    def read(self, sides: Collection[int] = ()) -> Snapshot:
        """The counters now; `sides` are the process ids whose trees are told apart, in the order of `sides_s`."""


def between(before: Snapshot, after: Snapshot, *, cores: int, resting: Collection[int] = ()) -> Window:
    """The window between two snapshots; `resting` are the positions of the sides that should have been idle.

    Example:
        >>> one = Snapshot(at_s=0.0, busy_s=10.0, own_s=1.0, sides_s=(1.0, 0.0))
        >>> two = Snapshot(at_s=1.0, busy_s=11.5, own_s=2.0, sides_s=(2.0, 0.0))
        >>> between(one, two, cores=2, resting=[1]).foreign_s
        0.5
    """
    hidden = before.busy_s is None or after.busy_s is None
    pressure = (
        None
        if before.pressure_s is None or after.pressure_s is None
        else max(0.0, after.pressure_s - before.pressure_s)
    )
    return Window(
        elapsed_s=after.at_s - before.at_s,
        cores=cores,
        busy_s=None if hidden else (after.busy_s or 0.0) - (before.busy_s or 0.0),
        own_s=after.own_s - before.own_s,
        steal_s=after.steal_s - before.steal_s,
        resting_s=sum(after.sides_s[side] - before.sides_s[side] for side in resting),
        pressure_s=pressure,
    )


def judge(window: Window, rule: CleanRule) -> tuple[Fault, ...]:
    """Why the window is dirty; empty for a clean one.

    Example:
        >>> window = Window(elapsed_s=1.0, cores=2, busy_s=2.0, own_s=1.5, steal_s=0.0, resting_s=0.0)
        >>> [str(fault) for fault in judge(window, CleanRule())]
        ['foreign load 25.0%']
    """
    if window.foreign_s is None:
        return (Fault("the load of this machine cannot be read"),)
    if window.elapsed_s < rule.min_window_s:
        return (Fault("too short to sample"),)
    capacity = window.elapsed_s * window.cores
    rounding = TICK_S * window.cores
    bounds = (
        ("foreign load", window.foreign_s, rule.max_foreign),
        ("stolen time", window.steal_s, rule.max_steal),
        ("resting side busy", window.resting_s, rule.max_resting),
    )
    return tuple(Fault(what, used / capacity) for what, used, share in bounds if used > share * capacity + rounding)


class ProcSampler:
    """The counters of Linux for the cores `cpus`. A process that left the tree without being waited for counts as
    foreign, which errs on the side of dropping a pair.

    Args:
        cpus: numbers of the cores, as in the affinity mask.
        proc: where procfs is mounted.
    """

    def __init__(self, cpus: Collection[int], proc: Path = Path("/proc")) -> None:
        self._cpus = frozenset(cpus)
        self._proc = proc

    @property
    def cores(self) -> int:
        """How many cores are watched."""
        return len(self._cpus)

    def read(self, sides: Collection[int] = ()) -> Snapshot:
        """See `Sampler.read`."""
        per_cpu = self.busy_by_cpu()
        children, used = self._processes()
        return Snapshot(
            at_s=time.perf_counter(),
            busy_s=sum(busy for busy, _ in per_cpu.values()) if per_cpu else None,
            steal_s=sum(steal for _, steal in per_cpu.values()),
            own_s=_tree_s(os.getpid(), children, used),
            sides_s=tuple(_tree_s(pid, children, used) for pid in sides),
            pressure_s=self._pressure_s(),
        )

    def busy_by_cpu(self) -> dict[int, tuple[float, float]]:
        """Seconds (busy, stolen) of each watched core since boot; empty when not all of them can be read."""
        tick = os.sysconf("SC_CLK_TCK")
        found = {}
        for line in _text(self._proc / "stat").splitlines():
            name, *fields = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in self._cpus:
                user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
                found[int(name[3:])] = ((user + nice + system + irq + softirq) / tick, steal / tick)
        return found if len(found) == len(self._cpus) else {}

    def _processes(self) -> tuple[dict[int, list[int]], dict[int, float]]:
        """Children and CPU seconds (threads, and children that were waited for, included) of every process."""
        tick = os.sysconf("SC_CLK_TCK")
        children: dict[int, list[int]] = {}
        used = {}
        for entry in os.scandir(self._proc):
            if entry.name.isdigit() and (text := _text(Path(entry.path) / "stat")):
                fields = text.rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
                used[int(entry.name)] = sum(int(field) for field in fields[11:15]) / tick
        return children, used

    def _pressure_s(self) -> float | None:
        for line in _text(self._proc / "pressure" / "cpu").splitlines():
            if line.startswith("some "):
                return int(line.rpartition("total=")[2]) / 1e6
        return None


def least_busy(cpus: Collection[int], count: int, *, sample_s: float = 0.3) -> list[int]:
    """`count` of the cores, those that others use least just now; all of them where there are no more."""
    if len(cpus) <= count:
        return sorted(cpus)
    sampler = ProcSampler(cpus)
    before = sampler.busy_by_cpu()
    time.sleep(sample_s)
    after = sampler.busy_by_cpu()
    return sorted(sorted(cpus, key=lambda cpu: (_busy(after, cpu) - _busy(before, cpu), cpu))[:count])


def _busy(by_cpu: Mapping[int, tuple[float, float]], cpu: int) -> float:
    return by_cpu.get(cpu, (0.0, 0.0))[0]


def _tree_s(root: int, children: Mapping[int, list[int]], used: Mapping[int, float]) -> float:
    """CPU seconds of a process and its living descendants."""
    total, waiting = 0.0, [root]
    while waiting:
        pid = waiting.pop()
        total += used.get(pid, 0.0)
        waiting.extend(children.get(pid, ()))
    return total


def _text(path: Path) -> str:
    """A file of procfs; empty for one that is gone or closed to us."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
