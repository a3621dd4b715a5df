"""Traces of torch's profiler, for which the steps of an engine carry names.

Owns one profile at a time: when it begins and ends (by steps, or by asking), the file that it becomes, and what a step
is called in it. The engine core lets its calls of model and sampler be named here, and says when a step is over. While
nothing is profiled a call costs one comparison more.

The file is a Chrome trace, compressed (ui.perfetto.dev and chrome://tracing open it). On a GPU it has the kernels,
those of recorded steps too; names are ranges of NVTX for a profiler from outside (`CUDA_PROFILER`) as well.

torch is imported when a profile begins.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sgl.errors import InvalidParameter, SglError
from sgl.runtime.messages import StartProfile
from sgl.runtime.plan import Chunk, StepPlan

log = logging.getLogger("sgl.profiler")

ACTIVITIES = ("CPU", "GPU", "CUDA_PROFILER")


class StepProfiler:
    """Profiles steps.

    Args:
        device: `cuda` where the model is on a GPU.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._asked: StartProfile | None = None  # from `start` on
        self._path = Path()
        self._is_running = False
        self._profile: Any = None
        self._num_steps = 0  # begun since `start`

    def start(self, asked: StartProfile) -> str:
        """Profile from the next step on, or as `asked` says; the file that will be written.

        Raises:
            InvalidParameter: a profile is under way; a wrong value; a folder that cannot be written.
        """
        if self._asked is not None:
            raise InvalidParameter("a profile is under way already", hint="end it first, with stop_profile")
        self._check(asked)
        try:
            if asked.output_dir:
                folder = Path(asked.output_dir)
                folder.mkdir(parents=True, exist_ok=True)
            else:
                folder = Path(tempfile.mkdtemp(prefix="sgl-profile-"))  # nobody else can open it
        except OSError as error:
            raise _unwritable(Path(asked.output_dir or tempfile.gettempdir()), error) from None
        if not os.access(folder, os.W_OK):
            raise InvalidParameter(f"output_dir {str(folder)!r} cannot be written", param="output_dir")
        self._path = folder / f"sgl-{time.time_ns() // 1000}-rank0.trace.json.gz"
        self._asked = asked
        self._num_steps = 0
        return str(self._path)

    def stop(self) -> str:
        """End the profile and write it; its file.

        Raises:
            InvalidParameter: there is none, or its file cannot be written.
        """
        if self._asked is None:
            raise InvalidParameter("no profile is under way", hint="begin one with start_profile")
        was_running, profile = self._is_running, self._profile
        activities, start_step = self._asked.activities, self._asked.start_step
        self._asked, self._profile, self._is_running = None, None, False
        if not was_running:
            raise InvalidParameter(
                "the profile ended before its first step",
                hint="lower start_step" if start_step else "end it after a request has run",
            )
        self._synchronize()
        if "CUDA_PROFILER" in activities:
            _cuda_profiler().stop()
        if profile is not None:
            profile.stop()
            try:
                profile.export_chrome_trace(str(self._path))
            except OSError as error:
                raise _unwritable(self._path.parent, error) from None
        return str(self._path)

    def step_begins(self) -> None:
        """A step is computed from here on."""
        asked = self._asked
        if asked is None:
            return
        if not self._is_running and self._num_steps >= (asked.start_step or 0):
            try:
                self._begin(asked)
            except RuntimeError as error:  # another profiler runs in this process, or the driver has none
                self._asked = self._profile = None
                log.warning("no profile can be made: %s", error)
                return
        self._num_steps += 1

    def step_is_over(self) -> None:
        """The host is done with what it does in a step; the last one that was asked for ends the profile."""
        asked = self._asked
        if asked is None or asked.num_steps is None or not self._is_running:
            return
        if self._num_steps >= (asked.start_step or 0) + asked.num_steps:
            try:
                log.info("profile of %d steps: %s", asked.num_steps, self.stop())
            except SglError as error:
                log.warning("a profile is lost: %s", error.message)

    def named(self, call: Callable[..., Any], name: Callable[[StepPlan], str], *, begins: bool) -> Callable[..., Any]:
        """`call`, whose first argument is a plan, under a name in profiles.

        Args:
            begins: a step begins with it.
        """

        def calling(plan: StepPlan, *args: Any) -> Any:
            if self._asked is None:
                return call(plan, *args)
            if begins:
                self.step_begins()
            if not self._is_running:
                return call(plan, *args)
            return self._call_named(name(plan), call, plan, *args)

        return calling

    def _call_named(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        from torch.autograd.profiler import record_function

        has_nvtx = self._asked is not None and "CUDA_PROFILER" in self._asked.activities
        if has_nvtx:
            import torch

            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        try:
            with record_function(name):
                return call(*args)
        finally:
            if has_nvtx:
                torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def _begin(self, asked: StartProfile) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._synchronize()
        kinds = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}
        wanted = [kinds[name] for name in asked.activities if name in kinds and (name == "CPU" or self._has_gpu)]
        if wanted:
            self._profile = profile(activities=wanted, with_stack=asked.with_stack, record_shapes=asked.record_shapes)
            self._profile.start()
        if "CUDA_PROFILER" in asked.activities:
            _cuda_profiler().start()
        self._is_running = True

    @property
    def _has_gpu(self) -> bool:
        return self._device == "cuda"

    def _synchronize(self) -> None:
        if self._has_gpu:
            import torch

            torch.cuda.synchronize()

    def _check(self, asked: StartProfile) -> None:
        for name in asked.activities:
            if name not in ACTIVITIES:
                raise InvalidParameter(
                    f"activity {name!r} is unknown", hint=f"use some of {', '.join(ACTIVITIES)}", param="activities"
                )
        if "CUDA_PROFILER" in asked.activities and not self._has_gpu:
            raise InvalidParameter("CUDA_PROFILER needs an engine on a GPU", param="activities")
        if not any(name == "CPU" or self._has_gpu for name in asked.activities):
            raise InvalidParameter("there is no GPU to be profiled", hint="ask for CPU", param="activities")
        for field, value, least in (("num_steps", asked.num_steps, 1), ("start_step", asked.start_step, 0)):
            if value is not None and value < least:
                raise InvalidParameter(f"{field} is {value}; expected {least} or more", param=field)


def step_name(plan: StepPlan) -> str:
    """What a step is called in a profile: its phase, its rows, and sums over them. `c` is of rows that compute text,
    `g` of rows that generate: rows (where there are both), their tokens, squares of these, products of tokens and
    keys, and keys.

    Example:
        >>> import numpy as np
        >>> def chunk(count, start):
        ...     table = np.zeros(start + count, dtype=np.int32)
        ...     return Chunk(sequence=1, token_ids=[0] * count, start=start, page_table=table)
        >>> step_name(StepPlan(chunks=(chunk(1025, 0),)))
        'step[EXTEND bs=1 toks=1025 c_sq=1025 c_sqsq=1050625 c_sqsk=1050625 c_sk=1025]'
        >>> step_name(StepPlan(chunks=(chunk(1, 1562),) * 64))
        'step[DECODE bs=64 g_sq=64 g_sqsq=64 g_sqsk=100032 g_sk=100032]'
    """
    computing = [chunk for chunk in plan.chunks if not _generates(chunk)]
    generating = [chunk for chunk in plan.chunks if _generates(chunk)]
    words = [f"bs={len(plan.chunks)}"]
    if computing:
        words.append(f"toks={plan.num_tokens}")
    for letter, chunks in (("c", computing), ("g", generating)):
        if computing and generating:
            words.append(f"{letter}={len(chunks)}")
        if chunks:
            words += _sums(letter, chunks)
    phase = "MIXED" if computing and generating else "EXTEND" if computing else "DECODE"
    if generating and not computing and any(chunk.num_drafts for chunk in generating):
        phase = "VERIFY"
    return f"step[{phase} {' '.join(words)}]"


def draw_name(plan: StepPlan) -> str:
    """What the drawing of a step's tokens is called."""
    return f"draw[bs={sum(len(chunk.draws) for chunk in plan.chunks)}]"


def _generates(chunk: Chunk) -> bool:
    return len(chunk.token_ids) - chunk.num_drafts == 1 and chunk.start > 0


def _sums(letter: str, chunks: Sequence[Chunk]) -> list[str]:
    pairs = [(len(chunk.token_ids), chunk.end) for chunk in chunks]
    sums = {
        "sq": sum(q for q, _ in pairs),
        "sqsq": sum(q * q for q, _ in pairs),
        "sqsk": sum(q * k for q, k in pairs),
        "sk": sum(k for _, k in pairs),
    }
    return [f"{letter}_{name}={value}" for name, value in sums.items()]


def _cuda_profiler() -> Any:
    """torch's switch for a profiler from outside."""
    from torch.cuda import profiler

    return profiler


def _unwritable(folder: Path, error: OSError) -> InvalidParameter:
    return InvalidParameter(
        f"output_dir {str(folder)!r} cannot be written: {error.strerror}",
        hint="give a folder that can",
        param="output_dir",
    )
