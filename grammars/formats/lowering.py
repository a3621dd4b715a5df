"""Tools and a choice among them as a structural tag.

Owns the way from a description and the tools' schemas to the data that `sgl.grammars.structural_tag` reads. Called by
`ToolFormat.constraint`. What it lets a model write is what `write_calls` writes, so that the parser reads every text
back; tests hold both ends. Nothing is compiled here.

Where a format writes JSON, arguments are constrained by their schema as it is. Where it writes bare text (`TagCalls`),
strings are free text without the marker that ends them, of which a `pattern` or lengths are enforced, and everything
else is JSON. Python's arguments are JSON values too, which Python reads alike, but `True`, `False` and `None`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sgl.errors import UnsupportedSchema
from sgl.grammars.formats.calls import mark, reads_key
from sgl.grammars.formats.shapes import Block, Body, JsonCalls, NamedCalls, PythonCalls, TagCalls
from sgl.grammars.formats.tools import Tool
from sgl.grammars.formats.values import allowed_types, as_json, resolved
from sgl.grammars.formats.writer import brackets
from sgl.grammars.pointers import escaped

Format = dict[str, Any]
_TEXT = frozenset(["string"])
_OBJECT_WORDS = frozenset(
    [
        "minProperties",
        "maxProperties",
        "patternProperties",
        "propertyNames",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "if",
        "then",
        "else",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "enum",
        "const",
        "$ref",
    ]
)
"""What bounds an object as a whole, which nothing enforces where each argument is written by itself."""
_ANNOTATIONS = frozenset(["type", "title", "description", "default", "examples", "deprecated"])


def calls_format(block: Block, tools: Sequence[Tool], *, parallel: bool, strict: bool | None) -> Format:
    """Calls of the tools and nothing else: one, or with `parallel` one or more. `strict`: `None` asks each tool."""
    tags = [_call(block.body, tool, strict=tool.strict if strict is None else strict) for tool in tools]
    opening, closing = block.begin + brackets(block)[0], brackets(block)[1] + ("" if block.end_is_eos else block.end)
    if block.encloses_all:
        return _tag(opening, _several(tags, block.separator, parallel=parallel), closing)
    around = [_tag(opening + tag["begin"], tag["content"], tag["end"] + closing) for tag in tags]
    return _several(around, block.separator, parallel=parallel)


def triggered_format(block: Block, tools: Sequence[Tool], *, parallel: bool, strict: bool | None) -> Format:
    """Free text in which the block's beginning begins calls of the tools."""
    calls = calls_format(block, tools, parallel=parallel, strict=strict)
    tags = [calls] if block.encloses_all else calls["tags"]
    return {
        "type": "triggered_tags",
        "triggers": [mark(block.begin)],
        "tags": tags,
        "stop_after_first": not parallel,
    }


def text_format(excludes: Sequence[str] = ()) -> Format:
    """Free text without some texts."""
    return {"type": "any_text", **({"excludes": list(excludes)} if excludes else {})}


def _several(tags: list[Format], separator: str, *, parallel: bool) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _call(body: Body, tool: Tool, *, strict: bool) -> Format:
    _check_arguments(body, tool, strict=strict)
    schema = _closed(tool.parameters) if strict else {"type": "object"}
    match body:
        case JsonCalls(name_key=""):
            return _tag(f'{{"{tool.name}": ', _json(schema), "}")
        case JsonCalls(name_key=name_key, arguments_key=arguments_key):
            return _tag(f'{{"{name_key}": "{tool.name}", "{arguments_key}": ', _json(schema), "}")
        case NamedCalls():
            before, number, after = body.header.format(name=tool.name, index="\0").partition("\0")
            name_end = after + body.name_end
            if number:
                digits = {"type": "regex", "pattern": "[0-9]{1,3}"}
                return _tag(body.begin + before, _sequence(digits, _const(name_end), _json(schema)), body.end)
            return _tag(body.begin + before + name_end, _json(schema), body.end)
        case TagCalls():
            return _tag(body.begin + tool.name + body.name_end, _tags(body, tool, strict=strict), body.end)
        case PythonCalls():
            return _tag(f"{tool.name}(", _python_arguments(tool), ")")
    raise TypeError(f"no lowering for {type(body).__name__}")


def _check_arguments(body: Body, tool: Tool, *, strict: bool) -> None:
    """What keeps a format that writes arguments one by one from writing those of a tool.

    Raises:
        UnsupportedSchema: a name that would be read as something else, a required argument without a schema, or a
            keyword of all arguments together, where they must obey.
    """
    if not isinstance(body, TagCalls | PythonCalls):
        return
    for key in tool.properties:
        if not reads_key(body, key):
            raise UnsupportedSchema(
                f"argument {key[:80]!r} of tool {tool.name!r} has a name that this format cannot write",
                hint="rename it to letters, digits and '_', or use a format whose arguments are JSON",
                pointer=f"/parameters/properties/{escaped(key)}",
            )
    for key in tool.parameters.get("required", ()):
        if key not in tool.properties:
            raise UnsupportedSchema(
                f"argument {key!r} of tool {tool.name!r} is required and has no schema, which this format needs",
                hint="add it to properties",
                pointer="/parameters/required",
            )
    word = min(_OBJECT_WORDS & frozenset(tool.parameters), default=None) if strict else None
    if word is not None:
        raise UnsupportedSchema(
            f"{word!r} of the parameters of tool {tool.name!r} cannot be enforced by a format that writes each "
            "argument by itself",
            hint="use 'properties' and 'required', or a format whose arguments are JSON",
            pointer=f"/parameters/{escaped(word)}",
        )


# --- arguments in tags ---


def _tags(body: TagCalls, tool: Tool, *, strict: bool) -> Format:
    """The arguments in the schema's order; without `strict` any of them in any order."""
    required = tool.parameters.get("required", ())
    tags = {key: _argument(body, tool, key, strict=strict) for key in tool.properties}
    if not tags:
        return _const("")
    if not strict:
        return {"type": "star", "content": _one_of(list(tags.values()))}
    return _sequence(*(tag if key in required else _optional(tag) for key, tag in tags.items()))


def _argument(body: TagCalls, tool: Tool, key: str, *, strict: bool) -> Format:
    schema = tool.properties[key]
    types = allowed_types(schema, tool.parameters)
    begin = f"{body.key_begin}{key}{body.key_end}{body.value_begin}"
    text = _tag(begin, _text(body, tool, key, strict=strict), body.value_end) if "string" in types else None
    if body.other_key_end:
        begin = f"{body.key_begin}{key}{body.other_key_end}{body.value_begin}"
    elif text is not None:  # text that is JSON of another type that is allowed is read as that
        return text
    other = None if types == _TEXT else _tag(begin, _json(_with_definitions(schema, tool)), body.value_end)
    return _one_of([option for option in (text, other) if option is not None])


def _text(body: TagCalls, tool: Tool, key: str, *, strict: bool) -> Format:
    """A string without quotes, within what its schema says of strings."""
    schema = tool.properties[key]
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        schema = resolved(schema["$ref"], tool.parameters)
    anything = text_format([mark(body.value_end)])
    if not isinstance(schema, dict):
        return anything
    options = [schema["const"]] if "const" in schema else schema.get("enum")
    if options is not None:
        texts = [option for option in options if isinstance(option, str)]
        unreadable = next((text for text in texts if not _is_readable(body, tool, key, text)), None)
        if unreadable is None:
            return _one_of([_const(text) for text in texts])
        if not strict:
            return anything
        raise UnsupportedSchema(
            f"the value {unreadable[:80]!r} of argument {key!r} of tool {tool.name!r} would be read as something else, "
            "since this format writes it without quotes",
            hint="leave it out, or use a format whose arguments are JSON",
            pointer=f"/parameters/properties/{escaped(key)}",
        )
    bounds = _bounds(schema)
    if not bounds or not strict:
        return anything
    if allowed_types(schema, tool.parameters) == _TEXT:
        if bounds == {"pattern"}:
            return _regex(_whole(str(schema["pattern"])), body)
        if bounds <= {"minLength", "maxLength"}:
            least, most = schema.get("minLength", 0), schema.get("maxLength", "")
            return _regex(f"(?s:.{{{least},{most}}})", body)
    word = min(bounds - {"pattern"}, default="pattern")
    raise UnsupportedSchema(
        f"{word!r} of argument {key!r} of tool {tool.name!r} cannot be enforced where arguments are bare text",
        hint="use 'enum', 'pattern', or 'minLength' and 'maxLength', on a string alone, or check it in the tool",
        pointer=f"/parameters/properties/{escaped(key)}",
    )


def _is_readable(body: TagCalls, tool: Tool, key: str, text: str) -> bool:
    """Whether a text is read as that, and not as JSON of another type or as the end of itself."""
    types = _TEXT if body.other_key_end else allowed_types(tool.properties[key], tool.parameters)
    return mark(body.value_end) not in text and bool(json.loads(as_json(text, types)) == text)


def _regex(pattern: str, body: TagCalls) -> Format:
    """A text without the marker that would end it."""
    return {"type": "regex", "pattern": pattern, "excludes": [mark(body.value_end)]}


def _bounds(schema: Any) -> frozenset[str]:
    """The keywords that bound what text may be; those of a union's branches count, too."""
    if not isinstance(schema, dict):
        return frozenset()
    branches = [branch for word in ("anyOf", "oneOf") for branch in schema.get(word, ())]
    own = frozenset(schema) - _ANNOTATIONS - {"anyOf", "oneOf"}
    return own.union(*(_bounds(branch) for branch in branches))


def _whole(pattern: str) -> str:
    """A pattern that is searched for, as one of the whole text."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    bare = pattern[begins : len(pattern) - ends]
    return f"{'' if begins else '(?s:.*)'}(?:{bare}){'' if ends else '(?s:.*)'}"


# --- arguments in Python ---


def _python_arguments(tool: Tool) -> Format:
    """Keyword arguments: required ones first, each group in the schema's order."""
    required = [key for key in tool.properties if key in tool.parameters.get("required", ())]
    others = [key for key in tool.properties if key not in required]
    arguments = {key: (_const(f"{key}="), _python_value(tool, key)) for key in tool.properties}

    def after_some(keys: Sequence[str]) -> list[Format]:
        return [_optional(_sequence(_const(", "), *arguments[key])) for key in keys]

    if not required:
        first = [_sequence(*arguments[key], *after_some(others[index + 1 :])) for index, key in enumerate(others)]
        return _optional(_one_of(first)) if first else _const("")
    parts = [part for key in required for part in (_const(", "), *arguments[key])]
    return _sequence(*parts[1:], *after_some(others))


def _python_value(tool: Tool, key: str) -> Format:
    types = allowed_types(tool.properties[key], tool.parameters)
    if types == {"boolean"}:
        return _one_of([_const("True"), _const("False")])
    return _const("None") if types == {"null"} else _json(_with_definitions(tool.properties[key], tool))


# --- parts ---


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The arguments' schema without properties that it does not name: a tool cannot take them."""
    return schema if "additionalProperties" in schema else {**schema, "additionalProperties": False}


def _with_definitions(schema: Any, tool: Tool) -> Any:
    """An argument's schema with what it may refer to."""
    definitions = {word: tool.parameters[word] for word in ("$defs", "definitions") if word in tool.parameters}
    return {**schema, **definitions} if definitions and isinstance(schema, dict) else schema


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _json(schema: Any) -> Format:
    return {"type": "json_schema", "json_schema": schema}


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _sequence(*elements: Format) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}


def _one_of(elements: list[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _optional(content: Format) -> Format:
    return {"type": "optional", "content": content}
