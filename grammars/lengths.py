"""How long the completions of a constraint's texts can get, in bytes, told from the constraint without an engine.

Owns `Lengths` and how they come from each kind of constraint. Called by `sgl.grammars.compiler`; `sgl.grammars.closing`
goes by them when it decides how soon a generation has to be looked at again. They are estimates, on the long side where
keywords are merged: of what is not known well more looks come than are needed.
"""

from __future__ import annotations

import json
import math
import re._constants as sre  # type: ignore[import-not-found]
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, assert_never
from urllib.parse import unquote

from sgl.grammars import ebnf, structural_tag
from sgl.grammars import structural_tag as tags
from sgl.grammars.keyword_tables import FORMATS
from sgl.grammars.keywords import TYPES, Schema, parse_schema, subschemas
from sgl.grammars.pointers import pointer_of, steps_of
from sgl.grammars.regex import Dialect, parse
from sgl.grammars.spec import Choices, Constraint, Ebnf, JsonSchema, Lark, Regex, StructuralTag
from sgl.limits import DEFAULT_LIMITS, Limits


class Lengths(NamedTuple):
    """Bytes of a text that is described; a token is at least one.

    Attributes:
        shortest: of the shortest text.
        rest: of what the shortest completion adds, wherever the text may have broken off; infinite where parts nest
            without end.
        detour: by which one token may make the shortest completion longer.
    """

    shortest: float
    rest: float
    detour: float


NOTHING = Lengths(0, 0, 0)
UNKNOWN = Lengths(0, math.inf, 7)
"""Of a constraint that nothing is known of."""
_NEVER = Lengths(math.inf, math.inf, 0)
_CHARACTER = Lengths(1, 6, 5)
"""One character, which may be several bytes, or an escape of JSON."""
_ANY_VALUE = Lengths(1, math.inf, 8)
_OF_FORMATS = {
    "duration": Lengths(3, 6, 3),
    "ipv4": Lengths(7, 7, 1),
    "ipv6": Lengths(2, 39, 15),
    "uri": Lengths(3, 9, 4),
    "uuid": Lengths(36, 36, 0),
}
"""Formats that have no pattern in `FORMATS`."""
_LARK_DETOUR = 63
_MOST = 10**15
"""Bytes of what is repeated; counts of nested repeats multiply beyond what a float holds."""
_MAX_ROUNDS = 8
"""Evaluations of what refers to itself, until nothing changes."""


def text(value: str) -> Lengths:
    """Of one text.

    Example:
        >>> text("abc").rest
        3
    """
    size = len(value.encode("utf-8", "surrogatepass"))
    return Lengths(size, size, 0)


def sequence(parts: Sequence[Lengths]) -> Lengths:
    """Of texts one after another.

    Example:
        >>> sequence([text("ab"), repeat(text("cde"), 0, None), text("f")])
        Lengths(shortest=3, rest=4, detour=3)
    """
    rest: float = 0
    after: float = 0
    for part in reversed(parts):
        rest = max(rest, part.rest + after)
        after += part.shortest
    return Lengths(after, rest, max((part.detour for part in parts), default=0))


def choice(parts: Iterable[Lengths]) -> Lengths:
    """Of one of some texts.

    Example:
        >>> choice([text("ab"), text("cdefg")])
        Lengths(shortest=2, rest=5, detour=3)
    """
    parts = [part for part in parts if part.shortest < math.inf]
    if not parts:
        return _NEVER
    shortest = min(part.shortest for part in parts)
    longest = max(part.shortest for part in parts)
    return Lengths(
        shortest, max(part.rest for part in parts), max(longest - shortest, *(part.detour for part in parts))
    )


def repeat(part: Lengths, low: int, high: int | None) -> Lengths:
    """Of a text that comes `low` to `high` times; `None` is without end."""
    if high == 0 or (low == 0 and part.shortest == math.inf):
        return NOTHING
    again = part.shortest if high is None or high > low else 0
    return Lengths(
        min(low * part.shortest, _MOST) if low else 0,
        part.rest + (min((low - 1) * part.shortest, _MOST) if low > 1 else 0),
        max(part.detour, again),
    )


def _merged(parts: Sequence[Lengths]) -> Lengths:
    """Of a text that all of them describe."""
    return parts[0] if len(parts) == 1 else Lengths(*(sum(sizes) for sizes in zip(*parts, strict=True)))


def lengths_of(constraint: Constraint, limits: Limits = DEFAULT_LIMITS) -> Lengths:
    """The lengths of a constraint that has passed its checks.

    Example:
        >>> lengths_of(JsonSchema('{"anyOf": [{"const": "a long text"}, {"type": "null"}]}'))
        Lengths(shortest=4, rest=13, detour=9)
    """
    match constraint:
        case Regex(pattern=pattern):
            return _of_pattern(pattern, Dialect.PYTHON, limits)
        case JsonSchema(schema=schema):
            return _of_schema(parse_schema(schema, limits), limits)
        case Choices(options=options):
            return choice(map(text, options))
        case Ebnf(grammar=grammar):
            return _of_grammar(grammar, limits)
        case Lark(grammar=grammar):
            return UNKNOWN._replace(detour=max(UNKNOWN.detour, min(len(grammar), _LARK_DETOUR)))
        case StructuralTag(tag=tag):
            return _of_format(structural_tag.parse(tag, limits), limits)
        case _:
            assert_never(constraint)


def _settled(names: Sequence[Any], size: Callable[[Any, Mapping[Any, Lengths]], Lengths]) -> dict[Any, Lengths]:
    """The lengths of named parts that may refer to one another."""
    known = dict.fromkeys(names, NOTHING)
    for number in range(_MAX_ROUNDS):
        before = dict(known)
        # What is named later is more often referred to than it refers; chains that run the other way settle as soon.
        for name in names if number % 2 else reversed(names):
            known[name] = size(name, known)
        if known == before:
            return known
    if all(found._replace(rest=before[name].rest) == before[name] for name, found in known.items()):
        return {name: found._replace(rest=math.inf) for name, found in known.items()}  # they nest without end
    detour = sum(found.shortest + found.detour for found in known.values() if found.shortest < math.inf)
    return {name: found._replace(rest=math.inf, detour=detour) for name, found in known.items()}


# --- patterns and grammars --------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _of_pattern(pattern: str, dialect: Dialect, limits: Limits) -> Lengths:
    return _of_nodes(parse(pattern, dialect, limits))


def _of_nodes(nodes: Any) -> Lengths:
    return sequence([_of_node(operator, argument) for operator, argument in nodes])


def _of_node(operator: Any, argument: Any) -> Lengths:
    if operator in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN):
        return _CHARACTER
    if operator is sre.SUBPATTERN:
        return _of_nodes(argument[-1])
    if operator is sre.BRANCH:
        return choice(map(_of_nodes, argument[1]))
    if operator in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        low, high, item = argument
        return repeat(_of_nodes(item), low, None if high is sre.MAXREPEAT else high)
    return NOTHING


def _of_grammar(grammar: str, limits: Limits) -> Lengths:
    rules = ebnf.parse(grammar, limits)
    return _settled([*rules], lambda name, known: _of_rule(rules[name], known))["root"]


def _of_rule(node: ebnf.Node, known: Mapping[str, Lengths]) -> Lengths:
    match node:
        case ebnf.Text(text=value):
            return text(value)
        case ebnf.Chars():
            return _CHARACTER
        case ebnf.Ref(name=name):
            return known[name]
        case ebnf.Sequence(items=items):
            return sequence([_of_rule(item, known) for item in items])
        case ebnf.Choice(items=items):
            return choice(_of_rule(item, known) for item in items)
        case ebnf.Repeat(item=item, low=low, high=high):
            return repeat(_of_rule(item, known), low, high)
        case _:
            assert_never(node)


def _of_format(fmt: tags.Format, limits: Limits) -> Lengths:
    size = partial(_of_format, limits=limits)
    match fmt:
        case tags.ConstString(value=value):
            return text(value)
        case tags.SchemaFormat(json_schema=schema):
            return _of_schema(schema, limits)
        case tags.RegexFormat(pattern=pattern):
            return _of_pattern(pattern, Dialect.PYTHON, limits)
        case tags.GrammarFormat(grammar=grammar):
            return _of_grammar(grammar, limits)
        case tags.AnyText():
            return repeat(_CHARACTER, 0, None)
        case tags.Sequence(elements=elements):
            return sequence([*map(size, elements)])
        case tags.Or(elements=elements):
            return choice(map(size, elements))
        case tags.Optional(content=content):
            return repeat(size(content), 0, 1)
        case tags.Star(content=content):
            return repeat(size(content), 0, None)
        case tags.Plus(content=content):
            return repeat(size(content), 1, None)
        case tags.Tag(begin=begin, content=content):
            return sequence([text(begin), size(content), choice(map(text, fmt.ends))])
        case tags.TriggeredTags() | tags.TagsWithSeparator():
            between = text(fmt.separator) if isinstance(fmt, tags.TagsWithSeparator) else repeat(_CHARACTER, 0, None)
            one = sequence([between, choice(map(size, fmt.tags))])
            return repeat(one, int(fmt.at_least_one), None)
        case _:
            assert_never(fmt)


# --- schemas ----------------------------------------------------------------------------------------------------------


def _of_schema(schema: Schema, limits: Limits) -> Lengths:
    places = dict(subschemas(schema))
    anchors = {
        found["$anchor"]: pointer
        for pointer, found in places.items()
        if isinstance(found, dict) and isinstance(found.get("$anchor"), str)
    }
    references = [found["$ref"] for found in places.values() if isinstance(found, dict) and "$ref" in found]
    targets: dict[str, Schema] = {}
    for reference in references:
        fragment = unquote(str(reference).removeprefix("#"))
        targets[reference] = places.get(anchors.get(fragment, pointer_of(steps_of(fragment))), True)
    known = _settled([*targets], lambda name, known: _Values(known, limits).size(targets[name]))
    return _Values(known, limits).size(schema)


class _Values:
    """The lengths of JSON values; `known` has those of what references name."""

    def __init__(self, known: Mapping[str, Lengths], limits: Limits) -> None:
        self._known = known
        self._limits = limits

    def size(self, schema: Schema) -> Lengths:
        """Of a schema's values."""
        if isinstance(schema, bool):
            return _ANY_VALUE if schema else _NEVER
        parts = [self._known[schema["$ref"]]] if "$ref" in schema else []
        parts += [choice(map(self.size, schema[word])) for word in ("anyOf", "oneOf") if word in schema]
        parts += [self.size(child) for child in schema.get("allOf", ())]
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return choice(text(json.dumps(value, ensure_ascii=False, separators=(",", ":"))) for value in values)
        kinds = schema.get("type")
        if kinds is None and _CONSTRAINING.isdisjoint(schema):
            return _merged(parts) if parts else _ANY_VALUE
        kinds = [kinds] if isinstance(kinds, str) else kinds or TYPES
        return _merged([choice(self._of_type(kind, schema) for kind in kinds), *parts])

    def _of_type(self, kind: str, schema: dict[str, Any]) -> Lengths:
        if kind == "null":
            return text("null")
        if kind == "boolean":
            return choice([text("true"), text("false")])
        if kind == "string":
            return self._string(schema)
        if kind == "array":
            return self._array(schema)
        return self._object(schema) if kind == "object" else _number(schema)

    def _string(self, schema: dict[str, Any]) -> Lengths:
        high = schema.get("maxLength")
        parts = [repeat(_CHARACTER, int(schema.get("minLength", 0)), None if high is None else int(high))]
        if "pattern" in schema:
            parts.append(_of_pattern(schema["pattern"], Dialect.ECMA, self._limits))
        if "format" in schema:
            pattern = FORMATS["llguidance"].get(schema["format"])
            if pattern is None:
                parts.append(_OF_FORMATS.get(schema["format"], UNKNOWN))
            else:
                parts.append(_of_pattern(pattern, Dialect.ECMA, self._limits))
        return sequence([text('"'), _merged(parts), text('"')])

    def _array(self, schema: dict[str, Any]) -> Lengths:
        low, high = int(schema.get("minItems", 0)), schema.get("maxItems")
        first = [self.size(item) for item in schema.get("prefixItems", ())]
        if high is not None:
            first = first[: int(high)]
        parts = [repeat(sequence([text(","), item]), int(place < low), 1) for place, item in enumerate(first)]
        most = None if high is None else max(0, int(high) - len(first))
        item = sequence([text(","), self.size(schema.get("items", True))])
        return sequence([text("["), *parts, repeat(item, max(0, low - len(first)), most), text("]")])

    def _object(self, schema: dict[str, Any]) -> Lengths:
        required, declared = set(schema.get("required", ())), schema.get("properties", {})
        others = self.size(schema.get("additionalProperties", True))
        parts = [_member(name, self.size(value), name in required) for name, value in declared.items()]
        parts += [_member(name, others, True) for name in schema.get("required", ()) if name not in declared]
        more = [sequence([text('"":,'), repeat(_CHARACTER, 0, None), others])]
        for pattern, value in schema.get("patternProperties", {}).items():
            name = _of_pattern(pattern, Dialect.ECMA, self._limits)
            more.append(sequence([text('"":,'), name, self.size(value)]))
        low = max(0, int(schema.get("minProperties", 0)) - len(required))
        return sequence([text("{"), *parts, repeat(choice(more), low, None), text("}")])


_CONSTRAINING = frozenset(
    [
        *("minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        *("multipleOf", "items", "prefixItems", "minItems", "maxItems", "properties", "required"),
        *("additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    ]
)
"""Words that say something about one type of values."""


def _member(name: str, value: Lengths, is_required: bool) -> Lengths:
    one = sequence([text(json.dumps(name, ensure_ascii=False) + ":,"), value])
    return repeat(one, int(is_required), 1)


def _number(schema: dict[str, Any]) -> Lengths:
    """Of numbers: as long as a bound where zero is excluded, as if none is longer than the longest figure."""
    words = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf")
    digits = max((len(str(schema[word])) for word in words if word in schema), default=0)
    low = max(schema.get("minimum", 0), schema.get("exclusiveMinimum", -1) + 1)
    high = min(schema.get("maximum", 0), schema.get("exclusiveMaximum", 1) - 1)
    return Lengths(1 if low <= 0 <= high else max(1, digits), digits + 4, digits + 3)
