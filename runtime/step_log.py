"""A line on how the engine does, every so many steps.

Owns what `decode_log_interval` and `log_level` info show: rows, queue, tokens a second, what the cache had, and the
pool. Figures are of the steps since the line before; time in which there was nothing to do is no part of them. The
worker's loop says when a step is done and when it rests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from sgl.runtime.scheduler import Scheduler

log = logging.getLogger("sgl.worker")


class _Counts(NamedTuple):
    """Tokens so far, those of running requests included."""

    output: int
    prompt: int
    cached: int


class StepLog:
    """Writes the line.

    Args:
        interval: steps from one line to the next.
        clock: seconds.
    """

    def __init__(self, interval: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval
        self._clock = clock
        self._num_steps = 0
        self._seconds = 0.0
        self._before = _Counts(0, 0, 0)
        self._awake_since: float | None = None

    def rest(self) -> None:
        """There is nothing to do."""
        if self._awake_since is not None:
            self._seconds += self._clock() - self._awake_since
            self._awake_since = None

    def wake(self) -> None:
        """There may be something to do."""
        if self._awake_since is None:
            self._awake_since = self._clock()

    def stepped(self, scheduler: Scheduler) -> None:
        """A step is done."""
        self._num_steps += 1
        if self._num_steps < self._interval:
            return
        self.rest()
        seconds, self._seconds, self._num_steps = self._seconds, 0.0, 0
        self.wake()
        if not log.isEnabledFor(logging.INFO):
            return
        before, self._before = self._before, _counts(scheduler)
        output, prompt, cached = (max(now - then, 0) for now, then in zip(self._before, before, strict=True))
        scheduler.gauge(counted=False)
        stats = scheduler.stats
        log.info(
            "%d steps: %d rows running, %d queued, %.1f tokens/s, %s, %.1f%% of the pool held",
            self._interval,
            stats.num_running,
            stats.num_waiting,
            output / max(seconds, 1e-9),
            f"{cached / prompt:.1%} of {prompt} prompt tokens cached" if prompt else "no prompt tokens",
            100 * stats.pages_held / max(stats.pages_total, 1),
        )


def _counts(scheduler: Scheduler) -> _Counts:
    """Requests that were put back count with those that run once they do again."""
    stats, running = scheduler.stats, scheduler.running
    return _Counts(
        stats.decode_tokens + stats.forced_tokens + sum(request.completion_tokens for request in running),
        stats.prompt_tokens + sum(request.cached_tokens + request.prefill_tokens for request in running),
        stats.cached_tokens + sum(request.cached_tokens for request in running),
    )
