"""A tool-call format: its description, and what can be done with it.

Owns `ToolFormat`, the one object that the language, programs and HTTP routes use. It adds nothing to its parts: the
parser, the writer and the lowering each read the same description.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from sgl.errors import InvalidParameter
from sgl.grammars.formats.events import Message
from sgl.grammars.formats.lowering import calls_format, text_format, triggered_format
from sgl.grammars.formats.parser import StreamParser, stream_parser, triggers
from sgl.grammars.formats.shapes import Block, Prompt, ReasoningFormat
from sgl.grammars.formats.tools import choice_of, tools_of
from sgl.grammars.formats.writer import write_calls, write_prompt
from sgl.grammars.spec import StructuralTag, structural_tag


class ToolPrompt(msgspec.Struct, frozen=True):
    """How a prompt tells of tools: variables for the chat template, or a text that belongs to the system turn."""

    template_kwargs: dict[str, Any]
    system: str = ""


class ToolFormat(msgspec.Struct, frozen=True):
    """How a family of models writes tool calls.

    Args:
        name: as users give it; `aliases` are other names.
        origin: where the format is documented.
        blocks: where calls stand: the first is what is written and constrained, readers take all.
        prompt: for chat templates that know no tools.
        parallel: whether one message can hold several calls.
        lead: may stand before calls, where reasoning came first.
        answer: begins an answer without calls, where answers have a marker.
        reasoning: the reasoning format that belongs to it.
        clues: texts of which one list is complete in the chat templates of such models.

    Example:
        >>> from sgl.grammars.formats import tool_format
        >>> hermes = tool_format("hermes")
        >>> hermes.parse(hermes.render([("add", {"a": 1, "b": 2})])).calls[0].arguments
        '{"a": 1, "b": 2}'
    """

    name: str
    origin: str
    blocks: tuple[Block, ...]
    prompt: Prompt
    aliases: tuple[str, ...] = ()
    parallel: bool = True
    lead: str = ""
    answer: str = ""
    reasoning: ReasoningFormat | None = None
    clues: tuple[tuple[str, ...], ...] = ()

    def constraint(
        self, tools: Iterable[Any], choice: Any = "auto", *, parallel: bool = True, strict: bool | None = None
    ) -> StructuralTag | None:
        """What the model may write; `None` is anything.

        With `auto` the text is free until a call begins, whose name and JSON then are valid; with `strict` (or tools
        that ask for it) its arguments obey the tool's schema, as they always do when a call is required. With `none`
        no call can begin. Formats whose calls begin without a marker cannot be held to `auto` and `none`.

        Args:
            tools: as `tools_of` takes them.
            choice: `auto`, `none`, `required`, or one tool by name, as OpenAI's API has it.
            parallel: allow several calls.

        Raises:
            InvalidParameter: tools or choice cannot be read.
            UnsupportedSchema: a keyword of a string that this format cannot enforce; `pointer` says where.
        """
        known = tools_of(tools)
        wanted = choice_of(choice, known)
        block = self.blocks[0]
        if wanted.name is not None:
            known, parallel = tuple(tool for tool in known if tool.name == wanted.name), False
        parallel = parallel and self.parallel
        strict = any(tool.strict for tool in known) if strict is None else strict
        if wanted.mode == "required":
            return self._tag(calls_format(block, known, parallel=parallel, strict=True))
        if not block.begin:
            return None
        if self.answer:
            text: dict[str, Any] = {"type": "tag", "begin": self.answer, "content": text_format(), "end": ""}
            if wanted.mode == "none" or not known:
                return self._tag(text)
            calls = calls_format(block, known, parallel=parallel, strict=strict)
            return self._tag({"type": "or", "elements": [text, calls]})
        if wanted.mode == "none" or not known:
            return self._tag(text_format(list(triggers(self.blocks))))
        return self._tag(triggered_format(block, known, parallel=parallel, strict=strict))

    def parser(
        self,
        tools: Iterable[Any] | None = None,
        reasoning: ReasoningFormat | None = None,
        prompt: str = "",
        *,
        starts_inside: bool | None = None,
    ) -> StreamParser:
        """A parser for one message.

        Args:
            tools: give the types of arguments; without them, bare text that is JSON is taken for JSON.
            reasoning: the model's; a format that has one of its own uses that when none is given.
            prompt: what came before the message (its end is enough); it may have opened the reasoning.
            starts_inside: whether the message begins within reasoning, if that is known better.
        """
        return stream_parser(self.blocks, reasoning or self.reasoning, tools, prompt, starts_inside)

    def parse(self, text: str, tools: Iterable[Any] | None = None, reasoning: ReasoningFormat | None = None) -> Message:
        """A whole text as a message."""
        return self.parser(tools, reasoning).parse(text)

    def render(self, calls: Sequence[tuple[str, Mapping[str, Any] | str]]) -> str:
        """Calls (name, arguments) as the model writes them.

        Raises:
            InvalidParameter: arguments that are no JSON object.
        """
        return write_calls(self.blocks[0], [(name, _arguments(given)) for name, given in calls])

    def render_result(self, name: str, content: str) -> str:
        """A call's result, for a template that has no role `tool`."""
        return self.prompt.result.replace("{name}", name).replace("{content}", content)

    def tool_prompt(self, tools: Iterable[Any], template: str = "") -> ToolPrompt:
        """How the prompt tells of tools: through the chat template `template` if it knows them, else as text.

        Example:
            >>> from sgl.grammars.formats import tool_format
            >>> tool_format("hermes").tool_prompt([{"name": "f"}], "{% if tools %}...{% endif %}").system
            ''
        """
        known = tools_of(tools)
        if supports_tools(template):
            return ToolPrompt({"tools": [tool.function() for tool in known]} if known else {})
        return ToolPrompt({}, write_prompt(self.prompt, self.blocks[0], known))

    def _tag(self, fmt: dict[str, Any]) -> StructuralTag:
        if self.lead:
            lead = {"type": "optional", "content": {"type": "const_string", "value": self.lead}}
            fmt = {"type": "sequence", "elements": [lead, fmt]}
        return structural_tag({"type": "structural_tag", "format": fmt})


def supports_tools(template: str) -> bool:
    """Whether the source of a chat template uses the variable `tools`.

    Example:
        >>> supports_tools("{% for tool in tools %}...{% endfor %}"), supports_tools("{{ m.tools_text }}")
        (True, False)
    """
    return re.search(r"\{[%{](?:[^%}]|%(?!\})|\}(?!\}))*\btools\b", template) is not None


def _arguments(given: Mapping[str, Any] | str) -> Mapping[str, Any]:
    try:
        value = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise InvalidParameter(f"arguments are not JSON: {error}", param="arguments") from None
    if not isinstance(value, Mapping):
        raise InvalidParameter(f"arguments are a {type(value).__name__}; expected an object", param="arguments")
    return value
