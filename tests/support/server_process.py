"""`sgl serve` as a user starts it, in a process of its own.

Owns the start (until the ready line), what is seen of it from outside (memory, threads, descriptors, statistics), and
the end. Its log goes to a file: a pipe that nobody reads would block it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from support.memory import descendants, held

START_S = 120.0
LOOK_S = 0.02
LOOKS = int(START_S / LOOK_S)
_READY = re.compile(r"ready: .* on http://[\w.]+:(\d+)")


class ServerProcess:
    """A running server."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.popen = popen
        self.log = log
        self.port = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def shown(self) -> str:
        """Everything that it has written."""
        return self.log.read_text(errors="replace")

    def worker(self) -> int:
        """The engine's process."""
        return int(Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()[0])

    def wait_ready(self) -> None:
        """Until its ready line, or an `AssertionError` with what it said instead."""
        for _ in range(LOOKS):  # counted, so that a machine that is stopped for a while is no server that hangs
            if (found := _READY.search(self.shown)) is not None:
                break
            assert self.popen.poll() is None, self.shown
            time.sleep(LOOK_S)
        assert found is not None, self.shown
        self.port = int(found[1])

    def stats(self) -> dict[str, Any]:
        """The engine's counters and gauges."""
        with httpx2.Client(base_url=self.url, trust_env=False, timeout=60) as http:
            return dict(http.get("/server_info").json()["stats"])

    def memory(self) -> dict[str, int]:
        """Bytes that the server and its worker hold."""
        return {"server": held(self.popen.pid), "worker": held(self.worker())}

    def handles(self) -> dict[str, int]:
        """Descriptors and threads of both, and the processes below the server."""
        counts = {"processes": len(descendants(self.popen.pid))}
        for name, pid in (("server", self.popen.pid), ("worker", self.worker())):
            counts[f"{name} files"] = len(os.listdir(f"/proc/{pid}/fd"))
            counts[f"{name} threads"] = len(os.listdir(f"/proc/{pid}/task"))
        return counts

    def end(self, within_s: float = START_S) -> int:
        """SIGTERM, and its exit status."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(within_s)


@contextmanager
def sgl_serve(log: Path, *flags: str, model: str = "dummy", **environment: str) -> Iterator[ServerProcess]:
    """Serve `model` on a free port until the block is left; it is killed if it has not ended by then."""
    command = [sys.executable, "-m", "sgl.cli", "serve", model, "--port", "0", *flags]
    with log.open("wb") as out:
        popen = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **environment}, cwd=log.parent
        )
    with popen:
        try:
            process = ServerProcess(popen, log)
            process.wait_ready()
            yield process
        finally:
            popen.kill()
