"""How a family of models writes tool calls and reasoning, as data.

Owns the closed set of descriptions. Three interpreters read them: `calls.py` and `parser.py` (text to events),
`writer.py` (calls to text, tools to a prompt) and `lowering.py` (tools to a constraint). A new format is a new
description in `catalog.py`; a new kind of body is a struct here and a case in each of the three.

Texts are given as models write them, white space included; readers take any white space at the ends of a marker.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class JsonCalls(msgspec.Struct, frozen=True, tag="json"):
    """A call is a JSON object, with its name and its arguments under keys; `{name: arguments}` when there are none.

    Readers take one object, several, or a list; writers write a list when `is_list`.
    """

    name_key: str = "name"
    arguments_key: str = "arguments"
    is_list: bool = False


class NamedCalls(msgspec.Struct, frozen=True, tag="named"):
    """`begin`, the name as `header` has it, `name_end`, the arguments as a JSON object, `end`.

    Args:
        header: with `{name}`, and `{index}` where calls are numbered.
        name_mark: what ends the header for readers, where writers may put something before it.
    """

    name_end: str
    begin: str = ""
    end: str = ""
    header: str = "{name}"
    name_mark: str = ""


class TagCalls(msgspec.Struct, frozen=True, tag="tags"):
    """`begin`, the name, `name_end`; for each argument `key_begin`, its key, `key_end`, its value, `value_end`; `end`.

    Strings are written as they are, everything else as JSON. One line end around a value is not part of it, where
    the format writes one.

    Args:
        other_key_end: ends the key of a value that is not a string, where that is told; `key_end` ends the others then.
        value_begin: comes between `key_end` and the value.
    """

    name_end: str
    key_begin: str
    key_end: str
    value_end: str
    begin: str = ""
    end: str = ""
    other_key_end: str = ""
    value_begin: str = ""


class PythonCalls(msgspec.Struct, frozen=True, tag="python"):
    """A list of calls in Python, with literals as keyword arguments: `[f(a=1), g(b="x")]`."""


Body: TypeAlias = JsonCalls | NamedCalls | TagCalls | PythonCalls


class Block(msgspec.Struct, frozen=True):
    """Where calls stand in the text.

    Args:
        begin, end: around them. Without `begin` the calls begin by themselves: a JSON object or list at the beginning
            of a line, a Python list after white space.
        also: other beginnings that readers take.
        separator: between calls.
        encloses_all: `begin` and `end` stand around all calls of a message, not around each.
        end_is_eos: `end` is an end-of-sequence token, which no constraint names and which readers may never see.
    """

    body: Body
    begin: str = ""
    end: str = ""
    also: tuple[str, ...] = ()
    separator: str = ""
    encloses_all: bool = False
    end_is_eos: bool = False


class Prompt(msgspec.Struct, frozen=True):
    """The system text that tells a model of tools, for chat templates that do not.

    Args:
        text: with `{tools}` and `{example}` (a call as the format writes it).
        tool: `function` lists tools as OpenAI's API does, `bare` by name, description and parameters.
        indent: of the tools' JSON; `None` is one line.
        separator: between tools. `as_list` makes one JSON list of them instead.
        result: how the result of a call is written, with `{name}` and `{content}`.
    """

    text: str
    tool: str = "function"
    indent: int | None = None
    separator: str = "\n"
    as_list: bool = False
    result: str = "<tool_response>\n{content}\n</tool_response>"


class ReasoningFormat(msgspec.Struct, frozen=True):
    """Where reasoning stands in the text.

    Args:
        name: as users give it.
        origin: where it is documented.
        begin, end: the markers. Readers take all, constraints the pair that the model's template has, else the first.
        starts_inside: the output begins with reasoning even when no marker says so (the prompt has written it).
        calls_end_it: a tool call may begin within the reasoning, which ends there.
        silent: markers that mean nothing by themselves and are no content.
        excludes: tokens that must not come while the model reasons under a constraint.
        switch: variable of the chat template that turns reasoning on and off.
        clues: texts of which one list is complete in the chat templates of such models.
    """

    name: str
    origin: str
    begin: tuple[str, ...]
    end: tuple[str, ...]
    starts_inside: bool = False
    calls_end_it: bool = False
    silent: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    switch: str = ""
    clues: tuple[tuple[str, ...], ...] = ()
    aliases: tuple[str, ...] = ()
