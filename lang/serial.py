"""Threads of backends that live in this process: one job after the other, or a bounded number beside each other.

Owns `Workers`. Its threads are daemons that live while there is work, so a backend that nobody shuts down keeps nothing
from ending. Jobs raise nothing: whoever hands one in catches what it can fail with.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


def _nothing() -> None:
    """A job that only has those before it done."""


class Workers:
    """Runs jobs in the order in which they come, on at most `most` threads.

    Example:
        >>> done = threading.Event()
        >>> Workers("example").post(done.set)
        >>> done.wait(5)
        True
    """

    def __init__(self, name: str, most: int = 1) -> None:
        self._name = name
        self._most = most
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._working = 0

    def post(self, job: Callable[[], None]) -> None:
        """Have a job done. Returns at once."""
        with self._lock:
            self._jobs.append(job)
            if self._working == self._most:
                return
            self._working += 1
        threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._working -= 1
                    return
                job = self._jobs.popleft()
            try:
                job()
            except BaseException:
                with self._lock:
                    self._working -= 1  # this thread ends here; the next job gets another
                    waiting = bool(self._jobs)
                if waiting:
                    self.post(_nothing)
                raise
