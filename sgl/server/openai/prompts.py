"""The messages of a chat as nodes of a graph, tools included.

Owns `ChatPrompt`. Contents are text: special tokens in them are plain characters, whoever wrote them. Tools and
calls of earlier turns are written in the model's own format (`sgl.grammars.formats`); where the chat template has no
words for tools, the system turn tells of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sgl.errors import EmptyPrompt, InvalidParameter, Unsupported
from sgl.grammars.formats import ToolFormat
from sgl.lang.graph import LiteralText, Node, Role, Text
from sgl.server.openai.types import ImagePart, Message, RefusalPart, TextPart

_ROLES = {"developer": "system"}
_GONE = {"function_call": "give the call in tool_calls", "audio": "give its transcript as content"}


class ChatPrompt:
    """Builds the nodes of a prompt; ids count from 0.

    Args:
        tool_format: how the model writes calls.
        tools: a text for the system turn that tells of the tools; empty without them.
    """

    def __init__(self, tool_format: ToolFormat, tools: str = "") -> None:
        self.nodes: list[Node] = []
        self._format = tool_format
        self._tools = tools
        self._names: dict[str, str] = {}

    def add(self, messages: list[Message], *, open_last: bool = False, places: Sequence[str] = ()) -> None:
        """Append turns.

        Args:
            open_last: the last turn is the assistant's and goes on.
            places: of each message, its name in errors, where that is not `messages[0]` and so on.

        Raises:
            EmptyPrompt: no messages.
            InvalidParameter: a message without content, or content that cannot be shown to a model.
        """
        if not messages:
            raise EmptyPrompt("messages is empty", hint="give at least one message", param="messages")
        if self._tools and messages[0].role not in ("system", "developer"):
            self._turn("system", [LiteralText(self._tools)])
        for index, message in enumerate(messages):
            is_last = index == len(messages) - 1
            where = places[index] if places else f"messages[{index}]"
            self._message(message, where, first=index == 0, close=not (open_last and is_last))

    def begin_answer(self) -> None:
        """Begin the assistant's turn."""
        self._role("assistant", True)

    def append(self, node: Node) -> None:
        """Append a node that has the next id."""
        self.nodes.append(node)

    @property
    def next_id(self) -> int:
        """Of the node that comes next."""
        return len(self.nodes)

    def _message(self, message: Message, where: str, *, first: bool, close: bool) -> None:
        for name, instead in _GONE.items():
            if getattr(message, name) is not None:
                raise InvalidParameter(f"{where}.{name} is not taken", hint=instead, param=f"{where}.{name}")
        role = _ROLES.get(message.role, message.role)
        self._role(role if role != "tool" else "user", True)
        if role == "tool":
            name = self._names.get(message.tool_call_id or "", message.name or "")
            self._text(self._format.render_result(name, _plain_text(message.content, where)))
        else:
            self._content(message, where)
        if role == "assistant" and message.tool_calls:
            self._calls(message, where)
        if first and role == "system" and self._tools:
            self._text(f"\n\n{self._tools}" if message.content else self._tools)
        if close:
            self._role(role if role != "tool" else "user", False)

    def _content(self, message: Message, where: str) -> None:
        content = message.content
        if content is None:
            if message.role != "assistant" or not (message.tool_calls or message.refusal):
                raise InvalidParameter(f"{where}.content is missing", hint="give text", param=f"{where}.content")
            self._text(message.refusal or "")
        elif isinstance(content, str):
            self._text(content)
        else:
            for number, part in enumerate(content):
                self._part(part, f"{where}.content[{number}]")

    def _part(self, part: Any, where: str) -> None:
        match part:
            case TextPart(text=text) | RefusalPart(refusal=text):
                self._text(text)
            case ImagePart():
                raise no_images(where)

    def _calls(self, message: Message, where: str) -> None:
        calls = message.tool_calls or []
        for call in calls:
            if call.id:
                self._names[call.id] = call.function.name
        try:
            text = self._format.render([(call.function.name, call.function.arguments or "{}") for call in calls])
        except InvalidParameter as error:
            raise InvalidParameter(f"{where}.tool_calls: {error.message}", param=f"{where}.tool_calls") from None
        self._text(f"\n{text}" if message.content else text)

    def _turn(self, role: str, segments: list[LiteralText]) -> None:
        self._role(role, True)
        self.append(Text(id=self.next_id, segments=tuple(segments)))
        self._role(role, False)

    def _role(self, role: str, begin: bool) -> None:
        self.append(Role(id=self.next_id, role=role, begin=begin))

    def _text(self, text: str) -> None:
        if text:
            self.append(Text(id=self.next_id, segments=(LiteralText(text),)))


def _plain_text(content: Any, where: str) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    texts = [part.text for part in content if isinstance(part, TextPart)]
    if len(texts) != len(content):
        raise InvalidParameter(f"{where}.content is not text", hint="give text parts only", param=f"{where}.content")
    return "".join(texts)


def no_images(where: str) -> Unsupported:
    """The error of an image at this place of a request, however it is given."""
    return Unsupported("this model takes no images", hint="give text", param=where)
