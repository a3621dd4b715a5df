"""The walker that refuses what of a JSON schema a backend would not enforce.

Reads the backend's table of keywords (`keyword_tables.py`). Called by `sgl.grammars.compiler` before any backend sees a
schema. A keyword that a backend would silently ignore never passes: the caller would believe in a constraint that
nothing enforces. No grammar engine and no torch are imported. The semantics are those of draft 2020-12.

What depends on values (whether a `oneOf` is provably exclusive, whether merged schemas can be satisfied) is left to the
backend, which refuses it at compilation.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NoReturn, TypeAlias
from urllib.parse import unquote

from sgl.errors import ConstraintTooComplex, InvalidConstraint, InvalidRegex, InvalidSchema, UnsupportedSchema
from sgl.grammars.keyword_tables import FORMATS, TABLES, Kind, Support
from sgl.grammars.pointers import escaped, pointer_of, steps_of
from sgl.grammars.regex import Dialect, translate
from sgl.limits import DEFAULT_LIMITS, Limits

Schema: TypeAlias = dict[str, Any] | bool

_UNCHECKED = frozenset(
    [
        *("dependencies", "additionalItems", "contentEncoding", "contentMediaType", "contentSchema", "nullable", "id"),
        *("$recursiveRef", "$recursiveAnchor", "$vocabulary", "x-guidance"),
    ]
)
"""Refused words that a validator of draft 2020-12 does not look at either."""

_DECIDING = ("$ref", "const", "enum", "anyOf")
_TYPES_OF = {
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), ("string",)),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), ("integer", "number")),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems"), ("array",)),
    **dict.fromkeys(("properties", "required", "additionalProperties"), ("object",)),
}
TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_LARGEST = 2**53
_BOUND_WORDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
CHECK_HINT = "or give unsupported='check', which checks the finished value instead"


def check_schema(
    schema_text: str, backend: str = "llguidance", limits: Limits = DEFAULT_LIMITS, *, checkable: bool = True
) -> None:
    """Check that `backend` would enforce everything that the schema says.

    Args:
        schema_text: canonical JSON text, see `sgl.grammars.spec.canonical_schema`.
        backend: a key of `TABLES`.
        checkable: the caller could have values checked afterwards instead, which refusals then say.

    Raises:
        ConstraintTooComplex: larger than `max_schema_bytes` or deeper than `max_json_depth`.
        InvalidSchema: not JSON, a value of the wrong kind, a reference that leads nowhere; `pointer` says where.
        UnsupportedSchema: a keyword that `backend` would not enforce; `pointer` says where.

    Example:
        >>> check_schema('{"type": "array", "items": {"type": "integer"}}')
        >>> try:
        ...     check_schema('{"properties": {"a": {"uniqueItems": true}}}')
        ... except UnsupportedSchema as error:
        ...     print(error.pointer)
        /properties/a/uniqueItems
    """
    if backend not in TABLES:
        raise InvalidConstraint(f"no keyword table for backend {backend!r}", hint=f"known: {', '.join(sorted(TABLES))}")
    _Check(parse_schema(schema_text, limits), backend, limits, checkable=checkable).run()


def unenforced(schema_text: str, backend: str = "llguidance", limits: Limits = DEFAULT_LIMITS) -> list[str]:
    """JSON pointers to what `backend` would not enforce and a validator would; what is inside another comes before it.

    Raises:
        InvalidSchema, ConstraintTooComplex: as `check_schema`.
        UnsupportedSchema: what no validator of draft 2020-12 looks at either, or what would have to be fetched.

    Example:
        >>> unenforced('{"type": "array", "items": {"not": {"type": "null"}}, "uniqueItems": true}')
        ['/uniqueItems', '/items/not']
    """
    check = _Check(parse_schema(schema_text, limits), backend, limits, found=[])
    check.run()
    return sorted(set(check.found or ()), reverse=True)


def parse_schema(schema_text: str, limits: Limits = DEFAULT_LIMITS) -> Schema:
    """The schema as a value, within the limits of size and depth.

    Raises:
        ConstraintTooComplex, InvalidSchema: as `check_schema`.
    """
    size = len(schema_text.encode("utf-8", "surrogatepass"))
    if size > limits.max_schema_bytes:
        raise ConstraintTooComplex(
            f"the JSON schema has {size} bytes; at most {limits.max_schema_bytes} are allowed",
            hint="move parts of it into separate generations",
            pointer="",
        )
    try:
        schema = json.loads(schema_text, parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep(limits) from None
    except ValueError as error:
        raise InvalidSchema(f"the JSON schema is not JSON: {error}", hint="mend the text", pointer="") from None
    if is_deeper(schema, limits.max_json_depth):
        raise _too_deep(limits)
    if not isinstance(schema, (dict, bool)):
        raise InvalidSchema(f"the JSON schema is {_shown(schema)}; expected an object or a boolean", pointer="")
    return schema


def subschemas(schema: Schema, pointer: str = "", backend: str = "llguidance") -> Iterator[tuple[str, Schema]]:
    """(JSON pointer, schema) of a schema and all within it, outermost first.

    Example:
        >>> [pointer for pointer, _ in subschemas({"properties": {"a/b": {"items": True}}})]
        ['', '/properties/a~1b', '/properties/a~1b/items']
    """
    yield pointer, schema
    if isinstance(schema, bool):
        return
    for word, value in schema.items():
        for step, child in _children(word, value, backend):
            yield from subschemas(child, pointer + step, backend)


def _children(word: str, value: Any, backend: str) -> Iterator[tuple[str, Schema]]:
    """(pointer step, schema) of what a keyword's value holds; values of the wrong kind hold nothing."""
    kind = TABLES[backend][word].kind if word in TABLES[backend] else Kind.ANYTHING
    held: list[tuple[str, Any]] = []
    if kind is Kind.SCHEMA:
        held = [("", value)]
    elif kind is Kind.SCHEMAS and isinstance(value, list):
        held = [(f"/{index}", child) for index, child in enumerate(value)]
    elif kind is Kind.SCHEMA_MAP and isinstance(value, dict):
        held = [(f"/{escaped(name)}", child) for name, child in value.items()]
    for step, child in held:
        if isinstance(child, (dict, bool)):
            yield f"/{escaped(word)}{step}", child


class _Check:
    """One walk over one schema; `run` raises at the first fault. With `found`, pointers to what a validator can check
    instead are put there and do not count as faults."""

    def __init__(
        self,
        schema: Schema,
        backend: str,
        limits: Limits,
        found: list[str] | None = None,
        *,
        checkable: bool = True,
    ) -> None:
        self.checkable = checkable
        self.schema = schema
        self.found = found
        self.backend = backend
        self.table = TABLES[backend]
        self.limits = limits
        self.places = dict(subschemas(schema, "", backend))
        self.anchors = {
            found["$anchor"]: pointer
            for pointer, found in self.places.items()
            if isinstance(found, dict) and isinstance(found.get("$anchor"), str)
        }

    def run(self) -> None:
        if self.schema is False:
            raise InvalidSchema("the JSON schema is false, which no value satisfies", hint="use {} for any", pointer="")
        for pointer, schema in self.places.items():
            if isinstance(schema, dict):
                for word, value in schema.items():
                    self.keyword(f"{pointer}/{escaped(word)}", word, value, schema)
                if self.backend == "xgrammar":
                    self.combination(pointer, schema)
                    self.six_decimals(pointer, schema)
                    self.names(pointer, schema)
                else:
                    self.beside_zero(pointer, schema)
        ends: set[str] = set()  # places whose references are known to come to an end
        for pointer, schema in self.places.items():
            self.reference_chain(pointer, schema, ends)

    def keyword(self, pointer: str, word: str, value: Any, schema: dict[str, Any]) -> None:
        row = self.table.get(word)
        if row is None:
            if word.startswith("x-"):
                return
            near = difflib.get_close_matches(word, self.table, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "remove it; names of properties stand inside 'properties'"
            raise UnsupportedSchema(
                f"{word!r} at {pointer} is no known JSON schema keyword", hint=hint, pointer=pointer
            )
        if row.support is Support.REFUSED:
            if is_vacuous(word, value, schema):
                return
            message = f"{word!r} at {pointer} is not enforced by {self.backend}: {row.reason}"
            self.refuse(pointer, message, row.hint, checkable=word not in _UNCHECKED)
            return
        self.value(pointer, row.kind, value)
        if row.kind in (Kind.COUNT, Kind.NUMBER, Kind.POSITIVE):
            self.size(pointer, value, pointer)
        if row.support is Support.ANNOTATION:
            self.annotation(pointer, word)
        elif word == "$ref":
            self.resolve(pointer, value)
        elif word == "format" and value not in FORMATS[self.backend]:
            message = f"format {value!r} at {pointer} is not enforced by {self.backend}"
            hint = f"use pattern or numeric bounds, or one of {', '.join(sorted(FORMATS[self.backend]))}"
            self.refuse(pointer, message, hint)
        elif word in ("const", "enum"):
            self.numbers(pointer, value, pointer)
        elif word == "pattern":
            self.pattern(pointer, value)
        elif word == "patternProperties":
            for name in value:
                self.pattern(f"{pointer}/{escaped(name)}", name)
        elif word == "minProperties":
            self.min_properties(pointer, value, schema)

    def annotation(self, pointer: str, word: str) -> None:
        if word == "$id" and pointer != "/$id":
            raise UnsupportedSchema(
                f"'$id' at {pointer} opens a new base address, which is not followed",
                hint="keep $id at the root, and refer by '#/$defs/name'",
                pointer=pointer,
            )

    def value(self, pointer: str, kind: Kind, value: Any) -> None:
        """Refuse a value of the wrong kind."""
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        right = {
            Kind.SCHEMA: isinstance(value, (dict, bool)),
            Kind.SCHEMAS: isinstance(value, list) and bool(value) and all(isinstance(v, (dict, bool)) for v in value),
            Kind.SCHEMA_MAP: isinstance(value, dict) and all(isinstance(v, (dict, bool)) for v in value.values()),
            Kind.COUNT: number and value >= 0 and (isinstance(value, int) or value.is_integer()),
            Kind.NUMBER: number,
            Kind.POSITIVE: number and value > 0,
            Kind.BOOLEAN: isinstance(value, bool),
            Kind.STRING: isinstance(value, str),
            Kind.STRINGS: isinstance(value, list) and all(isinstance(v, str) for v in value),
            Kind.TYPE: value in TYPES
            if isinstance(value, str)
            else isinstance(value, list) and bool(value) and all(v in TYPES for v in value),
            Kind.VALUES: isinstance(value, list) and bool(value),
            Kind.ANYTHING: True,
        }[kind]
        if right:
            return
        wanted = f"{kind.value}: {', '.join(TYPES)}" if kind is Kind.TYPE else kind.value
        if pointer.endswith("/items") and isinstance(value, list):
            raise UnsupportedSchema(
                f"'items' at {pointer} is a list, the form before draft 2020-12",
                hint="use prefixItems",
                pointer=pointer,
            )
        raise InvalidSchema(f"{pointer} is {_shown(value)}; expected {wanted}", hint="mend its value", pointer=pointer)

    def size(self, pointer: str, value: float, keyword: str) -> None:
        """Refuse a number that a backend would take for another one, or cannot read; it belongs to `keyword`."""
        if abs(value) > _LARGEST:
            message = f"{pointer} is {_shown(value)}; {self.backend} is exact up to 2**53 in size"
            self.refuse(keyword, message, "use a smaller number, or none", at=pointer)

    def numbers(self, pointer: str, value: Any, keyword: str) -> None:
        """See `size`, for the numbers anywhere in a value."""
        if isinstance(value, dict):
            for name, child in value.items():
                self.numbers(f"{pointer}/{escaped(name)}", child, keyword)
        elif isinstance(value, list):
            for index, child in enumerate(value):
                self.numbers(f"{pointer}/{index}", child, keyword)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            self.size(pointer, value, keyword)

    def pattern(self, pointer: str, pattern: str) -> None:
        try:
            translate(pattern, dialect=Dialect.ECMA, limits=self.limits)
        except InvalidRegex as error:
            message = f"the pattern at {pointer}: {error.message}"
            if "position" in error.details:
                raise InvalidSchema(message, hint=error.hint, pointer=pointer) from None
            self.refuse(pointer, message, error.hint)
        except ConstraintTooComplex as error:
            raise ConstraintTooComplex(
                f"the pattern at {pointer}: {error.message}", hint=error.hint, pointer=pointer
            ) from None

    def combination(self, pointer: str, schema: dict[str, Any]) -> None:
        """Refuse what xgrammar ignores beside another keyword: it reads one that decides, and those of its type."""
        words = [word for word in schema if word in self.table and self.table[word].support is Support.ENFORCED]
        words = [word for word in words if word not in ("$defs", "definitions")]
        alone = next((word for word in _DECIDING if word in words), None)
        for other in words if alone else ():
            if other != alone:
                self.ignored(pointer, other, f"it stands beside {alone!r}", "write it inside the branches or the $defs")
        for word in words:
            kinds = _TYPES_OF.get(word)
            if kinds and schema.get("type") not in kinds:
                self.ignored(pointer, word, "the type that it is about is not the one 'type'", "write 'type' beside it")
        if {"pattern", "format"} & set(words):
            others = ("minLength", "maxLength", "format") if "pattern" in words else ("minLength", "maxLength")
            for word in others:
                if word in words:
                    self.ignored(pointer, word, "a pattern or format stands beside it", "write it into the pattern")

    def six_decimals(self, pointer: str, schema: dict[str, Any]) -> None:
        """Refuse a range of numbers that has none of six decimals, which are all that xgrammar writes."""
        if schema.get("type") != "number" or holds_decimals(schema, 6):
            return
        words = [word for word in ("maximum", "exclusiveMaximum") if word in schema]
        for word in words:
            at = f"{pointer}/{word}"
            message = f"{word!r} at {at} leaves no number of six decimals, and {self.backend} writes no others"
            self.refuse(at, message, "widen the range, or use grammar_backend='llguidance'")

    def names(self, pointer: str, schema: dict[str, Any]) -> None:
        """Refuse a required name that the object is closed to: xgrammar would leave it out."""
        known = schema.get("properties", {})
        missing = [name for name in schema.get("required", ()) if name not in known]
        is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
        if missing and is_closed:
            raise InvalidSchema(
                f"nothing satisfies the schema at {pointer or 'the root'}: {missing[0]!r} is required, and no property "
                "may have that name",
                hint="write it into 'properties'",
                pointer=f"{pointer}/required",
            )

    def beside_zero(self, pointer: str, schema: dict[str, Any]) -> None:
        """Refuse a range that zero bounds without being in it and that no number of whole units reaches: llguidance
        lets zero through there."""
        sides = (
            ("exclusiveMinimum", ("maximum", "exclusiveMaximum")),
            ("exclusiveMaximum", ("minimum", "exclusiveMinimum")),
        )
        for word, others in sides:
            bounds = [abs(schema[other]) for other in others if other in schema]
            if schema.get(word) == 0 and bounds and min(bounds) < 1:
                at = f"{pointer}/{word}"
                message = f"{word!r} at {at} is not enforced by {self.backend} where the other bound is below 1 in size"
                self.refuse(at, message, "use a minimum or maximum that is not zero")

    def ignored(self, pointer: str, word: str, why: str, hint: str) -> None:
        pointer = f"{pointer}/{escaped(word)}"
        self.refuse(pointer, f"{word!r} at {pointer} is not enforced by {self.backend}: {why}", hint)

    def refuse(self, pointer: str, message: str, hint: str, *, checkable: bool = True, at: str | None = None) -> None:
        """Raise that the backend would not enforce the keyword at `pointer`, or note that it is to be checked.

        Args:
            at: where in its value the cause stands, if not the whole.
        """
        if self.found is None or not checkable:
            hint = f"{hint}; {CHECK_HINT}" if checkable and self.checkable else hint
            raise UnsupportedSchema(message, hint=hint, pointer=pointer if at is None else at)
        self.found.append(pointer)

    def min_properties(self, pointer: str, value: float, schema: dict[str, Any]) -> None:
        required = schema.get("required")
        num_required = len(set(required)) if isinstance(required, list) else 0
        if value > num_required + 1:
            message = (
                f"'minProperties' at {pointer} is {value}, but undeclared keys may repeat, so that only "
                f"{num_required + 1} are certain to differ"
            )
            self.refuse(pointer, message, "name the properties in 'required'")

    def resolve(self, pointer: str, reference: str) -> str:
        """The pointer to the schema that a reference names."""
        if not reference.startswith("#"):
            self.unresolved(pointer, reference, "it is outside this document", "copy it into $defs; nothing is fetched")
        fragment = unquote(reference[1:])
        target = self.anchors.get(fragment, "\0") if fragment and not fragment.startswith("/") else fragment
        if target not in self.places:
            # Another spelling of the same place: escapes that need not be there.
            target = pointer_of(steps_of(target))
            if not fragment.startswith("/") or target not in self.places:
                self.unresolved(pointer, reference, "there is no schema", "refer to '#/$defs/name', '#' or '#anchor'")
        return target

    def unresolved(self, pointer: str, reference: str, why: str, hint: str) -> NoReturn:
        raise InvalidSchema(f"{pointer} refers to {reference!r}: {why}", hint=hint, pointer=pointer)

    def reference_chain(self, pointer: str, schema: Schema, ends: set[str]) -> None:
        """Refuse a reference that leads back to itself before any value is read: nothing satisfies it."""
        seen = {pointer}
        at = pointer
        while at not in ends and isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
            at = self.resolve(f"{at}/$ref", schema["$ref"])
            if at in seen:
                raise InvalidSchema(
                    f"{pointer}/$ref leads back to itself",
                    hint="refer from inside properties or items",
                    pointer=f"{pointer}/$ref",
                )
            seen.add(at)
            schema = self.places[at]
        ends |= seen


def holds_decimals(schema: dict[str, Any], places: int) -> bool:
    """Whether a number with so many decimals lies within the bounds of a schema, or they contradict each other anyway.

    Example:
        >>> holds_decimals({"minimum": 0.15, "maximum": 0.25}, 1), holds_decimals({"minimum": 0.11, "maximum": 0.15}, 1)
        (True, False)
    """
    bounds = {word: Decimal(repr(schema[word])).scaleb(places) for word in _BOUND_WORDS if word in schema}
    lows = [math.ceil(bounds["minimum"])] if "minimum" in bounds else []
    lows += [math.floor(bounds["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in bounds else []
    highs = [math.floor(bounds["maximum"])] if "maximum" in bounds else []
    highs += [math.ceil(bounds["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in bounds else []
    if not lows or not highs or max(lows) <= min(highs):
        return True
    least = max(value for word, value in bounds.items() if word.endswith("inimum"))
    most = min(value for word, value in bounds.items() if word.endswith("aximum"))
    return least > most


def is_vacuous(word: str, value: Any, schema: dict[str, Any]) -> bool:
    """Whether a refused keyword says nothing here, so that leaving it out changes nothing.

    Example:
        >>> is_vacuous("uniqueItems", False, {}), is_vacuous("uniqueItems", True, {})
        (True, False)
    """
    if word == "uniqueItems":
        most = schema.get("maxItems")
        return value is False or (value is True and isinstance(most, int) and most <= 1)
    return word == "nullable" and value is False


def is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and objects of a JSON value are nested deeper than `depth`.

    Example:
        >>> is_deeper([[1]], 1), is_deeper([[1]], 2)
        (True, False)
    """
    level = [value]
    for _ in range(depth + 1):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
        ]
        if not level:
            return False
    return True


def _too_deep(limits: Limits) -> ConstraintTooComplex:
    return ConstraintTooComplex(
        f"the JSON schema is nested deeper than {limits.max_json_depth}",
        hint="move parts of it into $defs and refer to them",
        pointer="",
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
