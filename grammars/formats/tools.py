"""The tools that a model may call, and which of them it should.

Owns `Tool`, `ToolChoice` and the readers of everything that users give for them. Called by `ToolFormat`.

Fails with `InvalidParameter` (`param` is `tools` or `tool_choice`), and as `sgl.grammars.types` does for functions.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from sgl.errors import InvalidParameter
from sgl.grammars.spec import canonical_schema
from sgl.grammars.types import function_of

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


class Tool(msgspec.Struct, frozen=True):
    """A tool; `parameters` is the JSON schema of an object, `strict` asks that calls always obey it."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False

    @property
    def properties(self) -> dict[str, Any]:
        """The arguments' schemas by name."""
        found = self.parameters.get("properties")
        return found if isinstance(found, dict) else {}

    def function(self) -> dict[str, Any]:
        """As OpenAI's API and chat templates have it."""
        return {"type": "function", "function": self.bare()}

    def bare(self) -> dict[str, Any]:
        """Name, description and parameters."""
        return {"name": self.name, "description": self.description, "parameters": self.parameters}


class ToolChoice(NamedTuple):
    """What a request says about calling: `name` is set when one tool must be called."""

    mode: Literal["auto", "none", "required"]
    name: str | None = None


def tools_of(given: Iterable[Any]) -> tuple[Tool, ...]:
    """Tools from functions, dicts in OpenAI's form or with `name` and `parameters`, or objects with these fields.

    Raises:
        InvalidParameter: none of these, a name that is no identifier, or the same name twice.
        UnsupportedSchema: a function with a parameter that has no JSON form.

    Example:
        >>> def add(a: int, b: int) -> int:
        ...     "Add two numbers."
        ...     return a + b
        >>> tools_of([add])[0].name
        'add'
    """
    tools = tuple(_tool(item, index) for index, item in enumerate(given))
    if len(tools) > MAX_TOOLS:
        raise InvalidParameter(f"{len(tools)} tools; at most {MAX_TOOLS} are allowed", param="tools")
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise InvalidParameter(f"two tools are named {name!r}", hint="rename one", param="tools")
    return tools


def _tool(item: Any, index: int) -> Tool:
    if isinstance(item, Tool):
        return item
    if inspect.isroutine(item):
        return Tool(**function_of(item))
    if isinstance(item, Mapping):
        fields = item.get("function", item)
    else:
        fields = {name: getattr(item, name, None) for name in ("name", "description", "parameters", "strict")}
    if not isinstance(fields, Mapping) or not isinstance(fields.get("name"), str):
        raise InvalidParameter(
            f"tools[{index}] has no name",
            hint='give {"type": "function", "function": {"name": ..., "parameters": ...}}, or in Python a function',
            param="tools",
        )
    name = str(fields["name"])
    if not _NAME.fullmatch(name):
        raise InvalidParameter(
            f"tools[{index}] is named {name[:80]!r}; expected at most 64 letters, digits, '_', '-' and '.'",
            param="tools",
        )
    parameters = fields.get("parameters")
    if parameters is None or parameters == {}:
        parameters = {"type": "object", "properties": {}}
    schema = None if isinstance(parameters, list) else json.loads(canonical_schema(parameters))
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise InvalidParameter(
            f"the parameters of tool {name!r} are no JSON schema of an object",
            hint='give {"type": "object", "properties": {...}}',
            param="tools",
        )
    schema.setdefault("type", "object")
    return Tool(name, str(fields.get("description") or ""), schema, bool(fields.get("strict")))


def allowed_of(given: Any, tools: tuple[Tool, ...]) -> tuple[Any, tuple[Tool, ...]]:
    """A tool choice with the tools that it leaves: OpenAI's `allowed_tools` names some of those there are.

    Raises:
        InvalidParameter: a mode, or a tool, that there is not.

    Example:
        >>> named = {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}
        >>> mode, tools = allowed_of({"type": "allowed_tools", "allowed_tools": named}, (Tool("f"), Tool("g")))
        >>> mode, [tool.name for tool in tools]
        ('required', ['f'])
    """
    if not isinstance(given, Mapping) or given.get("type") != "allowed_tools":
        return given, tools
    allowed = given.get("allowed_tools")
    mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
    named = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(named, list) or not named:
        raise InvalidParameter(
            "tool_choice of type allowed_tools has no mode auto or required, or no tools",
            hint='give {"mode": "auto", "tools": [{"type": "function", "function": {"name": ...}}]}',
            param="tool_choice",
        )
    names = {choice_of(each if isinstance(each, Mapping) else {}, tools).name for each in named}
    return mode, tuple(tool for tool in tools if tool.name in names)


def choice_of(given: Any, tools: tuple[Tool, ...]) -> ToolChoice:
    """A tool choice from `auto`, `none`, `required`, or a tool's name as OpenAI's API writes it.

    Raises:
        InvalidParameter: none of these, an unknown tool, or no tools at all where one must be called.

    Example:
        >>> choice_of({"type": "function", "function": {"name": "f"}}, (Tool("f"),))
        ToolChoice(mode='required', name='f')
    """
    if isinstance(given, ToolChoice):
        given = {"name": given.name} if given.name is not None else given.mode
    if given is None:
        given = "auto" if tools else "none"
    name: Any = None
    if isinstance(given, Mapping):
        name = given.get("function", given)
        name = name.get("name") if isinstance(name, Mapping) else None
        name = name if isinstance(name, str) else None
    if name is None and given not in ("auto", "none", "required"):
        raise InvalidParameter(
            f"tool_choice is {given!r}; expected 'auto', 'none', 'required' or "
            f'{{"type": "function", "function": {{"name": ...}}}} {_among(tools)}',
            param="tool_choice",
        )
    if name is not None and name not in {tool.name for tool in tools}:
        raise InvalidParameter(
            f"tool_choice names {name!r}; expected one {_among(tools)}", hint="add it to tools", param="tool_choice"
        )
    if given == "required" and not tools:
        raise InvalidParameter("tool_choice is 'required' and there are no tools", param="tool_choice")
    return ToolChoice("required", name) if name is not None else ToolChoice(given)


def _among(tools: tuple[Tool, ...]) -> str:
    """The tools there are, in words."""
    if not tools:
        return "of the tools, of which none are given"
    shown = ", ".join(repr(tool.name) for tool in tools[:_MAX_SHOWN])
    return f"of the tools {shown}{', ...' if len(tools) > _MAX_SHOWN else ''}"


_MAX_SHOWN = 16
