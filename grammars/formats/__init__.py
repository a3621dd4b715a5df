"""Tool calls and reasoning: how models write them, and how that is told, constrained and read.

Owns the look-up by name and by chat template. Called by the language, by HTTP routes and by programs. No torch and no
grammar engine; only `sgl.grammars.spec` and `sgl.grammars.types` of this room.

Example:
    >>> def add(a: int, b: int) -> int:
    ...     "Add two numbers."
    ...     return a + b
    >>> hermes = tool_format("hermes")
    >>> message = hermes.parse('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>', [add])
    >>> message.calls[0].name, message.calls[0].arguments
    ('add', '{"a": 1, "b": 2}')
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, TypeVar

from sgl.errors import InvalidParameter
from sgl.grammars.formats.catalog import REASONING_FORMATS, TOOL_FORMATS
from sgl.grammars.formats.events import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    ContentDelta,
    Event,
    Message,
    ReasoningDelta,
    ToolCall,
    merged,
    message_of,
)
from sgl.grammars.formats.format import ToolFormat, ToolPrompt, supports_tools
from sgl.grammars.formats.parser import StreamParser, began_inside, is_open, stream_parser
from sgl.grammars.formats.shapes import ReasoningFormat
from sgl.grammars.formats.tools import Tool, ToolChoice, allowed_of, choice_of, tools_of

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "ArgumentsDelta",
    "CallEnd",
    "CallStart",
    "ContentDelta",
    "Event",
    "Message",
    "ReasoningDelta",
    "ReasoningFormat",
    "StreamParser",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "ToolFormat",
    "ToolPrompt",
    "allowed_of",
    "began_inside",
    "choice_of",
    "detect_reasoning_format",
    "detect_tool_format",
    "is_open",
    "merged",
    "message_of",
    "message_parser",
    "opened_by",
    "reasoning_format",
    "supports_tools",
    "tool_format",
    "tools_of",
]

DEFAULT_TOOL_FORMAT = "hermes"
"""For models whose chat template knows no tools: most instruction-tuned models were shown this one."""

F = TypeVar("F", bound=ToolFormat | ReasoningFormat)


def tool_format(name: str) -> ToolFormat:
    """A tool-call format by name or alias.

    Raises:
        InvalidParameter: unknown; the hint names the nearest, or all.

    Example:
        >>> tool_format("qwen25").name
        'hermes'
    """
    return _named(name, TOOL_FORMATS, "tool_call_parser")


def reasoning_format(name: str) -> ReasoningFormat:
    """A reasoning format by name or alias; raises like `tool_format`.

    Example:
        >>> reasoning_format("deepseek-r1").end
        ('</think>',)
    """
    return _named(name, REASONING_FORMATS, "reasoning_parser")


def opened_by(name: str, text: str) -> bool | None:
    """Whether the text that a program wrote right before a generation has opened reasoning of a format.

    `None` where it has not, which leaves the question to the format and to what the model's template writes.

    Example:
        >>> opened_by("qwen3", "2 + 2? <think>"), opened_by("qwen3", "2 + 2?")
        (True, None)
    """
    return is_open(reasoning_format(name), text) or None


def detect_tool_format(template: str) -> ToolFormat:
    """The format that a chat template's source speaks of; hermes, if it speaks of none.

    Example:
        >>> detect_tool_format("... <|python_start|> ...").name, detect_tool_format("").name
        ('pythonic', 'hermes')
    """
    return _detected(template, TOOL_FORMATS) or tool_format(DEFAULT_TOOL_FORMAT)


def detect_reasoning_format(template: str) -> ReasoningFormat | None:
    """The reasoning format that a chat template's source speaks of; `None`, if it speaks of none."""
    found = _detected(template, REASONING_FORMATS)
    if found is None and "<think>" in template:
        found = reasoning_format("qwen3")  # markers that must be there to count are the careful guess
    return found


def message_parser(
    tool_format: ToolFormat | None = None,
    reasoning: ReasoningFormat | None = None,
    tools: Iterable[Any] | None = None,
    prompt: str = "",
    *,
    starts_inside: bool | None = None,
) -> StreamParser:
    """A parser for one message, of calls, of reasoning, or of both; without either all is content.

    Args:
        tools, prompt, starts_inside: as `ToolFormat.parser` has them.

    Example:
        >>> message_parser(reasoning=reasoning_format("qwen3")).parse("<think>a</think>b")
        Message(content='b', reasoning='a', calls=())
    """
    if tool_format is not None:
        return tool_format.parser(tools, reasoning, prompt, starts_inside=starts_inside)
    return stream_parser((), reasoning, tools, prompt, starts_inside)


def _named(name: str, formats: tuple[F, ...], param: str) -> F:
    for fmt in formats:
        if name == fmt.name or name in fmt.aliases:
            return fmt
    known = sorted(each for fmt in formats for each in (fmt.name, *fmt.aliases))
    near = difflib.get_close_matches(str(name), known, n=1)
    raise InvalidParameter(
        f"{param} {name!r} is unknown",
        hint=f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(known)}",
        param=param,
    )


def _detected(template: str, formats: tuple[F, ...]) -> F | None:
    for fmt in formats:
        if any(all(clue in template for clue in clues) for clues in fmt.clues):
            return fmt
    return None
