"""A Python program in a process of its own, which a test can signal and talk to by lines."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PATIENCE_S = 120.0
"""How long anything may take on a machine that is busy; nothing here measures time."""

PRELUDE = """
import asyncio, os, signal, sys, threading, time
import sgl
from sgl.errors import EngineDead, SglError
from sgl.runtime.engine import Engine

LONG = {"max_new_tokens": 1900, "ignore_eos": True, "temperature": 0}
SHORT = {"max_new_tokens": 2, "ignore_eos": True, "temperature": 0}
SLOW = '{"in_forward": {"action": "sleep", "seconds": 0.02, "times": 0}}'

def say(*words):
    print(*words, flush=True)

def start(**fields):
    return Engine(model_path="dummy", max_total_tokens=4096, **fields)

def until(condition):
    while not condition():
        time.sleep(0.01)

@sgl.function
def program(s, i=0):
    s += f"row {i}: " + sgl.gen("x", max_tokens=1900, ignore_eos=True)
    s["x"]
"""


class Child:
    """A running program, leader of its own process group as under a terminal.

    Args:
        code: the program; runs after `PRELUDE`, from a file, so that it may start processes by `spawn`.
        command: what runs the file; `python` by default.
        environment: changes to this process's.
    """

    def __init__(
        self,
        code: str,
        folder: Path,
        *,
        command: Sequence[str] = (sys.executable,),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        file = folder / "program.py"
        file.write_text(PRELUDE + textwrap.dedent(code))
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed at exit
        self._rest = b""
        self.process = subprocess.Popen(
            [*command, str(file)],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            stdin=subprocess.DEVNULL,
            process_group=0,
            env={**os.environ, "SGL_TEST_FAULTS": "1", **(environment or {})},
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()

    @property
    def errors(self) -> str:
        """What it wrote to standard error so far."""
        self._errors.seek(0)
        return self._errors.read().decode()

    def line(self) -> str:
        """Its next line."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        while b"\n" not in self._rest:
            assert select.select([descriptor], [], [], PATIENCE_S)[0], f"no line came; {self.errors}"
            more = os.read(descriptor, 4096)
            assert more, f"it ended before the next line; {self.errors}"
            self._rest += more
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode()

    def expect(self, *lines: str) -> None:
        """Its next lines are these."""
        for line in lines:
            assert self.line() == line, self.errors

    def interrupt(self) -> None:
        """Ctrl-C on its terminal."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> tuple[int, str]:
        """Its exit status and what it printed since the last line that was taken."""
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, (self._rest + out).decode()


def gone(pid: int, *, within_s: float = PATIENCE_S) -> bool:
    """Whether a process that is not this one's child ends in time."""
    deadline = time.monotonic() + within_s
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
