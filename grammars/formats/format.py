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
from sgl.grammars.formats.tools import Tool, choice_of, tools_of
from sgl.grammars.formats.values import refuse_constant, type_of
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

        With `auto` the text is free until a call begins, whose name and JSON then are valid; with `strict`, or for the
        tools that ask for it, its arguments obey the tool's schema, as they always do when a call is required. With
        `none` no call can begin. Formats whose calls begin without a marker cannot be held to `auto` and `none`.

        Args:
            tools: as `tools_of` takes them.
            choice: `auto`, `none`, `required`, or one tool by name, as OpenAI's API has it.
            parallel: allow several calls.
            strict: of all tools; `None` leaves it to each.

        Raises:
            InvalidParameter: tools or choice cannot be read.
            UnsupportedSchema: an argument's name that this format cannot write, or a keyword that it cannot enforce;
                `pointer` says where.
        """
        known = tools_of(tools)
        wanted = choice_of(choice, known)
        block = self.blocks[0]
        if wanted.name is not None:
            known, parallel = tuple(tool for tool in known if tool.name == wanted.name), False
        parallel = parallel and self.parallel
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
        """Calls (name, arguments) as the model writes them; what the parser reads back, given the arguments' types.

        Raises:
            InvalidParameter: arguments that are no JSON object, or that this format has no way to write: bare text
                that holds the marker that ends it, names that would be read as something else.
        """
        known = [(name, _arguments(given)) for name, given in calls]
        for name, arguments in known:
            self._check_readable(name, arguments)
        return write_calls(self.blocks[0], known)

    def _check_readable(self, name: str, arguments: dict[str, Any]) -> None:
        if self._reads(name, arguments):
            return
        single = next((key for key, value in arguments.items() if not self._reads(name, {key: value})), None)
        if single is None or not self._reads(name, {}):
            raise InvalidParameter(
                f"{self.name} cannot write a call of {name[:80]!r} that is read as that", param="arguments"
            )
        raise InvalidParameter(
            f"{self.name} cannot write argument {single[:80]!r} of {name!r}: {_shown(arguments[single])} would be read "
            "as something else",
            hint="leave the format's own markers out of it, or use a format whose arguments are JSON",
            param="arguments",
        )

    def _reads(self, name: str, arguments: dict[str, Any]) -> bool:
        """Whether one call is read as it was written, by a parser that knows its arguments' types."""
        types = {key: {"type": type_of(value)} for key, value in arguments.items()}
        tool = Tool(name, parameters={"type": "object", "properties": types})
        message = self.parser([tool]).parse(write_calls(self.blocks[0], [(name, arguments)]))
        return not message.content and [
            (call.name, call.complete, call.complete and json.dumps(json.loads(call.arguments)))
            for call in message.calls
        ] == [(name, True, json.dumps(arguments))]

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


def _arguments(given: Mapping[str, Any] | str) -> dict[str, Any]:
    """Arguments as JSON has them."""
    try:
        text = given if isinstance(given, str) else json.dumps(given, allow_nan=False)
        value = json.loads(text, parse_constant=refuse_constant)
        json.dumps(value, allow_nan=False)  # a number may be too large for one
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidParameter(f"arguments are not JSON: {error}", param="arguments") from None
    if not isinstance(value, dict):
        raise InvalidParameter(f"arguments are a {type(value).__name__}; expected an object", param="arguments")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


_MAX_SHOWN = 80
