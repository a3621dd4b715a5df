"""What a name of a prompt state stands for, and its value once everything that it needs is there.

Owns the kinds of variables and pure functions over them. Whoever reads waits first (blocking or awaiting) for the
`captures` of a variable; then these functions look and never wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from sgl.errors import InvalidProgram, SourceLocation
from sgl.lang.capture import Capture
from sgl.lang.graph import meta_info

if TYPE_CHECKING:
    from sgl.lang.tools import Call


class Scope:
    """A variable that is the text between two points of a branch."""

    def __init__(self, parts: list[str | Capture]) -> None:
        self.parts = parts


class Set:
    """A variable that Python code has set."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Gathered:
    """Several values under one name: one per child of a join, the samples of one generation, or those of a loop."""

    def __init__(self, variables: list[Variable]) -> None:
        self.variables = variables


class Collected(Gathered):
    """What generations with `list_append` gave so far, in order."""


class Reasoning:
    """The reasoning that stood in what a capture generated."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture


Variable: TypeAlias = "Capture | Reasoning | Scope | Set | Gathered"


class Turn:
    """A place where a chat turn begins (`role`) or ends (`None`)."""

    def __init__(self, role: str | None) -> None:
        self.role = role


Part: TypeAlias = str | Capture | Turn


def captures(variable: Variable) -> Iterator[Capture]:
    """What has to be there before `variable` can be read."""
    match variable:
        case Capture():
            yield variable
        case Reasoning():
            yield variable.capture
        case Scope():
            yield from (part for part in variable.parts if isinstance(part, Capture))
        case Gathered():
            for item in variable.variables:
                yield from captures(item)


def text_of(part: str | Capture) -> str:
    """The text of a part whose value is there."""
    return part if isinstance(part, str) else part.text


def resolve(variable: Variable) -> Any:
    """What `s[name]` gives: text, a typed value (`gen(type=T)`), a list, or what Python set."""
    match variable:
        case Capture():
            is_typed = variable.form is not None and variable.form.is_typed
            return typed(variable) if is_typed else variable.text
        case Reasoning():
            return variable.capture.message.reasoning
        case Scope():
            return "".join(text_of(part) for part in variable.parts)
        case Set():
            return variable.value
        case Gathered():
            return [resolve(item) for item in variable.variables]


def streamed(variable: Variable) -> Any:
    """What a stream of `name` gives in one piece: the text of a capture, or the value of another variable."""
    return variable.text if isinstance(variable, Capture) else resolve(variable)


def texts(variable: Variable) -> Any:
    """`resolve`, with texts in the place of typed values; `None` for reasoning, which is a part of another text."""
    match variable:
        case Capture():
            return variable.done.value
        case Gathered():
            return [texts(item) for item in variable.variables]
        case Reasoning():
            return None
        case _:
            return resolve(variable)


def typed(variable: Variable) -> Any:
    """What `s.value(name)` gives: the value as what it is, where its generation has a type.

    Raises:
        Truncated: the text ended before it was a complete value.
    """
    if isinstance(variable, Gathered):
        return [typed(item) for item in variable.variables]
    if not isinstance(variable, Capture) or variable.form is None:
        return resolve(variable)
    cut = variable.done.finish == "length"
    return variable.form.value(variable.name, variable.text, cut=cut, location=variable.location)


def meta(variable: Variable, name: str, location: SourceLocation | None) -> Any:
    """How a value came about (see `sgl.lang.meta`); a list of these for several values."""
    if isinstance(variable, Gathered):
        return [meta(item, name, location) for item in variable.variables]
    if not isinstance(variable, Capture):
        raise InvalidProgram(f"{name!r} was not generated; it has no meta information", location=location)
    return meta_info(variable.done)


def calls(variable: Variable, name: str, location: SourceLocation | None) -> list[Call]:
    """The tool calls that a generation wrote, in order; of several, one after the other."""
    if isinstance(variable, Gathered):
        return [call for item in variable.variables for call in calls(item, name, location)]
    if not isinstance(variable, Capture) or variable.toolbox is None:
        raise InvalidProgram(
            f"{name!r} was generated without tools",
            hint="give gen its tools: gen(name, tools=[...])",
            location=location,
        )
    return variable.toolbox.calls(variable.text, cut=variable.done.finish == "length")


def probabilities(found: Any, name: str) -> dict[str, float]:
    """The probability of each option, out of a select's meta information.

    Raises:
        InvalidProgram: it is of something else, or of several selects.
    """
    if isinstance(found, list):
        raise InvalidProgram(
            f"{name!r} has several values, from a join or from n",
            hint=f"ask the branch that selected: branch.probabilities({name!r})",
        )
    if not isinstance(found, dict) or "probabilities" not in found:
        raise InvalidProgram(f"{name!r} is not a select", hint="only selects have probabilities of options")
    return cast(dict[str, float], found["probabilities"])


def turns(parts: Iterable[Part]) -> list[dict[str, str]]:
    """The chat turns that `parts` make, an open one with its content so far. Their captures are there."""
    found: list[dict[str, str]] = []
    role: str | None = None
    content: list[str] = []
    for part in (*parts, Turn(None)):
        if not isinstance(part, Turn):
            if role is not None:
                content.append(text_of(part))
            continue
        if role is not None:
            found.append({"role": role, "content": "".join(content)})
        role, content = part.role, []
    return found
