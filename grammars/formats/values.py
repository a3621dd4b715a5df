"""Arguments that are written as bare text: what kind of value a schema says it is.

Owns the reading of such text as JSON, used where a format writes no JSON (`TagCalls`), and the question whether a
schema allows strings, which the lowering asks as well. Without a schema, text that is JSON is taken for JSON.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from sgl.grammars.pointers import unescaped

_TYPES = ("string", "number", "boolean", "null", "array", "object")
_PYTHON = {"True": True, "False": False, "None": None}
_MAX_REFS = 16


def allowed_types(schema: Any, root: dict[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows; `integer` counts as `number`.

    Example:
        >>> sorted(allowed_types({"anyOf": [{"type": "integer"}, {"enum": ["a"]}]}, {}))
        ['number', 'string']
    """
    return _allowed(schema, root, _MAX_REFS)


def _allowed(schema: Any, root: dict[str, Any], left: int) -> frozenset[str]:
    if not isinstance(schema, dict) or left == 0:
        return frozenset(_TYPES)
    if isinstance(ref := schema.get("$ref"), str):
        return _allowed(resolved(ref, root), root, left - 1)
    if "const" in schema:
        return frozenset([type_of(schema["const"])])
    if isinstance(options := schema.get("enum"), list):
        return frozenset(map(type_of, options))
    types = schema.get("type")
    if types is not None:
        names = [types] if isinstance(types, str) else types
        return frozenset("number" if name == "integer" else name for name in names)
    for word in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(word), list) and branches:
            return frozenset().union(*(_allowed(branch, root, left - 1) for branch in branches))
    return frozenset(_TYPES)


def resolved(ref: str, root: dict[str, Any]) -> Any:
    """What a reference within the document names; `None` when there is nothing."""
    found: Any = root
    for part in ref.removeprefix("#").split("/")[1:]:
        found = found.get(unescaped(part)) if isinstance(found, dict) else None
    return found if ref.startswith("#") else None


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def as_json(text: str, types: frozenset[str]) -> str:
    """Text as JSON of one of `types`, a string if it is no other.

    Example:
        >>> as_json("5", frozenset(["number"])), as_json("5", frozenset(["string"])), as_json("True", frozenset(_TYPES))
        ('5', '"5"', 'true')
    """
    stripped = text.strip()
    if types != frozenset(["string"]):
        value = _PYTHON.get(stripped, _MISSING)
        shown = stripped
        if value is not _MISSING:
            shown = json.dumps(value)
        else:
            try:
                value = json.loads(stripped, parse_constant=refuse_constant)
            except (ValueError, RecursionError):
                value = _MISSING
        if value is not _MISSING and type_of(value) in types:
            return shown
    return json.dumps(text, ensure_ascii=False)


_MISSING = object()


def refuse_constant(word: str) -> NoReturn:
    raise ValueError(word)  # NaN and infinity are no JSON
