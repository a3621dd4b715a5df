"""What a constraint says, as data.

Owns the closed union `Constraint`: frozen, serializable values that travel inside the request graph. They hold text
only (a schema is canonical JSON text), so two equal constraints compile to one cached grammar. No torch, no grammar
engine: `lang` builds these, `sgl.grammars.compiler` checks and compiles them.
"""

from __future__ import annotations

import json
from typing import Any, TypeAlias

import msgspec

from sgl.errors import InvalidSchema


class Regex(msgspec.Struct, frozen=True, tag="regex"):
    """The whole output matches `pattern` (Python `re` syntax as far as it is regular; anchored at both ends)."""

    pattern: str


class JsonSchema(msgspec.Struct, frozen=True, tag="json_schema"):
    """The output is one JSON value valid under `schema` (canonical JSON text, see `canonical_schema`).

    Args:
        whitespace: `compact` allows no space outside strings; `bounded` (default) at most one blank between tokens.
    """

    schema: str
    whitespace: str = "bounded"


class Choices(msgspec.Struct, frozen=True, tag="choices"):
    """The output is one of `options`, decoded token by token (`select` scores instead)."""

    options: tuple[str, ...]


Constraint: TypeAlias = Regex | JsonSchema | Choices


def canonical_schema(schema: str | dict[str, Any] | bool) -> str:
    """A schema as canonical JSON text: no spaces, property order kept (it is the order of generation).

    Raises:
        InvalidSchema: not JSON, or neither an object nor a boolean.

    Example:
        >>> canonical_schema('{"type": "object", "properties": {"b": {}, "a": {}}}')
        '{"type":"object","properties":{"b":{},"a":{}}}'
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except json.JSONDecodeError as error:
            raise InvalidSchema(
                f"json_schema is not JSON: {error}", hint="pass a dict, or the text of a JSON object", pointer=""
            ) from None
        except RecursionError:
            raise InvalidSchema("json_schema is nested too deeply to be read", pointer="") from None
    if not isinstance(schema, (dict, bool)):
        raise InvalidSchema(f"json_schema is a {type(schema).__name__}; expected an object", pointer="")
    try:
        return json.dumps(schema, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidSchema(f"json_schema cannot be written as JSON: {error}", pointer="") from None
