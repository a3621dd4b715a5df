"""The other side of `sgl bench program --peer`: plain requests to our own engine, or a library in a process of its own.

Owns both, and the process: it runs `sgl.bench.program_drivers` and is spoken to in lines of JSON over its pipes. A
reading thread hands out what comes back, so that requests may be under way side by side. A peer that ends, or breaks
the protocol, fails whatever waits for it with its own last words.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

import sgl
from sgl import environment
from sgl.bench.peers import launch
from sgl.bench.plain import PlainBackend
from sgl.bench.program_drivers import LIBRARIES
from sgl.bench.program_requests import ABILITIES, Request
from sgl.bench.program_tasks import Task
from sgl.bench.program_wall import timed_waves
from sgl.bench.program_workloads import PeerBackend
from sgl.bench.provenance import side_variables
from sgl.bench.workloads import Call
from sgl.errors import BenchError, SglError
from sgl.runtime.engine import Engine

_DRIVERS = "sgl.bench.program_drivers"
_TIMEOUT_S = 900.0
"""For a peer to load, and to compile what it compiles."""
_QUOTED = 600
"""Characters of a peer's complaint that an error quotes."""


class Peer:
    """Runs a task, or the programs of a workload, once. Used as a context manager.

    Attributes:
        can: which of `sgl.bench.program_requests.ABILITIES` it has.
        variants: ways to run it, see `Driver.variants`.
        pid: of its process; 0 where it has none of its own.
    """

    settings: dict[str, str]
    versions: dict[str, str | None]
    can: frozenset[str] = frozenset(ABILITIES)
    variants: tuple[str, ...] = ("",)
    pid: int = 0

    def use(self, variant: str) -> None:
        """Run as this one of `variants` from now on."""
        return

    def run(self, task: Task) -> tuple[float, list[str]]:
        """Seconds and answers of one run on empty caches."""
        raise NotImplementedError

    def run_calls(self, calls: Sequence[Call]) -> float:
        """Seconds of the programs as plain requests, on empty caches."""
        raise NotImplementedError

    def close(self) -> None:
        """End it."""
        return

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PlainPeer(Peer):
    """Our own engine, asked with one request per generation and one per option, as clients of an API do."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.settings = {"requests": "together", "cache": "on"}
        self.versions = {"sgl": sgl.__version__}

    def run(self, task: Task) -> tuple[float, list[str]]:
        return task.timed(self._engine, PlainBackend(self._engine))

    def run_calls(self, calls: Sequence[Call]) -> float:
        self._engine.flush_cache()
        return timed_waves(calls, PlainBackend(self._engine))


class LibraryPeer(Peer):
    """A library in a process of its own.

    Args:
        name: a key of `sgl.bench.program_drivers.LIBRARIES`.
        engine: whose chat template renders the roles of programs.
        path: of the model, in the form that it reads.
        python: the interpreter that has it; ours otherwise.

    Raises:
        BenchError: it does not start, or says something else than the protocol.
    """

    def __init__(
        self,
        name: str,
        cores: Sequence[int],
        path: str,
        dtype: str,
        python: str | None = None,
        engine: Engine | None = None,
    ) -> None:
        self._name = name
        self._engine = engine
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._lock = threading.Lock()
        self._asked: dict[int, Callable[[str | SglError], None]] = {}
        self._count = 0
        self._replies: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        package = str(Path(sgl.__file__).parent)
        command = [python or sys.executable, "-P", launch.__file__, package, _DRIVERS]
        self._process = subprocess.Popen(
            [*command, name, ",".join(map(str, cores)), path, dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={
                **environment.inherited(default=LIBRARIES[name].variables, PYTHONPATH=""),
                **side_variables(len(cores)),
            },
        )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, name=f"sgl-bench-{name}", daemon=True)
        self._reader.start()
        try:
            hello = self._reply()
        except BenchError:
            self.close()
            raise
        self.settings, self.versions = hello["settings"], hello["versions"]
        self.can, self.variants = frozenset(hello["can"]), tuple(hello["variants"])

    def use(self, variant: str) -> None:
        self._exchange({"use": variant})

    def run(self, task: Task) -> tuple[float, list[str]]:
        reply = self._exchange({"task": task.name})
        if "error" in reply:
            raise BenchError(f"peer {self._name} failed at {task.name}: {reply['error'][:_QUOTED]}")
        return float(reply["seconds"]), [str(answer) for answer in reply["answers"]]

    def run_calls(self, calls: Sequence[Call]) -> float:
        if self._engine is None:
            raise BenchError(f"peer {self._name} has no engine whose chat template renders roles")
        self._exchange({"forget": True})
        with PeerBackend(self.ask, self._engine.renderer()) as requests:
            return timed_waves(calls, PlainBackend(requests, options_apart=False))

    def ask(self, request: Request, done: Callable[[str | SglError], None]) -> None:
        """Send one request; `done` is called on the reading thread."""
        with self._lock:
            self._count += 1
            number = self._count
            self._asked[number] = done
        self._write({"id": number, "request": msgspec.to_builtins(request)})

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        self._write(message)
        return self._reply()

    def _write(self, message: dict[str, Any]) -> None:
        stdin = self._process.stdin
        if stdin is None:
            raise BenchError(f"peer {self._name} has no input")
        try:
            with self._lock:
                stdin.write(json.dumps(message).encode() + b"\n")
                stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: the reading thread says so, with its last words

    def _reply(self) -> dict[str, Any]:
        try:
            reply = self._replies.get(timeout=_TIMEOUT_S)
        except queue.Empty:
            raise self._complaint("said nothing") from None
        if reply is None:
            self._replies.put(None)
            raise self._complaint("ended, or broke the protocol")
        return reply

    def _read(self) -> None:
        """Hand out what the peer says, until it ends."""
        for line in self._process.stdout or ():
            try:
                reply = dict(json.loads(line))
            except ValueError:
                break
            if "id" not in reply:
                self._replies.put(reply)
                continue
            with self._lock:
                done = self._asked.pop(reply["id"])
            failed = "error" in reply
            done(BenchError(f"peer {self._name} failed: {reply['error'][:_QUOTED]}") if failed else reply["text"])
        self._replies.put(None)
        with self._lock:
            waiting, self._asked = self._asked, {}
        for done in waiting.values():
            done(self._complaint("ended, or broke the protocol"))

    def _complaint(self, what: str) -> BenchError:
        self._log.seek(0)
        last = " ".join(self._log.read().decode(errors="replace").strip().splitlines()[-1:])[-_QUOTED:]
        return BenchError(
            f"peer {self._name} {what}: {last}",
            hint=f"it needs {', '.join(LIBRARIES[self._name].packages)}; --peer-python names an interpreter that has "
            "them",
        )
