"""What the variables of a traced program are made of, as data.

Owns the closed union `Output`: text put together from literals and values, or a list of outputs (what a join or samples
gather). Tracing makes them, a compiled program carries them and reads them from the values of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from sgl.lang.graph import LiteralText, Segment, Var


class TextOutput(msgspec.Struct, frozen=True, tag="text"):
    """Text; of one variable alone, that generation's value."""

    segments: tuple[Segment, ...]


class ListOutput(msgspec.Struct, frozen=True, tag="list"):
    """Several, in order."""

    items: tuple[Output, ...]


Output: TypeAlias = TextOutput | ListOutput


def read(output: Output, value: Callable[[Var], str]) -> Any:
    """The value of an output: text, or lists of it.

    Example:
        >>> read(ListOutput((TextOutput((LiteralText("is "), Var("x"))),)), lambda variable: variable.name.upper())
        ['is X']
    """
    if isinstance(output, ListOutput):
        return [read(item, value) for item in output.items]
    return "".join(s.text if isinstance(s, LiteralText) else value(s) for s in output.segments)


def renamed(output: Output, rename: Callable[[Var], Var]) -> Output:
    """The same output with other variables in it."""
    if isinstance(output, ListOutput):
        return ListOutput(tuple(renamed(item, rename) for item in output.items))
    return TextOutput(tuple(s if isinstance(s, LiteralText) else rename(s) for s in output.segments))


def variables_of(output: Output) -> list[Var]:
    """Every variable in an output, in order."""
    if isinstance(output, ListOutput):
        return [variable for item in output.items for variable in variables_of(item)]
    return [segment for segment in output.segments if isinstance(segment, Var)]
