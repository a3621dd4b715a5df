"""A clock that stands still while this process does.

Time limits of long tests are kept by it, so that a machine that is stopped for a while (or a laptop that sleeps) is not
taken for a server that hangs.
"""

from __future__ import annotations

import asyncio
import time

TICK_S = 0.1


class Pace:
    """Seconds in which this process could run: each tick counts for `2 * TICK_S` at most.

    Example (inside a coroutine):
        pace = Pace()
        ticking = asyncio.create_task(pace.tick())
        start = pace.now
    """

    def __init__(self) -> None:
        self.now = 0.0

    async def tick(self) -> None:
        """Run until cancelled."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.now += min(now - last, 2 * TICK_S)
            last = now
