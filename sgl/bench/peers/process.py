"""The harness's end of a side: starts its process, asks, and ends it.

Owns one child process and its pipes. Everything that a side can do wrong (no answer, an early end, an error of its own)
is a `BenchError` that names the side and quotes the end of what it printed.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

import sgl
from sgl import environment
from sgl.bench.peers import launch
from sgl.bench.peers.messages import (
    Close,
    Closed,
    Failed,
    Generate,
    Generated,
    Load,
    Loaded,
    Preferences,
    Preferred,
    Reply,
    Request,
    Tune,
    Tuned,
    Weights,
    WeightsDigest,
    line_of,
    replies,
)
from sgl.errors import BenchError, SglError

R = TypeVar("R", bound=Reply)

_HOST = "sgl.bench.peers.host"

_TIMEOUT_S = 900.0
"""For any one answer; loading a large model is the longest."""
_QUOTED_LINES = 5


def _package() -> str:
    """The folder of this copy of `sgl`."""
    return str(Path(sgl.__file__).parent)


class Side:
    """A process that runs one peer. Use as a context manager.

    Args:
        name: of the peer, as in `sgl.bench.peers.PEERS`.
        cores: numbers of the cores that it may use.
        env: what is set for it beside the environment of this process.
        python: the interpreter to run it with, whose packages it then uses in place of ours (`launch`).
        program: what to run in place of `sgl.bench.peers.host`, when something else speaks the protocol.
    """

    def __init__(
        self,
        name: str,
        cores: Collection[int],
        env: Mapping[str, str],
        *,
        python: str | None = None,
        program: Sequence[str] = (),
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self.name = name
        self._timeout_s = timeout_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._buffer = b""
        self._closed = False
        # It imports what this process imports, but never from the current folder on its own account. Another
        # interpreter has a path of its own.
        path = "" if python else os.pathsep.join(entry for entry in sys.path if entry)
        host = [python, "-P", launch.__file__, _package(), _HOST] if python else [sys.executable, "-P", "-m", _HOST]
        self._process = subprocess.Popen(
            program or [*host, name, ",".join(map(str, cores))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**environment.inherited(PYTHONPATH=path), **env},
            bufsize=0,
        )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def load(self, load: Load) -> Loaded:
        """Bring the model up."""
        return self._ask(load, Loaded)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Generated:
        """Continue the prompts; see `Generate`."""
        return self._ask(Generate(prompts, new_tokens), Generated)

    def tune(self, prompts: list[list[int]], new_tokens: int) -> Tuned:
        """Choose settings; see `Tune`."""
        return self._ask(Tune(prompts, new_tokens), Tuned)

    def preferred(self, texts: list[list[int]], start: int = 0) -> list[list[int]] | None:
        """Most likely next tokens; see `Preferred`."""
        return self._ask(Preferred(texts, start), Preferences).token_ids

    def weights_digest(self) -> str | None:
        """Checksum of the weights; None where the side cannot say."""
        return self._ask(Weights(), WeightsDigest).sha256

    def close(self, timeout_s: float = 30.0) -> None:
        """End the process, by force if it does not end by itself. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._process.poll() is None:
                self._send(Close())
                self._receive(Closed, time.monotonic() + timeout_s)
                self._process.wait(timeout_s)
        except (BenchError, subprocess.TimeoutExpired):
            self._process.kill()  # it said its error already, or is stuck
        finally:
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process.wait()
            self._log.close()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None:
            self._process.kill()  # it may be in the middle of a long call
        self.close()

    def _ask(self, request: Request, kind: type[R]) -> R:
        if self._closed:
            raise BenchError(f"side {self.name} is closed")
        self._send(request)
        return self._receive(kind, time.monotonic() + self._timeout_s)

    def _send(self, request: Request) -> None:
        pipe = self._process.stdin
        if pipe is None:
            raise BenchError(f"side {self.name} has no input")
        rest = memoryview(line_of(request))
        try:
            while rest:
                rest = rest[pipe.write(rest) :]
        except BrokenPipeError:
            raise self._ended() from None

    def _receive(self, kind: type[R], deadline: float) -> R:
        line = self._line(deadline)
        try:
            reply = replies.decode(line)
        except msgspec.MsgspecError as error:
            raise BenchError(f"side {self.name} answered {line[:200]!r}: {error}") from None
        if isinstance(reply, Failed):
            failure = SglError.from_info(reply.error)
            raise type(failure)(f"side {self.name}: {failure.message}", hint=failure.hint, **failure.details)
        if not isinstance(reply, kind):
            raise BenchError(f"side {self.name} answered {type(reply).__name__}; expected {kind.__name__}")
        return reply

    def _line(self, deadline: float) -> bytes:
        pipe = self._process.stdout
        if pipe is None:
            raise BenchError(f"side {self.name} has no output")
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise BenchError(f"side {self.name} gave no answer in {self._timeout_s:.0f} s{self._last_words()}")
            data = os.read(pipe.fileno(), 1 << 16)
            if not data:
                raise self._ended()
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _ended(self) -> BenchError:
        status = self._process.wait()
        return BenchError(f"side {self.name} ended with status {status}{self._last_words()}")

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return ": " + " / ".join(lines[-_QUOTED_LINES:]) if lines else ""
