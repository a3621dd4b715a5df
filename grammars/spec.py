"""What a constraint says, as data.

Owns the closed union `Constraint`: frozen, serializable values that travel inside the request graph. They hold text
only (a schema is canonical JSON text), so two equal constraints compile to one cached grammar. No torch, no grammar
engine: `lang` builds these, `sgl.grammars.compiler` checks and compiles them.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec

from sgl.errors import InvalidGrammar, InvalidParameter, InvalidRegex, InvalidSchema, SglError


class Regex(msgspec.Struct, frozen=True, tag="regex"):
    """The whole output matches `pattern` (Python `re` syntax as far as it is regular; anchored at both ends)."""

    pattern: str


class JsonSchema(msgspec.Struct, frozen=True, tag="json_schema"):
    """The output is one JSON value valid under `schema` (canonical JSON text, see `canonical_schema`).

    Args:
        whitespace: `compact` allows no space outside strings; `bounded` (default) at most one blank between tokens.
        max_number_len: characters of one number, unless the schema itself asks for a longer one. With `multipleOf` a
            number goes on to the first place where it may end.
        unsupported: what happens to keywords that the backend does not enforce: `refuse` (default) the schema, or
            `check` the value after decoding, which then may fail.
    """

    schema: str
    whitespace: str = "bounded"
    max_number_len: int = 32
    unsupported: str = "refuse"


class Choices(msgspec.Struct, frozen=True, tag="choices"):
    """The output is one of `options`, decoded token by token (`select` scores instead)."""

    options: tuple[str, ...]


class Ebnf(msgspec.Struct, frozen=True, tag="ebnf"):
    """The whole output is a text of `grammar`, in EBNF as GBNF writes it; it starts at the rule `root`."""

    grammar: str


class Lark(msgspec.Struct, frozen=True, tag="lark"):
    """The whole output is a text of `grammar`, in llguidance's dialect of Lark; it starts at the rule `start`."""

    grammar: str


class StructuralTag(msgspec.Struct, frozen=True, tag="structural_tag"):
    """Free text with constrained parts; `tag` is the JSON text of either form (see `sgl.grammars.structural_tag`)."""

    tag: str
    whitespace: str = "bounded"


Constraint: TypeAlias = Regex | JsonSchema | Choices | Ebnf | Lark | StructuralTag


PARAMETERS = ("regex", "json_schema", "ebnf", "lark", "structural_tag")
"""The names under which a request gives a constraint; at most one of them is set."""
OPTIONS = ("unsupported",)
"""The names of what a request may say about its constraint: `unsupported` goes with `json_schema`."""


def constraint_of(given: Mapping[str, Any]) -> Constraint | None:
    """The constraint that a request's parameters name (see `PARAMETERS` and `OPTIONS`); others are not looked at.

    `json_schema` is text, a dict, or a Python type; `structural_tag` is text or a dict; the others are text.

    Raises:
        InvalidParameter: two of them, or an option that is unknown or goes with another constraint.
        InvalidConstraint: what cannot be read. Content is checked by `sgl.grammars.compiler`.

    Example:
        >>> constraint_of({"regex": "a+", "ebnf": None})
        Regex(pattern='a+')
        >>> constraint_of({"json_schema": list[int]}).schema
        '{"type":"array","items":{"type":"integer"}}'
    """
    names = [name for name in PARAMETERS if given.get(name) is not None]
    unsupported = _unsupported(given.get("unsupported"), names)
    if not names:
        return None
    if len(names) > 1:
        raise InvalidParameter(f"{names[0]} and {names[1]} are both given; one must go", param=names[1])
    name, value = names[0], given[names[0]]
    if name == "json_schema":
        if not isinstance(value, (str, dict, bool)):
            from sgl.grammars.types import schema_of

            value = schema_of(value)
        return JsonSchema(canonical_schema(value), unsupported=unsupported)
    if name == "structural_tag":
        return structural_tag(value)
    kinds: dict[str, Callable[[str], Constraint]] = {"regex": Regex, "ebnf": Ebnf, "lark": Lark}
    if not isinstance(value, str):
        kind = InvalidRegex if name == "regex" else InvalidGrammar
        raise kind(f"{name} is {value!r}; expected a string", param=name)
    if name == "regex":
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python's remarks are about its own future
                re.compile(value)
        except re.error as error:
            raise InvalidRegex(f"regex {value!r} cannot be compiled: {error}", param=name) from None
        except RecursionError:
            raise InvalidRegex(f"regex {value[:40]!r}... is nested too deeply to be read", param=name) from None
    return kinds[name](str(value))


def _unsupported(given: Any, names: list[str]) -> str:
    if given is None:
        return "refuse"
    if given not in ("refuse", "check"):
        raise InvalidParameter(f"unsupported is {given!r}; expected 'refuse' or 'check'", param="unsupported")
    if names != ["json_schema"]:
        raise InvalidParameter(
            "unsupported is given without json_schema",
            hint="it says what to do with a schema's keywords",
            param="unsupported",
        )
    return str(given)


def structural_tag(tag: str | dict[str, Any]) -> StructuralTag:
    """A structural tag from JSON text or a dict, as canonical text.

    Raises:
        InvalidGrammar: not JSON, or no object.

    Example:
        >>> structural_tag({"type": "structural_tag", "format": {"type": "any_text"}}).tag
        '{"type":"structural_tag","format":{"type":"any_text"}}'
    """
    return StructuralTag(_canonical(tag, "structural_tag", (dict,), "an object", InvalidGrammar))


def canonical_schema(schema: str | dict[str, Any] | bool) -> str:
    """A schema as canonical JSON text: no spaces, property order kept (it is the order of generation).

    Raises:
        InvalidSchema: not JSON, or neither an object nor a boolean.

    Example:
        >>> canonical_schema('{"type": "object", "properties": {"b": {}, "a": {}}}')
        '{"type":"object","properties":{"b":{},"a":{}}}'
    """
    return _canonical(schema, "json_schema", (dict, bool), "an object", InvalidSchema)


def _canonical(value: Any, name: str, kinds: tuple[type, ...], expected: str, error_type: type[SglError]) -> str:
    """JSON text, or a value, as JSON text without spaces."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise error_type(
                f"{name} is not JSON: {error}", hint="give a JSON object, or its text", pointer=""
            ) from None
        except RecursionError:
            raise error_type(f"{name} is nested too deeply to be read", pointer="") from None
    if not isinstance(value, kinds):
        raise error_type(f"{name} is a {type(value).__name__}; expected {expected}", pointer="")
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise error_type(f"{name} cannot be written as JSON: {error}", pointer="") from None
