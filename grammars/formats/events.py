"""What a stream of model text turns into: the closed union `Event`, and the message that events add up to.

Owns the events and the two ways to add them up. `StreamParser` makes them; the language and HTTP routes read them.
Neighbouring deltas of one kind mean the same as one delta with both texts, so equality of streams is equality after
`merged`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

Status: TypeAlias = Literal["complete", "truncated", "malformed"]


class ContentDelta(msgspec.Struct, frozen=True, tag="content"):
    """More of the answer."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, tag="reasoning"):
    """More of the reasoning before it."""

    text: str


class CallStart(msgspec.Struct, frozen=True, tag="call_start"):
    """A tool call begins: its number in the message, its id and the name of the tool."""

    index: int
    id: str
    name: str


class ArgumentsDelta(msgspec.Struct, frozen=True, tag="arguments"):
    """More of a call's arguments; all of them together are the text of one JSON object, if the call is complete."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, tag="call_end"):
    """A call is over.

    Args:
        status: `complete`; `truncated`, when the text ended within it; `malformed`, when it does not follow its format.
        text: what the model wrote for a malformed call, from its first character to where it went wrong.
    """

    index: int
    status: Status = "complete"
    text: str = ""


Event: TypeAlias = ContentDelta | ReasoningDelta | CallStart | ArgumentsDelta | CallEnd


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a message; `arguments` is JSON text, of which the end is missing when it is not `complete`."""

    id: str
    name: str
    arguments: str
    complete: bool = True


class Message(msgspec.Struct, frozen=True):
    """An assistant's turn taken apart."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


def merged(events: Iterable[Event]) -> list[Event]:
    """The same events with neighbouring deltas joined.

    Example:
        >>> merged([ContentDelta("a"), ContentDelta("b")])
        [ContentDelta(text='ab')]
    """
    result: list[Event] = []
    parts: list[str] = []

    def close() -> None:
        if len(parts) > 1:
            result[-1] = msgspec.structs.replace(result[-1], text="".join(parts))

    for event in events:
        last = result[-1] if result else None
        if isinstance(event, (ContentDelta, ReasoningDelta, ArgumentsDelta)):
            same = type(event) is type(last) and getattr(event, "index", None) == getattr(last, "index", None)
            if same:
                parts.append(event.text)
                continue
            close()
            parts = [event.text]
        else:
            close()
            parts = []
        result.append(event)
    close()
    return result


def message_of(events: Iterable[Event]) -> Message:
    """What events add up to. A malformed call is no call: what was written for it is content.

    Example:
        >>> message_of([CallStart(0, "call_0", "f"), ArgumentsDelta(0, "{}"), CallEnd(0)]).calls
        (ToolCall(id='call_0', name='f', arguments='{}', complete=True),)
    """
    content: list[str] = []
    reasoning: list[str] = []
    arguments: list[str] = []
    calls: list[ToolCall] = []
    start: CallStart | None = None
    for event in events:
        match event:
            case ContentDelta(text=text):
                content.append(text)
            case ReasoningDelta(text=text):
                reasoning.append(text)
            case CallStart():
                start, arguments = event, []
            case ArgumentsDelta(text=text):
                arguments.append(text)
            case CallEnd(status="malformed", text=text):
                content.append(text)
            case CallEnd(status=status) if start is not None:
                calls.append(ToolCall(start.id, start.name, "".join(arguments), status == "complete"))
    return Message("".join(content), "".join(reasoning), tuple(calls))
