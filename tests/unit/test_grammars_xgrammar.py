"""xgrammar behind the same interface: the suite of every matcher, random walks, and what it is not trusted with."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import jsonschema_rs
import pytest
from support import matcher_conformance as conformance
from support.grammar_walks import walk

from sgl.errors import (
    ConfigError,
    ConstraintTooComplex,
    InvalidConstraint,
    InvalidParameter,
    InvalidSchema,
    UnsupportedSchema,
)
from sgl.grammars import xgrammar_backend
from sgl.grammars.compiler import GrammarCompiler, check
from sgl.grammars.spec import Choices, Constraint, Ebnf, JsonSchema, Lark, Regex, canonical_schema, structural_tag
from sgl.limits import Limits

WORLD = conformance.world()
INSTALLED = xgrammar_backend.is_installed()
needs_xgrammar = pytest.mark.skipif(not INSTALLED, reason="xgrammar is not installed")
RECORD = {
    "type": "object",
    "properties": {"b": {"type": "integer", "minimum": -5, "maximum": 120}, "a": {"enum": ["x", 1, None]}},
    "required": ["b", "a"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f="],
        "tags": [
            {"type": "tag", "begin": "<f=a>", "content": {"type": "json_schema", "json_schema": RECORD}, "end": "</f>"},
            {"type": "tag", "begin": "<f=b>", "content": {"type": "regex", "pattern": r"\d{2}"}, "end": "</f>"},
        ],
    },
}
CONSTRAINTS: dict[str, Constraint] = {
    "regex": Regex("(abc|true)?[é日]{1,2}x"),
    "ebnf": Ebnf('root ::= "abc" | [a-z] "bd" | "(" root ")"'),
    "record": JsonSchema(json.dumps(RECORD)),
    "compact": JsonSchema(json.dumps(RECORD), "compact"),
    "tags": structural_tag(TAG),
    "choices": Choices(("true", "trap")),
}
SCHEMAS: dict[str, Any] = {
    "record": RECORD,
    "integer": {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 12},
    "number": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "string": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-\\d{2,3}$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "null"}, "minItems": 1, "maxItems": 4},
    "any-of": {"anyOf": [{"type": "integer", "maximum": 5}, {"type": "null"}, {"type": ["string", "boolean"]}]},
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "pattern, optional repeat": {"type": "string", "pattern": "^a(\\.[0-9]+)?Z$"},
    "pattern past ASCII": {"type": "string", "pattern": "^😀[😀-🙏é]{2}.$"},
    "time": {"type": "string", "format": "time"},
    "required, not declared": {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a", "zz"],
        "additionalProperties": {"type": "boolean"},
    },
    "small numbers": {"type": "number", "minimum": 1.5e-6, "exclusiveMaximum": 3e-6},
    "integer, broken bounds": {"type": "integer", "exclusiveMinimum": 1.5, "maximum": 3.5},
    "counts with a fraction": {"type": "array", "items": {"type": "null"}, "minItems": 2.0, "maxItems": 2.0},
    "map": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}},
    "recursive": {
        "$defs": {
            "n": {
                "type": "object",
                "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/n",
    },
}


def parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_float=Decimal)
    except ValueError as error:
        raise AssertionError(f"{text!r} is not JSON") from error


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    limits = Limits(max_compile_s=30.0)  # the machine that tests may be busy
    made = GrammarCompiler(WORLD.tokenizer_json, WORLD.vocab_size, WORLD.eos_ids, backend="xgrammar", limits=limits)
    yield made
    made.close()


@needs_xgrammar
def test_conformance(compiler: GrammarCompiler) -> None:
    for name, constraint in CONSTRAINTS.items():
        grammar = compiler.compile(constraint)
        for seed in range(6):
            conformance.check_walk(grammar, WORLD, random.Random(f"{name} {seed}"))
    conformance.check_language(compiler.compile(CONSTRAINTS["ebnf"]), WORLD, ["abc", "(abd)"], ["ab", "(abc", "abcd"])
    conformance.check_language(
        compiler.compile(CONSTRAINTS["tags"]),
        WORLD,
        ["x<f=b>12</f>y", "", '<f=a>{"b":7,"a":"x"}</f>'],
        ["<f=b>1", "<f="],
    )
    ordered, others = ['{"b":1,"a":1}'], ['{"a":1,"b":1}', '{"b":1}', '{"b":121,"a":1}']
    conformance.check_language(
        compiler.compile(CONSTRAINTS["record"]), WORLD, [*ordered, '{ "b" : 1 , "a" : 1 }'], others
    )
    conformance.check_language(compiler.compile(CONSTRAINTS["compact"]), WORLD, ordered, [*others, '{ "b":1,"a":1}'])
    assert WORLD.text(compiler.compile(Regex("abc true")).matcher().forced_tokens()).startswith("abc")

    # Random walks, held against independent validators.
    for name, schema in SCHEMAS.items():
        oracle = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
        for seed in range(5):
            text = WORLD.text(walk(compiler.compile(JsonSchema(canonical_schema(schema))), random.Random(seed)) or [])
            if text:
                assert oracle.is_valid(parsed(text)), (name, text)
    for pattern in (r"[\w\s]{1,6}", ".{0,5}", "(?s).{3}", r"\x41\n\t[\]\\-]", "(?i)key: [a-c]+ß?", "a{2,}?b{,3}c*?"):
        for seed in range(5):
            text = WORLD.text(walk(compiler.compile(Regex(pattern)), random.Random(seed)) or [])
            assert re.fullmatch(pattern, text), (pattern, text)

    # One compiler serves both, with one vocabulary, and remembers them apart.
    vocabularies = {compiler._backend(name).vocabulary for name in ("llguidance", "xgrammar")}
    assert len(vocabularies) == 1
    assert compiler.compile(Regex("ab"), "llguidance") is not compiler.compile(Regex("ab"))


@needs_xgrammar
def test_compilation_is_bounded() -> None:
    limits = Limits(max_compile_s=1e-6)
    compiler = GrammarCompiler(WORLD.tokenizer_json, WORLD.vocab_size, WORLD.eos_ids, backend="xgrammar", limits=limits)
    try:
        with pytest.raises(ConstraintTooComplex, match="use grammar_backend='llguidance'"):
            compiler.compile(Regex("((a?){60}(b|c){60}){400}"))
        with pytest.raises(InvalidParameter, match="unknown"):
            compiler.compile(Regex("a"), "outlines")
    finally:
        compiler.close()


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"type": "array", "uniqueItems": True}, "/uniqueItems"),
        ({"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 2}}}, "/properties/a/multipleOf"),
        ({"type": "array", "items": {"not": {}}}, "/items/not"),
        ({"type": "array", "contains": {}}, "/contains"),
        ({"oneOf": [{}, {}]}, "/oneOf"),
        ({"allOf": [{}]}, "/allOf"),
        ({"type": "object", "anyOf": [{}]}, "/type"),
        ({"$defs": {"n": {}}, "$ref": "#/$defs/n", "type": "integer"}, "/type"),
        ({"enum": ["a", 1], "type": "string"}, "/type"),
        ({"minimum": 3}, "/minimum"),
        ({"type": ["string", "null"], "maxLength": 3}, "/maxLength"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "/maxLength"),
        ({"type": "string", "format": "uri"}, "/format"),
        ({"type": "number", "minimum": 1e-12, "maximum": 2e-12}, "/maximum"),
        ({"type": "number", "exclusiveMinimum": 0.1, "exclusiveMaximum": 0.1000000001}, "/exclusiveMaximum"),
    ],
)
def test_what_it_would_ignore_is_refused(schema: dict[str, Any], pointer: str) -> None:
    with pytest.raises(UnsupportedSchema) as caught:
        check(JsonSchema(canonical_schema(schema)), "xgrammar")
    assert caught.value.details["pointer"] == pointer


def test_a_closed_object_without_what_it_requires() -> None:
    schema = {"type": "object", "required": ["zz"], "additionalProperties": False}
    with pytest.raises(InvalidSchema, match="'zz' is required") as caught:
        check(JsonSchema(canonical_schema(schema)), "xgrammar")
    assert caught.value.details["pointer"] == "/required"
    # A check afterwards leaves the patterns out, and with them what holds for names that none of them matches.
    patterns = {**schema, "patternProperties": {"^z": {"type": "null"}}}
    check(JsonSchema(canonical_schema(patterns), unsupported="check"), "xgrammar")


def test_it_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConstraint, match="takes no Lark"):
        check(Lark("start: /a/"), "xgrammar")
    monkeypatch.setattr(xgrammar_backend, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match="not installed"):
        GrammarCompiler(WORLD.tokenizer_json, WORLD.vocab_size, WORLD.eos_ids, backend="xgrammar").compile(Regex("a"))
