"""Requirements on a generation's value, with a bounded number of attempts that keep what was computed before them.

Owns the steps of `s.require`, as a generator that never waits: it appends an attempt and is sent the value (or the
error of a typed value that is none). States drive it, by reading or by awaiting.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from typing import Any, TypeAlias, cast

from sgl.errors import InvalidParameter, RequirementFailed, SourceLocation
from sgl.lang.branches import BranchState, derived_seed
from sgl.lang.capture import Capture
from sgl.lang.expr import Appendable, GenExpr

Check: TypeAlias = Callable[[Any], object]
Feedback: TypeAlias = Callable[[Any, str], Appendable]


def repairing(
    core: BranchState,
    expr: GenExpr[Any],
    check: Check,
    feedback: Feedback | None,
    attempts: int,
    location: SourceLocation | None,
) -> Generator[None, Any, Any]:
    """Append attempts until one passes; returns its value (see `ProgramState.require`)."""
    if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
        raise InvalidParameter(f"attempts is {attempts!r}; expected an integer >= 1", param="attempts")
    if not isinstance(expr, GenExpr):
        raise InvalidParameter(
            f"require got {type(expr).__name__}; expected a gen() alone",
            hint="begin the turn first: with s.assistant(): s.require(sgl.gen(...), check)",
            param="expr",
        )
    if not callable(check):
        raise InvalidParameter(f"check is {check!r}; expected a function of the value", param="check")
    if feedback is not None and not callable(feedback):
        raise InvalidParameter(
            f"feedback is {feedback!r}; expected a function of value and reason",
            hint="feedback=lambda value, reason: ...",
            param="feedback",
        )
    sampling = expr.sampling(core.program.sampling)
    if sampling.n != 1 or expr.list_append:
        raise InvalidParameter("require takes a generation of one value", hint="leave n and list_append out", param="n")
    if sampling.temperature < 1e-5 and feedback is None:
        attempts = 1  # it would say the same again
    point = core.mark(location)
    was_told = False
    value: Any = None
    reason = ""
    for attempt in range(attempts):
        again = expr if attempt == 0 or sampling.seed is None else expr.with_seed(derived_seed(sampling.seed, attempt))
        core.append(again, location)
        value = yield
        failure = _failure(check, value)
        if failure is None:
            if was_told:
                text = _text(core, again)
                core.rewind(point, location)
                core.append(text, location)
            return value
        reason = failure
        if feedback is None or attempt + 1 == attempts:
            core.rewind(point, location)
        else:
            core.append(feedback(value, reason), location)
            was_told = True
    raise RequirementFailed(
        f"{expr.name or 'a generation'!r} failed its requirement {attempts} times; the last value {value!r}: {reason}",
        hint="raise attempts or the temperature, or give feedback",
        location=location,
        value=repr(value),
        reason=reason,
    )


def _failure(check: Check, value: Any) -> str | None:
    """Why a value fails, or `None`."""
    if isinstance(value, Exception):
        return str(value)
    try:
        verdict = check(value)
    except (ValueError, AssertionError) as error:
        return str(error) or type(error).__name__
    if inspect.isawaitable(verdict):
        if inspect.iscoroutine(verdict):
            verdict.close()
        raise InvalidParameter("check is async; a check is a plain function", hint="make it a def", param="check")
    if isinstance(verdict, str) and verdict:
        return verdict
    return None if verdict else f"the check gave {verdict!r}"


def _text(core: BranchState, expr: GenExpr[Any]) -> str:
    return cast(Capture, core.find(core.name_of(expr))).text  # a single generation was appended
