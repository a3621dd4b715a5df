"""Tools and calls as a model reads and writes them.

Owns the text of calls (for examples, and for turns that go back to a model whose template does not know them) and the
system text that describes tools. Called by `ToolFormat`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sgl.grammars.formats.calls import mark
from sgl.grammars.formats.shapes import Block, JsonCalls, NamedCalls, Prompt, PythonCalls, TagCalls
from sgl.grammars.formats.tools import Tool

NamedArguments = tuple[str, Mapping[str, Any]]


def write_calls(block: Block, calls: Sequence[NamedArguments]) -> str:
    """Calls as the model would write them, one after another; empty without any."""
    if not calls:
        return ""
    texts = [_call(block, index, name, arguments) for index, (name, arguments) in enumerate(calls)]
    opening, closing = brackets(block)
    if block.encloses_all:
        return f"{block.begin}{opening}{block.separator.join(texts)}{closing}{block.end}"
    return block.separator.join(f"{block.begin}{opening}{text}{closing}{block.end}" for text in texts)


def brackets(block: Block) -> tuple[str, str]:
    """What stands around the list of calls, inside the block's markers."""
    is_list = isinstance(block.body, PythonCalls) or (isinstance(block.body, JsonCalls) and block.body.is_list)
    return ("[", "]") if is_list else ("", "")


def _call(block: Block, index: int, name: str, arguments: Mapping[str, Any]) -> str:
    match block.body:
        case JsonCalls(name_key="", arguments_key=""):
            return _json({name: arguments})
        case JsonCalls(name_key=name_key, arguments_key=arguments_key):
            return _json({name_key: name, arguments_key: arguments})
        case NamedCalls() as body:
            header = body.header.format(name=name, index=index)
            return f"{body.begin}{header}{body.name_end}{_json(arguments)}{body.end}"
        case TagCalls() as body:
            values = "".join(_tag(body, key, value) for key, value in arguments.items())
            return f"{body.begin}{name}{body.name_end}{values}{body.end}"
        case PythonCalls():
            return f"{name}({', '.join(f'{key}={_python(value)}' for key, value in arguments.items())})"
    raise TypeError(f"no writer for {type(block.body).__name__}")


def _tag(body: TagCalls, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    key_end = body.key_end if is_text or not body.other_key_end else body.other_key_end
    text = value if is_text else _without(_json(value), mark(body.value_end))
    return f"{body.key_begin}{key}{key_end}{body.value_begin}{text}{body.value_end}"


def _without(text: str, marker: str) -> str:
    """JSON that says the same without a marker, which can only stand in its strings."""
    return text.replace(marker, f"\\u{ord(marker[0]):04x}{marker[1:]}")


def write_prompt(prompt: Prompt, block: Block, tools: Sequence[Tool]) -> str:
    """The system text that describes tools; empty without any."""
    if not tools:
        return ""
    listed: list[Any] = [tool.function() if prompt.tool == "function" else tool.bare() for tool in tools]
    if prompt.tool == "section":
        texts = [
            f"### {tool.name}\nDescription: {tool.description}\n\nParameters: {_json(tool.parameters)}"
            for tool in tools
        ]
    elif prompt.tool == "tagged":
        texts = [f"<tool>{_json(item)}</tool>" for item in listed]
    elif prompt.as_list:
        texts = [_json(listed, prompt.indent)]
    else:
        texts = [_json(item, prompt.indent) for item in listed]
    first = tools[0]
    example = write_calls(block, [(first.name, {key: _placeholder(key) for key in first.properties})])
    return prompt.text.replace("{example}", example).replace("{tools}", prompt.separator.join(texts))


def _placeholder(key: str) -> str:
    return f"<{key}>"


def _python(value: Any) -> str:
    """A JSON value as a Python literal, with double quotes."""
    match value:
        case dict():
            return "{" + ", ".join(f"{_json(key)}: {_python(item)}" for key, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_python, value)) + "]"
        case str():
            return _json(value)
    return repr(value)


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
