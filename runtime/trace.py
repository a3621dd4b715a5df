"""The step timeline as a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Owns the file, and the clock readings around forward and sampling. The engine core reports each step, the scheduler each
request that ended; everything is written when it happens, so that the file of an engine that died is readable up to
there (viewers accept an array that is not closed).

What the file shows: one track with the steps, their phases as arguments; one process per program with a track per
branch, where each generation or select spans from its queueing to its end, over the chunks that were computed for it;
counters of pages and of running and waiting requests. Times are microseconds of the engine's clock.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sgl.errors import ConfigError
from sgl.runtime.plan import StepPlan
from sgl.runtime.sequence import Request
from sgl.runtime.stats import Stats

log = logging.getLogger("sgl.trace")

_ENGINE = 0
_STEPS = 0


class StepTimes(NamedTuple):
    """When a step's forward began and ended, and when its sampling began and ended, as the host saw it."""

    begin: float
    forwarded: float
    sampling: float
    sampled: float


class Tracer:
    """Writes a trace.

    Args:
        path: of the file; one that exists is replaced.
        clock: seconds; the engine's.

    Raises:
        ConfigError: it cannot be opened.
    """

    def __init__(self, path: str | Path, clock: Callable[[], float]) -> None:
        try:
            self._file = Path(path).open("wb")  # noqa: SIM115 - open for as long as the engine runs
        except OSError as error:
            raise ConfigError(
                f"trace_file {str(path)!r} cannot be opened: {error.strerror}",
                hint="give a file in a folder that exists and can be written",
                param="trace_file",
            ) from None
        self._clock = clock
        self._times: list[tuple[float, float]] = []
        self._last_end = -math.inf
        self._encoder = msgspec.json.Encoder()
        self._named: set[tuple[int, int]] = set()
        self._file.write(b"[")
        self._first = True
        self._name(_ENGINE, "engine", _STEPS, "steps")

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, with the time noted before and after it: of a step's forward, then of its sampling."""

        def noting(*args: Any) -> Any:
            begin = self._clock()
            result = call(*args)
            self._times.append((begin, self._clock()))
            return result

        return noting

    def take_times(self) -> StepTimes:
        """Those of the two calls that were timed last."""
        forward, sample = self._times[-2:]
        self._times.clear()
        return StepTimes(*forward, *sample)

    def step(self, plan: StepPlan, times: StepTimes, touched: Sequence[Request], stats: Stats) -> None:
        """One step that is done, and the requests that got something from it.

        Steps that overlap follow each other here: one begins where the one before ended, or where its forward did.
        """
        forward_s, sample_s = times.forwarded - times.begin, times.sampled - times.sampling
        begin, sampled = max(times.begin, self._last_end), max(times.sampled, self._last_end)
        end = self._last_end = self._clock()
        requests = {request.sequence.id: request for request in touched}
        self._slice(
            _ENGINE,
            _STEPS,
            f"step of {plan.num_tokens}",
            begin,
            end,
            {
                "tokens": plan.num_tokens,
                "chunks": len(plan.chunks),
                "pairs": plan.num_pairs,
                "forward_ms": round(1e3 * forward_s, 3),
                "sample_ms": round(1e3 * sample_s, 3),
                "process_ms": round(1e3 * (end - sampled), 3),
            },
        )
        for chunk in plan.chunks:
            request = requests.get(chunk.sequence)
            if request is None or request.program is None:
                continue
            track = self._track(request)
            what = "decode" if len(chunk.token_ids) == 1 and chunk.end > request.prompt_len else "prefill"
            arguments = {"tokens": len(chunk.token_ids), "start": chunk.start, "sequence": chunk.sequence}
            self._slice(*track, what, begin, sampled, arguments)
        self._count("pages", end, free=stats.pages_free, cached=stats.pages_cached, held=stats.pages_held)
        self._count("requests", end, running=stats.num_running, waiting=stats.num_waiting)
        try:
            if not self._file.closed:
                self._file.flush()
        except OSError as error:
            self._give_up(error)

    def ended(self, request: Request) -> None:
        """A request is over, whatever its end."""
        if request.program is not None:
            arguments = {**msgspec.to_builtins(request.usage()), "node": request.node}
            self._slice(*self._track(request), request.label, request.queued_at, self._clock(), arguments)

    def close(self) -> None:
        """Finish the file."""
        if self._file.closed:
            return
        try:
            self._file.write(b"]\n")
            self._file.close()
        except OSError as error:
            self._give_up(error)

    def _track(self, request: Request) -> tuple[int, int]:
        program = request.program
        if program is None:
            return _ENGINE, _STEPS
        track = (program.number, request.branch)
        self._name(program.number, f"{program.name} #{program.number}", request.branch, f"branch {request.branch}")
        return track

    def _name(self, process: int, process_name: str, thread: int, thread_name: str) -> None:
        """Name a process and a track, once each."""
        if (process, -1) not in self._named:
            self._named.add((process, -1))
            self._write({"ph": "M", "name": "process_name", "pid": process, "args": {"name": process_name}})
        if (process, thread) not in self._named:
            self._named.add((process, thread))
            self._write(
                {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": thread_name}}
            )

    def _slice(self, process: int, thread: int, name: str, begin: float, end: float, arguments: dict[str, Any]) -> None:
        self._write(
            {
                "ph": "X",
                "name": name,
                "pid": process,
                "tid": thread,
                "ts": round(1e6 * begin, 1),
                "dur": round(1e6 * (end - begin), 1),
                "args": arguments,
            }
        )

    def _count(self, name: str, now: float, **values: int) -> None:
        self._write({"ph": "C", "name": name, "pid": _ENGINE, "ts": round(1e6 * now, 1), "args": values})

    def _write(self, event: dict[str, Any]) -> None:
        if self._file.closed:
            return
        try:
            self._file.write((b"\n" if self._first else b",\n") + self._encoder.encode(event))
        except OSError as error:
            self._give_up(error)
        self._first = False

    def _give_up(self, error: OSError) -> None:
        """The disk is full, or gone: the engine goes on without a trace."""
        log.warning("trace_file is switched off: %s", error)
        with suppress(OSError):  # closing writes what is buffered
            self._file.close()
