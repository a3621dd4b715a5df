"""What child processes hold at most, watched while a test runs.

Counted is what the kernel cannot take back: anonymous and shared pages. Pages of mapped files (libraries, weights on
disk) can be dropped and read again, as a control group's limit treats them.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

from sgl.runtime.loading.facts import held_bytes

INTERVAL_S = 0.02


def held(pid: int) -> int:
    """Bytes that a process holds now; 0 when it is gone."""
    return held_bytes(pid=str(pid))


def descendants(pid: int) -> list[int]:
    """Processes below `pid`."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            children = (task / "children").read_text().split()
        except OSError:  # the thread ended
            continue
        for child in children:
            found += [int(child), *_below(int(child))]
    return found


def _below(pid: int) -> list[int]:
    try:
        return descendants(pid)
    except OSError:  # it ended
        return []


class PeakOfChildren:
    """Context manager: `peak_bytes` is the most that the processes started inside held together, at one time."""

    def __enter__(self) -> PeakOfChildren:
        self.peak_bytes = 0
        self._others = set(descendants(os.getpid()))
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(INTERVAL_S):
            started = set(descendants(os.getpid())) - self._others
            self.peak_bytes = max(self.peak_bytes, sum(held(pid) for pid in started if _is_itself(pid)))


def _is_itself(pid: int) -> bool:
    """Whether a child has begun its own program: until then its memory is this process's, seen once more."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != Path("/proc/self/cmdline").read_bytes()
    except OSError:  # it ended
        return False
