"""Which JSON schema keywords each backend enforces, and which values of `format`: tables to be read, no code.

Owns one table per backend: every keyword with what it holds and whether the backend enforces it, carries no constraint,
or must be refused, with the reason. Read by the walker (`keywords.py`), and by the backends for what they leave out and
put in place of a format. A keyword that is in no table is refused. The semantics are those of draft 2020-12.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class Kind(Enum):
    """What a keyword's value must be; the value is the wording for messages."""

    SCHEMA = "a schema (an object or a boolean)"
    SCHEMAS = "a list of at least one schema"
    SCHEMA_MAP = "an object whose values are schemas"
    COUNT = "an integer of at least 0"
    NUMBER = "a number"
    POSITIVE = "a number above 0"
    BOOLEAN = "true or false"
    STRING = "a string"
    STRINGS = "a list of strings"
    TYPE = "a type name or a list of them"
    VALUES = "a list of at least one value"
    ANYTHING = "any value"


class Support(Enum):
    """What a backend does with a keyword."""

    ENFORCED = "enforced"
    ANNOTATION = "annotation"  # constrains nothing; left out of what the backend sees
    REFUSED = "refused"  # constrains, but this backend would ignore or reject it


class Keyword(msgspec.Struct, frozen=True):
    """One row of a table.

    Args:
        kind: what its value must be.
        support: what the backend does with it.
        reason: why it is refused, or how far it is enforced.
        hint: what to write instead.
    """

    kind: Kind
    support: Support = Support.ENFORCED
    reason: str = ""
    hint: str = ""


def _enforced(kind: Kind, reason: str = "") -> Keyword:
    return Keyword(kind, Support.ENFORCED, reason)


def _annotation(kind: Kind = Kind.ANYTHING, reason: str = "describes the value, constrains nothing") -> Keyword:
    return Keyword(kind, Support.ANNOTATION, reason)


def _refused(reason: str, hint: str) -> Keyword:
    return Keyword(Kind.ANYTHING, Support.REFUSED, reason, hint)


_LLGUIDANCE: dict[str, Keyword] = {
    # structure
    "$ref": _enforced(Kind.STRING, "within the document only"),
    "$defs": _enforced(Kind.SCHEMA_MAP),
    "definitions": _enforced(Kind.SCHEMA_MAP),
    "$anchor": _enforced(Kind.STRING),
    "allOf": _enforced(Kind.SCHEMAS, "merged; a merge that it cannot compute is refused at compilation"),
    "anyOf": _enforced(Kind.SCHEMAS),
    "oneOf": _enforced(Kind.SCHEMAS, "where the branches are provably exclusive; others are refused at compilation"),
    # any type
    "type": _enforced(Kind.TYPE),
    "enum": _enforced(Kind.VALUES),
    "const": _enforced(Kind.ANYTHING),
    # objects
    "properties": _enforced(Kind.SCHEMA_MAP, "written in this order"),
    "patternProperties": _enforced(Kind.SCHEMA_MAP, "patterns must be disjoint; overlaps are refused at compilation"),
    "additionalProperties": _enforced(Kind.SCHEMA),
    "required": _enforced(Kind.STRINGS),
    "minProperties": _enforced(Kind.COUNT, "up to one more than `required`: undeclared keys may repeat"),
    "maxProperties": _enforced(Kind.COUNT, "when every declared property is required"),
    # arrays
    "items": _enforced(Kind.SCHEMA),
    "prefixItems": _enforced(Kind.SCHEMAS),
    "minItems": _enforced(Kind.COUNT),
    "maxItems": _enforced(Kind.COUNT),
    # strings
    "minLength": _enforced(Kind.COUNT),
    "maxLength": _enforced(Kind.COUNT),
    "pattern": _enforced(Kind.STRING, "translated from ECMA-262; what is not regular is refused"),
    "format": _enforced(Kind.STRING, "the names in FORMATS"),
    # numbers
    "minimum": _enforced(Kind.NUMBER),
    "maximum": _enforced(Kind.NUMBER),
    "exclusiveMinimum": _enforced(Kind.NUMBER, "zero only where the other bound is not below 1 in size"),
    "exclusiveMaximum": _enforced(Kind.NUMBER, "zero only where the other bound is not below 1 in size"),
    "multipleOf": _enforced(Kind.POSITIVE),
    # enforced by nobody here
    "uniqueItems": _refused("a grammar cannot compare items", "use an enum of whole arrays, or check after decoding"),
    "not": _refused("complements are not computed", "say what is allowed instead"),
    "if": _refused("conditions are not computed", "write the cases as anyOf, each with its own properties"),
    "then": _refused("conditions are not computed", "write the cases as anyOf, each with its own properties"),
    "else": _refused("conditions are not computed", "write the cases as anyOf, each with its own properties"),
    "contains": _refused("items are not counted", "describe the array with prefixItems and items"),
    "minContains": _refused("items are not counted", "describe the array with prefixItems and items"),
    "maxContains": _refused("items are not counted", "describe the array with prefixItems and items"),
    "propertyNames": _refused("names are not constrained on their own", "use patternProperties"),
    "dependentRequired": _refused("presence is not related", "write the cases as anyOf, each with its own required"),
    "dependentSchemas": _refused("presence is not related", "write the cases as anyOf"),
    "dependencies": _refused("presence is not related", "write the cases as anyOf"),
    "unevaluatedProperties": _refused("evaluation is not tracked", "use additionalProperties in each branch"),
    "unevaluatedItems": _refused("evaluation is not tracked", "use items after prefixItems"),
    "additionalItems": _refused("it is ignored since draft 2020-12", "use prefixItems, and items for the rest"),
    "contentEncoding": _refused("the text's encoding is not enforced", "use pattern"),
    "contentMediaType": _refused("the text's content is not enforced", "use pattern"),
    "contentSchema": _refused("the text's content is not enforced", "use pattern"),
    "nullable": _refused("JSON schema has no such keyword", 'use "type": ["string", "null"]'),
    "$dynamicRef": _refused("dynamic references are not resolved", "use $ref"),
    "$dynamicAnchor": _refused("dynamic references are not resolved", "use $anchor and $ref"),
    "$recursiveRef": _refused("dynamic references are not resolved", "use $ref"),
    "$recursiveAnchor": _refused("dynamic references are not resolved", "use $anchor and $ref"),
    "$vocabulary": _refused("vocabularies are not loaded", "remove it"),
    "id": _refused("it is draft 4's spelling", "use $id at the root, or remove it"),
    "x-guidance": _refused("it would switch checks of the backend off", "use JsonSchema.whitespace for white space"),
    # annotations
    "$schema": _annotation(Kind.STRING, "names the draft; draft 2020-12 is what is enforced"),
    "$id": _annotation(Kind.STRING, "at the root only"),
    "$comment": _annotation(Kind.STRING),
    "title": _annotation(),
    "description": _annotation(),
    "default": _annotation(),
    "example": _annotation(),
    "examples": _annotation(),
    "deprecated": _annotation(),
    "readOnly": _annotation(),
    "writeOnly": _annotation(),
    "externalDocs": _annotation(),
    "discriminator": _annotation(reason="a remark on anyOf and oneOf, which carry the constraint"),
}

_XGRAMMAR: dict[str, Keyword] = {
    **_LLGUIDANCE,
    "$anchor": _refused("anchors are not resolved", "refer by '#/$defs/name'"),
    "allOf": _refused("schemas are not merged", "write the combination out"),
    "oneOf": _refused("branches are not kept apart", "use anyOf, whose branches may overlap"),
    "patternProperties": _refused("its patterns are not kept apart from other names", "use properties"),
    "minProperties": _refused("undeclared keys may repeat", "name the properties in 'required'"),
    "maxProperties": _refused("undeclared keys may repeat", "name the properties, and close the object"),
    "multipleOf": _refused("it is ignored", "list the values in an enum, or use a pattern"),
}

TABLES: dict[str, dict[str, Keyword]] = {"llguidance": _LLGUIDANCE, "xgrammar": _XGRAMMAR}
"""Backend -> keyword -> what becomes of it. Words that begin with `x-` and are not listed are annotations."""

_CLOCK = r"([01]\d|2[0-3]):[0-5]\d"
_TIME = rf"{_CLOCK}:[0-5]\d(\.\d{{1,6}})?(Z|[+-]{_CLOCK})"
_LEAP_YEAR = r"(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = (
    r"(\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
    rf"|{_LEAP_YEAR}-02-29)"
)
_LABEL = r"[A-Za-z0-9]{1,20}(-[A-Za-z0-9]{1,20}){0,2}"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,3}}"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"

FORMATS: dict[str, dict[str, str | None]] = {
    "llguidance": {
        "date": rf"^{_DATE}$",
        "date-time": rf"^{_DATE}T{_TIME}$",
        "duration": None,
        "email": rf"^{_ATOM}(\.{_ATOM}){{0,2}}@{_HOST}$",
        "hostname": rf"^{_HOST}$",
        "ipv4": None,
        "ipv6": None,
        "time": rf"^{_TIME}$",
        "uri": None,
        "uuid": None,
    },
    "xgrammar": {},
}
FORMATS["xgrammar"] = {name: pattern for name, pattern in FORMATS["llguidance"].items() if pattern is not None}
FORMATS["xgrammar"]["uuid"] = r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
"""Backend -> values of `format` -> the pattern that stands for it, or `None` where the backend's own rule is exact.

The patterns allow less than the standards where those bound a length that a regular expression would have to count (a
host name of 253 bytes), and no leap second, which is only valid in two minutes of a year."""
