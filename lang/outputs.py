"""What the variables of a traced program are made of, as data.

Owns the closed union `Output`: text put together from literals and values, the reasoning in a value, or a list of
outputs (what a join or samples gather). Tracing makes them, a compiled program carries them and reads them from the
values of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from sgl.lang.graph import LiteralText, Segment, Var


class TextOutput(msgspec.Struct, frozen=True, tag="text", omit_defaults=True):
    """Text; of one variable alone, that generation's value.

    Attributes:
        form: what the text is, where its generation said so (see `sgl.lang.forms.portable_form`).
        is_typed: the value is read by that form; otherwise it is the text, and the form for who asks.
    """

    segments: tuple[Segment, ...]
    form: str | None = None
    is_typed: bool = False


class ReasoningOutput(msgspec.Struct, frozen=True, tag="reasoning"):
    """The reasoning in what a generation gave."""

    variable: Var


class ListOutput(msgspec.Struct, frozen=True, tag="list"):
    """Several, in order."""

    items: tuple[Output, ...]


Output: TypeAlias = TextOutput | ListOutput | ReasoningOutput


def renamed(output: Output, rename: Callable[[Var], Var]) -> Output:
    """The same output with other variables in it.

    Example:
        >>> renamed(TextOutput((LiteralText("is "), Var("x"))), lambda variable: Var("y")).segments
        (LiteralText(text='is '), Var(name='y', branch=0))
    """
    match output:
        case ListOutput(items=items):
            return ListOutput(tuple(renamed(item, rename) for item in items))
        case ReasoningOutput(variable=variable):
            return ReasoningOutput(rename(variable))
        case TextOutput(segments=segments):
            changed = tuple(s if isinstance(s, LiteralText) else rename(s) for s in segments)
            return msgspec.structs.replace(output, segments=changed)


def variables_of(output: Output) -> list[Var]:
    """Every variable in an output, in order."""
    match output:
        case ListOutput(items=items):
            return [variable for item in items for variable in variables_of(item)]
        case ReasoningOutput(variable=variable):
            return [variable]
        case TextOutput(segments=segments):
            return [segment for segment in segments if isinstance(segment, Var)]
