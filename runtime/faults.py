"""Named points at which a test makes the engine fail on purpose.

Owns the points, what may happen at them, and the counting of visits. They are compiled into the engine and cost one
attribute check while off, which is always outside of tests: `fault_points` is refused unless the environment has
`SGL_TEST_FAULTS=1`. Points are reached on the engine core's thread, `in_compile` also on threads of jobs.

    point         reached                                       what may not be harmed by `raise`
    before_admit  when a request is about to enter the queue    everyone but its program
    in_compile    when a constraint is about to be compiled     everyone but its program
    in_forward    after a forward, before its logits are used   programs that are not in the step
    before_emit   before an event other than a failure is sent  everyone but its program
    in_detok      before a drawn token is turned into text      everyone but its program
    on_free       before an ended program lets go of its state  everyone, its own result included
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sgl.errors import ConfigError
from sgl.runtime.plan import StepPlan

Point = Literal["before_admit", "in_compile", "in_forward", "before_emit", "in_detok", "on_free"]

SWITCH = "SGL_TEST_FAULTS"
"""Environment variable that must be 1 before `fault_points` is taken."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What happens at a point, and when.

    Args:
        action: `raise` an exception that nothing expects, `sleep`, `exit` the process at once, or (at `in_forward`)
            give `nan` logits.
        at, times: at which visit, and at how many from there; `times` 0 is every one.
        program: count and harm visits of programs of this name only; the step's first row when there is none.
        seconds, status: of `sleep` and `exit`.
    """

    action: Literal["raise", "sleep", "exit", "nan"]
    at: Annotated[int, Meta(ge=1)] = 1
    times: Annotated[int, Meta(ge=0)] = 1
    program: str | None = None
    seconds: Annotated[float, Meta(ge=0)] = 0.1
    status: Annotated[int, Meta(ge=0, le=255)] = 70


class InjectedFault(Exception):
    """What `raise` raises. Its text has what an error for the outside must not have: an address and a path."""

    def __init__(self, point: Point) -> None:
        super().__init__(f"fault at {point} in <frame at 0x{id(self):x}, file {__file__!r}>")


class FaultPoints:
    """The faults of one engine.

    Args:
        faults: by point.
        sleep: how to sleep; a test with a fake clock gives its own.
    """

    def __init__(self, faults: Mapping[Point, Fault], sleep: Callable[[float], object] = time.sleep) -> None:
        self._faults = dict(faults)
        self._sleep = sleep
        self._visits: Counter[Point] = Counter()
        self._lock = threading.Lock()

    def reach(self, point: Point, program: str) -> None:
        """A program came to `point`. Raises `InjectedFault`, returns late, or does not return, if that is its fault."""
        fault = self._due(point, [program])
        if fault is not None:
            self._act(point, fault)

    def forward(self, plan: StepPlan, logits: Any, programs: Sequence[str]) -> Any:
        """A forward gave `logits` `[rows, vocabulary]`; `programs` are the names of its chunks' programs."""
        fault = self._due("in_forward", programs)
        if fault is None:
            return logits
        if fault.action != "nan":
            self._act("in_forward", fault)
            return logits
        poisoned = logits.clone()
        first = 0
        for index, (chunk, program) in enumerate(zip(plan.chunks, programs, strict=True)):
            last = first + len(chunk.logit_offsets)
            if program == fault.program or (fault.program is None and index == 0):
                poisoned[first:last] = float("nan")
            first = last
        return poisoned

    def _due(self, point: Point, programs: Sequence[str]) -> Fault | None:
        """The point's fault, if this visit counts and it is time."""
        fault = self._faults.get(point)
        if fault is None or (fault.program is not None and fault.program not in programs):
            return None
        with self._lock:
            self._visits[point] += 1
            late = self._visits[point] - fault.at
        return fault if late >= 0 and (fault.times == 0 or late < fault.times) else None

    def _act(self, point: Point, fault: Fault) -> None:
        match fault.action:
            case "sleep":
                self._sleep(fault.seconds)
            case "exit":
                os._exit(fault.status)
            case _:
                raise InjectedFault(point)


def parse_faults(given: str, *, allowed: bool, sleep: Callable[[float], object] = time.sleep) -> FaultPoints:
    """The fault points that `EngineConfig.fault_points` asks for.

    Args:
        given: JSON, faults by point.
        allowed: whether `SWITCH` is 1.
        sleep: as `FaultPoints` takes it.

    Raises:
        ConfigError: they are not allowed, or `given` is not JSON of faults by point.

    Example:
        >>> faults = parse_faults('{"in_forward": {"action": "raise", "at": 3}}', allowed=True)
        >>> parse_faults('{"in_forward": {"action": "raise"}}', allowed=False)
        Traceback (most recent call last):
        sgl.errors.ConfigError: fault_points break an engine on purpose, for tests (set SGL_TEST_FAULTS=1 to allow them)
    """
    if not allowed:
        raise ConfigError(
            "fault_points break an engine on purpose, for tests",
            hint=f"set {SWITCH}=1 to allow them",
            param="fault_points",
        )
    try:
        faults = msgspec.json.decode(given, type=dict[Point, Fault])
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"fault_points: {error}",
            hint='give JSON like {"in_forward": {"action": "raise", "at": 3}}',
            param="fault_points",
        ) from None
    for point, fault in faults.items():
        if fault.action == "nan" and point != "in_forward":
            raise ConfigError(
                f"fault_points: {point} has no logits", hint="use nan at in_forward", param="fault_points"
            )
    return FaultPoints(faults, sleep)
