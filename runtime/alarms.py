"""Times at which something has to be looked at, with as little work as possible while nothing is due.

Owns (key, time) pairs. The engine core keeps one for each program that has a deadline or a lease, an engine one for
each session with a lease. A time may be too early, never too late: who looks finds out what holds now and sets the next
one.
"""

from __future__ import annotations

import heapq
import math
from typing import Generic, TypeVar

Key = TypeVar("Key", int, str)


class Alarms(Generic[Key]):
    """One time per key: the number of a program, the id of a session.

    Example:
        >>> alarms = Alarms()
        >>> alarms.set(1, 5.0), alarms.set(2, 3.0), alarms.set(2, 9.0)  # the earlier one stands
        (None, None, None)
        >>> alarms.next(), alarms.due(4.0), alarms.next()
        (3.0, [2], 5.0)
    """

    def __init__(self) -> None:
        self._times: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []  # an entry that is not in `_times` is void

    def set(self, key: Key, time: float | None) -> None:
        """Look at `key` at `time`, or when it was to be looked at already if that is earlier. `None` is never."""
        if time is None or self._times.get(key, math.inf) <= time:
            return
        self._times[key] = time
        heapq.heappush(self._heap, (time, key))
        if len(self._heap) > 2 * len(self._times) + 64:
            self._heap = [(time, key) for key, time in self._times.items()]
            heapq.heapify(self._heap)

    def drop(self, key: Key) -> None:
        """There is nothing to look at any more."""
        self._times.pop(key, None)

    def due(self, now: float) -> list[Key]:
        """The keys whose time has come, earliest first; they have none from now on."""
        found = []
        while self.next() <= now:
            _, key = heapq.heappop(self._heap)
            del self._times[key]
            found.append(key)
        return found

    def next(self) -> float:
        """The earliest time; infinite when there is none."""
        while self._heap and self._times.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf
