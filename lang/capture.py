"""Values that a program will have, and where in the program they were asked for.

Owns `Capture`, the place that the event of one generation or select fills, the search for the user's line, and how
a task is woken from another thread. The interpreter fills captures; states and streams read them.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

from sgl.errors import InvalidProgram, SourceLocation
from sgl.lang.forms import Form
from sgl.lang.graph import ValueEvent

if TYPE_CHECKING:
    from sgl.grammars.formats import Message, StreamParser
    from sgl.lang.tools import Toolbox

_OURS = ("sgl.lang.", "sgl.grammars.", "contextlib", "asyncio.")
"""Modules whose frames are not the program: this room, what it reads texts with, and what runs its context managers and
tasks."""


def user_location() -> SourceLocation | None:
    """The innermost line on this thread's stack that is not of this room."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_OURS):
            return SourceLocation(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


class UnknownName(InvalidProgram, KeyError):
    """A name that nothing captured; also a `KeyError`. On the wire it is `InvalidProgram`."""

    __str__ = InvalidProgram.__str__

    def __reduce__(self) -> tuple[Any, ...]:
        return (_unknown_name, (self.message, self.hint, self.location))


def _unknown_name(message: str, hint: str, location: SourceLocation | None) -> UnknownName:
    return UnknownName(message, hint=hint, location=location)


class Capture:
    """A value that a generation or select will have. Filled once, by the event of its node.

    Args:
        form: how its text becomes a typed value; `None` when it is text and nothing else.
        reasoning: the format of the reasoning in what is generated, which is no part of its text then.
        toolbox: the tools that it may call.
        starts_inside: the text before it has opened the reasoning; `None` leaves that to the format.
    """

    __slots__ = (
        "_message",
        "branch",
        "event",
        "form",
        "location",
        "name",
        "node",
        "reasoning",
        "starts_inside",
        "toolbox",
    )

    def __init__(
        self,
        name: str,
        branch: int,
        location: SourceLocation | None,
        form: Form | None = None,
        reasoning: str | None = None,
        toolbox: Toolbox | None = None,
        starts_inside: bool | None = None,
    ) -> None:
        self.reasoning = reasoning
        self.starts_inside = starts_inside
        self.toolbox = toolbox
        self._message: Message | None = None
        self.name = name
        self.branch = branch
        self.location = location
        self.form = form
        self.node: int | None = None
        self.event: ValueEvent | None = None

    @property
    def text(self) -> str:
        """Its text, once it is there."""
        return self.message.content if self.reasoning is not None else self.done.value

    @property
    def message(self) -> Message:
        """What was generated, taken apart into reasoning and answer."""
        if self._message is None:
            if self.starts_inside is None and self.reasoning is not None:
                from sgl.grammars.formats import began_inside, reasoning_format

                usage = self.done.usage  # of whoever has seen the prompt that the model's template made
                self.starts_inside = began_inside(
                    reasoning_format(self.reasoning), self.done.value, usage.reasoning_tokens, usage.completion_tokens
                )
            self._message = self.parser().parse(self.done.value)
        return self._message

    def parser(self) -> StreamParser:
        """What takes the generated text apart, in any pieces."""
        from sgl.grammars.formats import message_parser, reasoning_format

        fmt = reasoning_format(self.reasoning) if self.reasoning is not None else None
        return message_parser(reasoning=fmt, starts_inside=self.starts_inside)

    @property
    def done(self) -> ValueEvent:
        """Its event, once it is there."""
        return cast(ValueEvent, self.event)


def waker() -> tuple[Callable[[], None], asyncio.Event]:
    """What wakes this task from any thread, and what it waits on."""
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()

    def wake() -> None:
        # The loop may close at any moment, and this is a thread of the backend: the consumer's end is no error of it.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(woken.set)

    return wake, woken
