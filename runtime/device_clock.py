"""Where a device's time goes: with the steps that were queued, or waiting for the host.

Owns events around each forward and each draw, made by those who queue them, and the sums that the engine core reads
once a step's result is there. What lies between a forward and its draw, and between a draw and the next forward, is
waiting, unless the engine had nothing to do (`rest`); copies of a step's integers are part of it.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch


class DeviceTime(NamedTuple):
    """Seconds that a device computed, and that it waited; `is_usual`: whether such a step takes as long again."""

    busy_s: float
    idle_s: float
    is_usual: bool = True


class DeviceClock:
    """Times the steps of one device. `forward` and `draw` each end with `mark`."""

    def __init__(self) -> None:
        self._spare: list[torch.cuda.Event] = []
        self._step: list[torch.cuda.Event] = []
        self._is_usual = True
        self._steps: deque[tuple[list[torch.cuda.Event], bool]] = deque()
        self._last: torch.cuda.Event | None = None  # where the step before ended, unless the engine rested since

    def begin(self, *, is_usual: bool = True) -> None:
        """The kernels of a step's forward are queued from here on.

        Args:
            is_usual: False where it was recorded on the way, or is launched kernel by kernel for the time being.
        """
        self._step, self._is_usual = [], is_usual
        self.mark()

    def mark(self) -> None:
        """A forward ends here, or a draw begins or ends."""
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._step.append(event)
        if len(self._step) == 4:
            self._steps.append((self._step, self._is_usual))

    def rest(self) -> None:
        """There is nothing to do, or a step has failed: what comes next has not been waited for."""
        self._last = None
        self._steps.clear()

    def take(self) -> DeviceTime:
        """Those of the oldest step that was not taken yet; its result is there."""
        if not self._steps:
            return DeviceTime(0.0, 0.0)
        step, is_usual = self._steps.popleft()
        begin, computed, draw, drawn = step
        idle = computed.elapsed_time(draw)
        if self._last is not None:
            idle += self._last.elapsed_time(begin)
            self._spare.append(self._last)
        self._spare += step[:3]
        self._last = drawn
        busy = begin.elapsed_time(computed) + draw.elapsed_time(drawn)
        return DeviceTime(busy / 1e3, idle / 1e3, is_usual)
