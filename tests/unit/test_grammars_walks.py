"""Random walks under the mask end in what an independent oracle accepts: jsonschema-rs for schemas, `re` for regexes.

The walks draw uniformly from the allowed tokens, which a model never would, and so reach the corners of a grammar.
After a while they prefer to close what is open, so that they end.
"""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal

import jsonschema_rs
import pytest
from support.grammar_walks import walk
from support.matcher_conformance import world

from sgl.grammars.compiler import GrammarCompiler
from sgl.grammars.spec import JsonSchema, Regex, canonical_schema

WORLD = world()
COMPILER = GrammarCompiler(WORLD.tokenizer_json, WORLD.vocab_size, WORLD.eos_ids)
NUM_WALKS = 8
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS: dict[str, object] = {
    "anything": {},
    "true": True,
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "string": {"type": "string"},
    "types": {"type": ["string", "null", "integer"]},
    "enum": {"enum": ["a", 1, None, {"k": [1, 2]}, 2.5, 'é\n"']},
    "enum-narrowed": {"enum": ["aa", "b", "cccc", 3], "type": "string", "maxLength": 2},
    "const": {"const": {"a": [1, {"b": None}], "c": "x/y"}},
    "integer-bounds": {"type": "integer", "minimum": -17, "maximum": 123},
    "integer-exclusive": {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 12},
    "number-bounds": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25},
    "number-low": {"type": "number", "exclusiveMinimum": 0},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 200},
    "multiple-fraction": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 3},
    "string-length": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-\\d{2,3}$"},
    "pattern-inside": {"type": "string", "pattern": "\\d[^\\s]\\w", "maxLength": 12},
    "pattern-length": {"type": "string", "pattern": "^(ab|c)+$", "minLength": 3, "maxLength": 6},
    "pattern-newline": {"type": "string", "pattern": '^a.b\\nc"?$'},
    "date": {"type": "string", "format": "date"},
    "date-time": {"type": "string", "format": "date-time"},
    "time": {"type": "string", "format": "time"},
    "duration": {"type": "string", "format": "duration"},
    "email": {"type": "string", "format": "email"},
    "hostname": {"type": "string", "format": "hostname"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "uuid": {"type": "string", "format": "uuid"},
    "uri": {"type": "string", "format": "uri"},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "boolean"}],
        "items": False,
        "minItems": 1,
    },
    "tuple-rest": {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "null"}, "maxItems": 4},
    "nested": {
        "type": "object",
        "properties": {
            "who": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
                "required": ["name"],
                "additionalProperties": False,
            },
            "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 3},
        },
        "required": ["who", "tags"],
        "additionalProperties": False,
    },
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}, "c": {"type": "integer", "maximum": 9}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "required-order": {
        "type": "object",
        "properties": {"z": {"const": 1}, "a": {"const": 2}},
        "required": ["a", "z"],
        "additionalProperties": False,
    },
    "required-undeclared": {"type": "object", "required": ["q"], "additionalProperties": {"type": "boolean"}},
    "open-object": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    "map": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}},
    "map-size": {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1, "maxProperties": 2},
    "pattern-properties": {
        "type": "object",
        "patternProperties": {"^n_": {"type": "integer"}, "^b_[a-c]$": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "any-of": {"anyOf": [{"type": "integer", "maximum": 5}, {"type": "string", "maxLength": 2}, {"type": "null"}]},
    "any-of-siblings": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
        "anyOf": [{"properties": {"a": {"maximum": 5}}}, {"properties": {"a": {"minimum": 50}}}],
        "additionalProperties": False,
    },
    "one-of": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}, "v": {"type": "integer"}}, "required": ["k", "v"]},
            {"type": "object", "properties": {"k": {"const": "b"}, "v": {"type": "null"}}, "required": ["k", "v"]},
        ]
    },
    "all-of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 20}, {"multipleOf": 2}]},
    "all-of-objects": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer", "maximum": 3}}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
    "recursive": TREE,
    "recursive-root": {
        "type": "object",
        "properties": {"kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
        "required": ["kids"],
        "additionalProperties": False,
    },
    "reference-siblings": {"$defs": {"n": {"type": "integer", "minimum": 2}}, "$ref": "#/$defs/n", "maximum": 6},
    "reference-escapes": {"$defs": {"a/b c": {"type": "boolean"}}, "$ref": "#/$defs/a~1b%20c"},
    "anchor": {"$defs": {"x": {"$anchor": "here", "type": "null"}}, "type": "array", "items": {"$ref": "#here"}},
    "no-type": {"minimum": 3, "maxLength": 2, "required": ["a"], "maxItems": 1},
    "no-duplicates-of-one": {"type": "array", "items": {"type": "integer"}, "maxItems": 1, "uniqueItems": True},
    "annotated": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/thing",
        "title": "T",
        "description": "d",
        "type": "object",
        "properties": {"title": {"type": "boolean", "default": True, "examples": [False]}},
        "required": ["title"],
        "additionalProperties": False,
    },
}
REGEXES = [
    "abc",
    "a|bc|",
    "(true|12)+",
    "[a-f0-9]{8}",
    r"\d{3}-\d{4}",
    r"\w{1,9}@\w{1,9}\.(com|org)",
    r"\s*x\s*",
    r"[\w\s]{1,6}",
    r"[^\W\d_]{2,4}",
    r"\D\S\W",
    ".{0,5}",
    "(?s).{3}",
    "[^abc]{2}",
    "(?i)key: [a-c]+ß?",
    "(?ai)kelvin\\w",
    "(?i:ab)C",
    "^(yes|no)$",
    r"\A\d+\Z",
    "(?P<year>[12][0-9]{3})(?:-(0[1-9]|1[0-2]))?",
    "a{2,}?b{,3}c*?",
    "(?x) a b  c # spaces do not count",
    r"\x41\u00e9\N{BULLET}\n\t[\]\\-]",
    "((a|b)*c){2}",
    "/\"'`\\${}",
]


@pytest.mark.parametrize("whitespace", ["compact", "bounded"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_walks_are_valid(name: str, whitespace: str) -> None:
    schema = SCHEMAS[name]
    grammar = COMPILER.compile(JsonSchema(canonical_schema(schema), whitespace))  # type: ignore[arg-type]
    oracle = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    finished = 0
    for seed in range(NUM_WALKS):
        path = walk(grammar, random.Random(f"{name} {seed}"))
        if path is None:
            continue
        finished += 1
        text = WORLD.text(path)
        value = json.loads(text, parse_float=Decimal)  # an exponent of nine digits is JSON, but no float
        assert oracle.is_valid(value), f"{text!r}: {[error.message for error in oracle.iter_errors(value)]}"
        assert "\n" not in text
        if whitespace == "compact":
            outside = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
            assert " " not in outside
    assert finished == NUM_WALKS


@pytest.mark.parametrize("pattern", REGEXES)
def test_regex_walks_match(pattern: str) -> None:
    grammar = COMPILER.compile(Regex(pattern))
    for seed in range(2 * NUM_WALKS):
        path = walk(grammar, random.Random(f"{pattern} {seed}"))
        assert path is not None
        text = WORLD.text(path)
        assert re.fullmatch(pattern, text), repr(text)


@pytest.mark.parametrize("name", ["required-order", "nested"])
def test_properties_come_in_the_order_of_the_schema(name: str) -> None:
    schema = SCHEMAS[name]
    assert isinstance(schema, dict)
    path = walk(COMPILER.compile(JsonSchema(canonical_schema(schema))), random.Random(1))
    assert path is not None
    assert list(json.loads(WORLD.text(path))) == list(schema["properties"])


SAMPLES = ["a", "Z", "_", "5", "²", "é", "ß", " ", "\n", "\r", "日", "😀", "k", "s", "i", "j", "-"]
SAMPLES += [
    "\ud7ff",
    "\ue000",
    "\uf8ff",
    "\u0663",
    "\u0301",
    "\u212a",
    "\u017f",
    "\u0130",
    "\u0131",
    "\x1c",
    "\u00a0",
    "\u2028",
]
CLASSES = [
    r"\d",
    r"\D",
    r"\w",
    r"\W",
    r"\s",
    r"\S",
    ".",
    "(?s).",
    r"[\s_]",
    r"[^\w\s]",
    r"[a\d-]",
    r"[^\W\d_]",
    "[^\ue000]",
]
CLASSES += [
    r"(?a)\w",
    r"(?a)[^\d]",
    "(?i)k",
    "(?i)S",
    "(?i)[i-k]",
    "(?i)[^s]",
    "(?i)ß",
    "(?i)é",
    "(?ai)[k]",
    "(?i)\u0130",
]


@pytest.mark.parametrize("pattern", CLASSES)
def test_character_classes_mean_what_re_means(pattern: str) -> None:
    grammar = COMPILER.compile(Regex(pattern))
    for sample in SAMPLES:
        token_ids = WORLD.encode(sample)
        taken = grammar.matcher().validate_tokens([*token_ids, WORLD.eos_ids[0]])
        assert (taken == len(token_ids) + 1) == bool(re.fullmatch(pattern, sample)), repr(sample)
