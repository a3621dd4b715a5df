"""Ends a worker that makes no progress, after writing down where it stands.

Owns the alarm: a thread of `faulthandler`, which needs neither the interpreter's lock nor a tool from outside, so that
it also works when the hang is in native code. The worker's loop says `busy` before each piece of work and `idle` before
it waits for messages; jobs off the loop are not watched, as they have limits of their own. The client finds the stacks
in the worker's folder, logs them, and tells every program (`client.py`).
"""

from __future__ import annotations

import faulthandler
import time
from typing import IO

MARK = "Timeout ("
"""How the stacks begin when it was the watchdog that wrote them, and not a crash."""

_SHARE = 0.25
"""Of the timeout, how stale an alarm may become before it is set anew: setting one at every step would cost more."""


class Watchdog:
    """An alarm that goes off `timeout_s` (at most a quarter more) after the last `busy`.

    Args:
        timeout_s: seconds; 0 never ends anything.
        stacks: open file for the stacks of all threads.
    """

    def __init__(self, timeout_s: float, stacks: IO[bytes]) -> None:
        self._timeout_s = timeout_s
        self._stacks = stacks
        self._fresh_until = 0.0

    def busy(self) -> None:
        """Work begins, or went on."""
        now = time.monotonic()
        if self._timeout_s and now >= self._fresh_until:
            faulthandler.dump_traceback_later(self._timeout_s * (1 + _SHARE), exit=True, file=self._stacks)
            self._fresh_until = now + self._timeout_s * _SHARE

    def idle(self) -> None:
        """There is nothing to do until a message comes."""
        if self._fresh_until:
            faulthandler.cancel_dump_traceback_later()
            self._fresh_until = 0.0
