"""Messages of a chat, as the turns of a dialect come.

Owns `Turns`: which message a turn becomes or joins, and each message's name in errors (`input[3]`, `messages[0]`).
"""

from __future__ import annotations

from sgl.server.openai.types import Message, Part, TextPart, ToolCall


class Turns:
    """Messages of a `ChatRequest`, one after the other.

    Attributes:
        places: of each message, its name in errors.

    Example:
        >>> turns = Turns()
        >>> turns.add(Message(role="system", content="Be brief."), "instructions")
        >>> turns.add(Message(role="system", content="Be kind."), "input[0]")
        >>> turns.messages[0].content, turns.places
        ('Be brief.\\n\\nBe kind.', ['instructions'])
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.places: list[str] = []

    def add(self, message: Message, place: str) -> None:
        """Append a message; system turns that follow each other are one, since templates take one."""
        last = self.messages[-1] if self.messages else None
        if last is not None and last.role == message.role == "system":
            last.content = _joined(last.content, message.content)
            return
        self.messages.append(message)
        self.places.append(place)

    def call(self, call: ToolCall, place: str) -> None:
        """Append a call of a tool, to the assistant's turn that is there."""
        if not self.messages or self.messages[-1].role != "assistant":
            self.add(Message(role="assistant"), place)
        last = self.messages[-1]
        last.tool_calls = [*(last.tool_calls or ()), call]


def plain(parts: list[Part]) -> str | list[Part]:
    """One text where there is nothing but text."""
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    return "".join(texts) if len(texts) == len(parts) else parts


def _joined(first: str | list[Part] | None, second: str | list[Part] | None) -> str | list[Part] | None:
    """Two contents as paragraphs of one."""
    if not first or not second:
        return first or second
    parts: list[Part] = [*_parts(first), TextPart("\n\n"), *_parts(second)]
    return plain(parts)


def _parts(content: str | list[Part]) -> list[Part]:
    return [TextPart(content)] if isinstance(content, str) else content
