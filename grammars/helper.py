"""Processes that do what must be bounded in time and memory, and may be ended at any moment.

Owns both sides: `Helper`, which starts, asks and ends a process, `Helpers`, a few of them, and `serve`, the main loop
of each. Called by the backends (compiling) and `sgl.grammars.validation` (checking values). A hostile request costs its
process at most: one that answers too late, or dies, is ended, and the next request starts another; others go on.

Messages on standard input and output: 4 bytes of length, then JSON. The first one holds the bound on memory and is
answered when the process is ready; then each request has one answer. The end of the input ends the process.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import selectors
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

from sgl.environment import inherited
from sgl.errors import InternalError

START_S = 120.0
"""Longest wait for the process to be ready: it may import torch."""
_NICENESS = 10


class Helper:
    """The process, started when it is first asked and again after it was ended. May be asked by several threads; one
    request is answered after the other.

    Args:
        module: what it runs, which calls `serve`.
        first: what `serve` hands to `make`.
        max_bytes: memory that it may take beyond what it has when it is ready.
    """

    def __init__(self, module: str, first: dict[str, Any], max_bytes: int) -> None:
        self._module = module
        self._first = frame({**first, "max_bytes": max_bytes})
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._finalizer: Any = None

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """The answer to a request; `None` when it did not come within `seconds`, or the process died of it.

        Raises:
            InternalError: the process does not start.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()  # somebody ended it while it had nothing to do
            if self._process is None:
                self._start()
            answer = self._exchange(frame(request), seconds)
            if answer is None:
                self._end()
            return answer

    def close(self) -> None:
        """End the process; the next request would start another."""
        with self._lock:
            self._end()

    def _start(self) -> None:
        # What libraries print to standard error are remarks; errors come back as answers.
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=inherited(OMP_NUM_THREADS="1"),
        )
        self._finalizer = weakref.finalize(self, _end_process, self._process)
        with suppress(ProcessLookupError):  # it died at once, which the first exchange finds
            # Steps of the model go before, from its first instruction on: imports are most of a short life.
            os.setpriority(os.PRIO_PROCESS, self._process.pid, min(19, os.nice(0) + _NICENESS))
        if self._exchange(self._first, START_S) is None:
            self._end()
            raise InternalError(f"the process {self._module} did not start", hint="see `sgl doctor`")

    def _exchange(self, message: bytes, seconds: float) -> dict[str, Any] | None:
        """Send a message and wait for the answer; `None` when it does not come in time, or at all."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return None
        try:
            process.stdin.write(message)
            process.stdin.flush()
        except BrokenPipeError:
            return None
        deadline, received = time.monotonic() + seconds, b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while len(received) < 4 or len(received) < 4 + struct.unpack("<I", received[:4])[0]:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                more = os.read(process.stdout.fileno(), 1 << 20)
                if not more:
                    return None
                received += more
        answer: dict[str, Any] = json.loads(received[4:])
        return answer

    def _end(self) -> None:
        if self._process is not None:
            self._finalizer()
            self._process = None


class Helpers:
    """Helpers of one kind, each started when all before it are busy: what one of them is stuck in, nobody waits for.

    Args:
        count: how many there may be.
    """

    def __init__(self, module: str, first: dict[str, Any], max_bytes: int, *, count: int = 2) -> None:
        self._all = [Helper(module, first, max_bytes) for _ in range(count)]
        self._free: queue.LifoQueue[Helper] = queue.LifoQueue()  # the last one that was used is warm
        for helper in reversed(self._all):
            self._free.put(helper)

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """See `Helper.ask`; waits while all are busy."""
        helper = self._free.get()
        try:
            return helper.ask(request, seconds)
        finally:
            self._free.put(helper)

    def close(self) -> None:
        """See `Helper.close`."""
        for helper in self._all:
            helper.close()


def _end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            try:
                stream.close()
            except BrokenPipeError:
                continue  # what was written to a process that is gone


# --- inside the process -----------------------------------------------------------------------------------------------


def serve(make: Callable[[dict[str, Any]], Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """Answer requests until the input ends; does not return.

    Args:
        make: gets the first message; gives what answers a request. What that raises is answered as `{"error": text}`.
    """
    first = _read(sys.stdin.buffer)
    if first is not None:
        answer = make(first)
        _bound_memory(int(first["max_bytes"]))
        _write({"ready": True})
        while (request := _read(sys.stdin.buffer)) is not None:
            try:
                _write(answer(request))
            except (RuntimeError, ValueError, MemoryError) as error:  # also what extension modules raise
                _write({"error": str(error) or type(error).__name__})
    os._exit(0)  # nothing to tidy up, and torch would take seconds to do it


def frame(message: dict[str, Any]) -> bytes:
    """A message as bytes.

    Example:
        >>> frame({})
        b'\\x02\\x00\\x00\\x00{}'
    """
    body = json.dumps(message).encode()
    return struct.pack("<I", len(body)) + body


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message; `None` at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    found: dict[str, Any] = json.loads(stream.read(struct.unpack("<I", head)[0]))
    return found


def _write(message: dict[str, Any]) -> None:
    sys.stdout.buffer.write(frame(message))
    sys.stdout.buffer.flush()


def _bound_memory(max_bytes: int) -> None:
    """What is mapped now, and `max_bytes` more."""
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + max_bytes, mapped + max_bytes))
