"""What is refused before or at compilation, with the error, its pointer and its advice; and the compiler's cache."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import llguidance
import pytest
from support.matcher_conformance import world

from sgl.errors import (
    ConstraintTooComplex,
    InvalidConstraint,
    InvalidGrammar,
    InvalidParameter,
    InvalidRegex,
    InvalidSchema,
    SglError,
    UnsupportedSchema,
)
from sgl.grammars.compiler import BACKENDS, GrammarCompiler, check
from sgl.grammars.keyword_tables import FORMATS, TABLES, Kind, Support
from sgl.grammars.keywords import check_schema, subschemas, unenforced
from sgl.grammars.llguidance_backend import rewritten
from sgl.grammars.matcher import StopReason
from sgl.grammars.spec import Choices, Constraint, JsonSchema, Lark, Regex, canonical_schema, structural_tag
from sgl.limits import DEFAULT_LIMITS, Limits

WORLD = world()


def new_compiler(**options: Any) -> GrammarCompiler:
    return GrammarCompiler(WORLD.tokenizer_json, WORLD.vocab_size, WORLD.eos_ids, **options)


COMPILER = new_compiler()
TAGGED = {"type": "json_schema", "json_schema": {"uniqueItems": True}}

# --- the keyword walker -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "kind", "pointer"),
    [
        ({"properties": {"a": {"uniqueItems": True}}}, UnsupportedSchema, "/properties/a/uniqueItems"),
        ({"items": {"not": {}}}, UnsupportedSchema, "/items/not"),
        ({"anyOf": [{}, {"contains": {}}]}, UnsupportedSchema, "/anyOf/1/contains"),
        ({"$defs": {"a/b": {"if": {}}}}, UnsupportedSchema, "/$defs/a~1b/if"),
        ({"propertis": {}}, UnsupportedSchema, "/propertis"),
        ({"properties": {"a": {"foo": "bar"}}}, UnsupportedSchema, "/properties/a/foo"),
        ({"properties": {"foo": "bar"}}, InvalidSchema, "/properties"),
        ({"type": "string", "nullable": True}, UnsupportedSchema, "/nullable"),
        ({"type": "string", "format": "regex"}, UnsupportedSchema, "/format"),
        ({"x-guidance": {"lenient": True}}, UnsupportedSchema, "/x-guidance"),
        ({"items": [{}]}, UnsupportedSchema, "/items"),
        ({"properties": {"a": {"$id": "b"}}}, UnsupportedSchema, "/properties/a/$id"),
        ({"minProperties": 2}, UnsupportedSchema, "/minProperties"),
        ({"type": "string", "pattern": "a(?=b)"}, UnsupportedSchema, "/pattern"),
        ({"type": "string", "pattern": "\\p{Script=Greek}"}, UnsupportedSchema, "/pattern"),
        ({"type": "string", "pattern": "(?<n>a)\\k<n>"}, UnsupportedSchema, "/pattern"),
        ({"patternProperties": {"(a": {}}}, InvalidSchema, "/patternProperties/(a"),
        ({"type": "string", "pattern": "["}, InvalidSchema, "/pattern"),
        ({"type": "strin"}, InvalidSchema, "/type"),
        ({"type": []}, InvalidSchema, "/type"),
        ({"minimum": "3"}, InvalidSchema, "/minimum"),
        ({"exclusiveMinimum": True}, InvalidSchema, "/exclusiveMinimum"),
        ({"maximum": 2**60}, UnsupportedSchema, "/maximum"),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, UnsupportedSchema, "/minimum"),
        ({"minLength": -1}, InvalidSchema, "/minLength"),
        ({"maxItems": 10**400}, UnsupportedSchema, "/maxItems"),
        ({"const": 10**400}, UnsupportedSchema, "/const"),
        ({"const": 2**53 + 1}, UnsupportedSchema, "/const"),  # both backends would write another number
        ({"properties": {"a": {"enum": [True, {"b": [1, 1e300]}]}}}, UnsupportedSchema, "/properties/a/enum/1/b/1"),
        ({"multipleOf": 0}, InvalidSchema, "/multipleOf"),
        ({"enum": []}, InvalidSchema, "/enum"),
        ({"anyOf": []}, InvalidSchema, "/anyOf"),
        ({"required": ["a", 1]}, InvalidSchema, "/required"),
        ({"additionalProperties": "no"}, InvalidSchema, "/additionalProperties"),
        ({"$ref": "#/$defs/nope"}, InvalidSchema, "/$ref"),
        ({"$ref": "other.json"}, InvalidSchema, "/$ref"),
        ({"$ref": "#"}, InvalidSchema, "/$ref"),
        ({"enum": [{}], "$ref": "#/enum/0"}, InvalidSchema, "/$ref"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, InvalidSchema, "/$defs/a/$ref"),
        (False, InvalidSchema, ""),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, UnsupportedSchema, "/exclusiveMinimum"),
        ({"items": {"exclusiveMaximum": 0, "minimum": -0.01}}, UnsupportedSchema, "/items/exclusiveMaximum"),
    ],
)
def test_refused_schemas(schema: Any, kind: type[SglError], pointer: str) -> None:
    with pytest.raises(kind) as caught:
        check_schema(canonical_schema(schema))
    assert type(caught.value) is kind
    assert caught.value.pointer == pointer
    assert caught.value.hint


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"title": "t", "default": 3, "$comment": "c", "examples": [1], "deprecated": True, "x-order": 3},
        {"properties": {"not": {"type": "integer"}, "uniqueItems": {}}},
        {"enum": [{"not": 1, "propertis": 2}], "default": {"if": 1}},
        {"type": "array", "uniqueItems": False},
        {"$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"},
        {"properties": {"a": {"type": "null"}, "b": {"$ref": "#/properties/a"}}},
        {"minProperties": 3, "required": ["a", "b"]},
        {"type": "array", "minItems": 2.0, "maxItems": 3.0},
        {"type": "string", "pattern": "^\\p{L}[^\\P{Nd}]\\cA\\u{1F600}$"},
    ],
)
def test_accepted_schemas(schema: Any) -> None:
    check_schema(canonical_schema(schema))
    assert COMPILER.compile(JsonSchema(canonical_schema(schema))).matcher() is not None


def test_large_numbers_are_checked_when_asked() -> None:
    """What is exact up to 2**53 only is left out of what is compiled; data within an enum is not taken apart."""
    schemas = [{"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, {"enum": [1, {"id": 2**60}]}]
    assert unenforced(canonical_schema(schemas[0])) == ["/minimum", "/maximum"]
    assert unenforced(canonical_schema(schemas[1])) == ["/enum"]
    for schema in schemas:
        check(JsonSchema(canonical_schema(schema), unsupported="check"))
        with pytest.raises(UnsupportedSchema, match="unsupported='check'"):
            check(JsonSchema(canonical_schema(schema)))


def test_messages_name_nothing_of_the_library() -> None:
    either = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    with pytest.raises(UnsupportedSchema, match=r"use anyOf.*unsupported='check'") as caught:
        COMPILER.compile(JsonSchema(canonical_schema(either)))
    assert "coerce" not in str(caught.value)
    with pytest.raises(InvalidSchema, match="no text matches all its patterns") as empty:
        COMPILER.compile(JsonSchema(canonical_schema({"type": "string", "format": "date", "minLength": 50})))
    assert "And" not in str(empty.value)


def test_refusals_speak_of_checks_only_where_they_can_be_had() -> None:
    for check_it in (
        lambda: check(Lark('start: %json {"uniqueItems": true}')),
        lambda: check(structural_tag({"type": "structural_tag", "format": TAGGED})),
    ):
        with pytest.raises(UnsupportedSchema, match="uniqueItems") as caught:
            check_it()
        assert "unsupported=" not in str(caught.value)
    with pytest.raises(InvalidRegex, match="lone surrogate"):
        check(Regex("\\ud83d"))


def test_a_misspelt_keyword_names_its_neighbour() -> None:
    with pytest.raises(UnsupportedSchema, match="did you mean 'properties'"):
        check_schema('{"propertis":{}}')


@pytest.mark.parametrize("text", ["{", "[1]", "3", '{"minimum":NaN}', "nul"])
def test_text_that_is_no_schema(text: str) -> None:
    with pytest.raises(InvalidSchema):
        check_schema(text)


def test_size_and_depth() -> None:
    deep: Any = {}
    for _ in range(DEFAULT_LIMITS.max_json_depth):
        deep = {"items": deep}
    with pytest.raises(ConstraintTooComplex, match="deeper than"):
        check_schema(json.dumps({"items": deep}))
    with pytest.raises(ConstraintTooComplex, match="deeper than"):
        check_schema("[" * 30_000 + "]" * 30_000)
    with pytest.raises(ConstraintTooComplex, match="bytes"):
        check_schema(json.dumps({"const": "x" * DEFAULT_LIMITS.max_schema_bytes}))
    check_schema('{"const":"xxxx"}', limits=Limits(max_schema_bytes=16))


def test_the_table_against_the_library() -> None:
    """Every enforced word is taken by the library. Of the refused ones it takes some without a word, and ignores them:
    the reason why there is a table of our own."""
    samples: dict[Kind, Any] = {
        Kind.SCHEMA_MAP: {},
        Kind.SCHEMAS: [{"type": "null"}],
        Kind.STRING: "uri",
        Kind.STRINGS: ["a"],
        Kind.VALUES: [1],
        Kind.COUNT: 1,
        Kind.NUMBER: 1,
        Kind.POSITIVE: 1,
        Kind.TYPE: "null",
    }
    own: dict[str, Any] = {"$ref": "#/$defs/a", "$defs": {"a": {}}, "uniqueItems": True, "minContains": 1}
    taken = set()
    for word, row in TABLES["llguidance"].items():
        schema = {"$defs": {"a": {}}, word: own.get(word, samples.get(row.kind, {}))}
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
        if not is_error:
            taken.add(word)
        assert row.support is not Support.ENFORCED or not is_error, (word, messages)
    refused = {word for word, row in TABLES["llguidance"].items() if row.support is Support.REFUSED}
    assert {"nullable", "additionalItems", "contentEncoding", "contentMediaType", "id"} <= refused & taken
    assert {"uniqueItems", "not", "if", "contains", "propertyNames"} <= refused - taken


def test_enforced_words_reach_the_library_and_annotations_do_not() -> None:
    for word, row in TABLES["llguidance"].items():
        value: Any = {Kind.SCHEMA_MAP: {}, Kind.SCHEMAS: [{}], Kind.STRING: "uri"}.get(row.kind, True)
        kept = rewritten({word: value}, DEFAULT_LIMITS)
        assert kept == {} if row.support is not Support.ENFORCED else set(kept) == {word}  # type: ignore[arg-type]


def test_every_format_of_the_table_is_enforced() -> None:
    for name in FORMATS["llguidance"]:
        matcher = COMPILER.compile(JsonSchema(canonical_schema({"type": "string", "format": name}))).matcher()
        token_ids = WORLD.encode('"@@ @@"')
        assert matcher.validate_tokens(token_ids) < len(token_ids), name


def test_subschemas_stop_at_data() -> None:
    schema: Any = {"enum": [{"items": {}}], "properties": {"items": {"const": {"items": {}}}}}
    assert [pointer for pointer, _ in subschemas(schema)] == ["", "/properties/items"]


# --- what the library refuses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "kind", "pointer"),
    [
        (
            {"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}},
            UnsupportedSchema,
            "/properties/a/oneOf",
        ),
        (
            {"patternProperties": {"^a": {"type": "integer"}, "b$": {"type": "null"}}},
            UnsupportedSchema,
            "/patternProperties",
        ),
        (
            {"type": "object", "properties": {"a": {}}, "maxProperties": 2},
            UnsupportedSchema,
            "/maxProperties",
        ),
        ({"type": "integer", "minimum": 5, "maximum": 3}, InvalidSchema, "/minimum"),
        ({"type": "string", "pattern": "^a+$", "maxLength": 0}, InvalidSchema, ""),
    ],
)
def test_combinations_refused_at_compilation(schema: Any, kind: type[SglError], pointer: str) -> None:
    with pytest.raises(kind) as caught:
        COMPILER.compile(JsonSchema(canonical_schema(schema)))
    assert type(caught.value) is kind
    assert caught.value.pointer == pointer
    assert caught.value.hint


# --- regexes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "match"),
    [
        ("(ab", "position 0"),
        ("a**", "position 2"),
        ("[b-a]", "bad character range"),
        ("a(?=b)", "look-around"),
        ("(?<!a)b", "negative look-around"),
        (r"(a)\1", "back-reference"),
        ("(a)?(?(1)b|c)", "conditional"),
        ("(?>a)", "atomic"),
        ("a++", "possessive"),
        (r"\bword", "word boundary"),
        ("a^b", "anchor"),
        ("(a$)*b", "anchor"),
        (r"[^\s\S]", "no character"),
    ],
)
def test_refused_regexes(pattern: str, match: str) -> None:
    with pytest.raises(InvalidRegex, match=match) as caught:
        COMPILER.compile(Regex(pattern))
    assert caught.value.hint


@pytest.mark.parametrize(
    "pattern", ["(" * 60_000, "(" * 200 + ")" * 200, "a{70000}", "a{1,99999999999}", "a" * 70_000, "\\w" * 9000]
)
def test_regexes_over_the_limits(pattern: str) -> None:
    with pytest.raises(ConstraintTooComplex):
        COMPILER.compile(Regex(pattern))


@pytest.mark.parametrize(
    ("pattern", "accepted", "refused"),
    [
        ("ab", ["ab", "xaby", "\nab"], ["a b", ""]),
        ("^ab", ["ab", "aby"], ["xab"]),
        ("ab$", ["ab", "xab"], ["aby", "ab\n"]),
        ("^a$|b", ["a", "xby"], ["ax"]),
        ("^(?<first>a|b)$", ["a", "b"], ["ab"]),
        (r"^\d$", ["5"], ["٣"]),
        (r"^\s$", [" ", "\ufeff", "\u2003"], ["a", "\x1c"]),
        (r"^\S$", ["a", "\x1c"], ["\ufeff", "\u00a0"]),
        ("^.$", ["a"], ["\n", "\r", "\u2028"]),
        ("", ["", "a"], []),
        ("^$", [""], ["a"]),
    ],
)
def test_schema_patterns_follow_ecma(pattern: str, accepted: list[str], refused: list[str]) -> None:
    grammar = COMPILER.compile(_whole(pattern))
    for text in [*accepted, *refused]:
        token_ids = WORLD.encode(json.dumps(text, ensure_ascii=False))
        taken = grammar.matcher().validate_tokens([*token_ids, WORLD.eos_ids[0]])
        assert (taken > len(token_ids)) == (text in accepted), repr(text)


def _whole(pattern: str) -> JsonSchema:
    return JsonSchema(canonical_schema({"type": "string", "pattern": pattern}))


# --- compiler ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "constraint",
    [
        Regex("(a|aa){1,5000}"),
        Regex("(.*a){3000}"),
        Regex("((a{1,1000}){1,1000}){1,1000}"),
        JsonSchema('{"type":"string","maxLength":65536}'),
        JsonSchema('{"type":"string","pattern":"^(a|b|[^c]d)*$","minLength":60000,"maxLength":65536}'),
        JsonSchema('{"type":"array","items":{"type":"integer"},"minItems":30000,"maxItems":100000}'),
    ],
)
def test_explosions_compile_or_are_refused_and_never_crash(constraint: Constraint) -> None:
    try:
        matcher = COMPILER.compile(constraint).matcher()
    except ConstraintTooComplex:
        return
    for _ in range(30):
        allowed = [token_id for token_id in WORLD.token_bytes if matcher.validate_tokens([token_id])]
        if not allowed:
            break
        assert matcher.accept(allowed[0])
    # A limit that is hit on the way has a name; it is never taken for an ordinary end.
    assert matcher.stop_reason() in (StopReason.NOT_STOPPED, StopReason.COMPLETE, StopReason.LIMIT)


@pytest.mark.parametrize(
    ("constraint", "kind"),
    [
        (Choices(()), InvalidConstraint),
        (Choices(("a\ud800",)), InvalidConstraint),
        (Regex("\ud800"), InvalidConstraint),
        (JsonSchema("{}", "wide"), InvalidConstraint),
        (Choices(tuple(map(str, range(2000)))), ConstraintTooComplex),
        (Choices(("x" * 70_000,)), ConstraintTooComplex),
    ],
)
def test_refused_without_an_engine(constraint: Constraint, kind: type[SglError]) -> None:
    with pytest.raises(kind) as caught:
        check(constraint)
    assert type(caught.value) is kind
    assert caught.value.hint


def test_lines_of_lark_are_read_in_linear_time() -> None:
    for text in ("a" * 60_000, "start: " + "b" * 60_000, "?" * 60_000):
        check(Lark(text))  # took minutes


def test_what_a_chain_of_references_comes_to_is_found_once() -> None:
    steps = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1000)}
    check(JsonSchema(json.dumps({"$defs": {**steps, "d1000": {}}, "$ref": "#/$defs/d0"})))
    with pytest.raises(InvalidSchema, match="leads back to itself"):
        check(JsonSchema(json.dumps({"$defs": {**steps, "d1000": {"$ref": "#/$defs/d0"}}, "$ref": "#/$defs/d0"})))


@pytest.mark.parametrize("name", ["limit_of_x", "regex_is_empty", "fuel"])
def test_what_the_caller_wrote_does_not_decide_the_kind_of_an_error(name: str) -> None:
    with pytest.raises(InvalidGrammar, match=f'unknown name: "{name}"'):
        COMPILER.compile(Lark(f"start: {name}"))


def test_what_cannot_be_decided_is_not_told_as_unsatisfiable() -> None:
    patterns = [{"pattern": f"{chr(97 + i)}.{{5}}{chr(98 + i)}"} for i in range(25)]
    with pytest.raises(ConstraintTooComplex, match="cannot tell whether anything satisfies"):
        COMPILER.compile(JsonSchema(json.dumps({"type": "string", "allOf": patterns})))


def test_cache_is_bounded_and_counts() -> None:
    compiler = new_compiler(cache_size=2)
    first = compiler.compile(Regex("a"))
    assert compiler.compile(Regex("a")) is first
    compiler.compile(Choices(("a",)))
    compiler.compile(Regex("a"))
    compiler.compile(Regex("b"))  # pushes the choices out, which were used longest ago
    assert (compiler.hits, compiler.misses, len(compiler)) == (2, 3, 2)
    assert compiler.compile(Regex("a")) is first
    compiler.compile(Choices(("a",)))
    assert (compiler.hits, compiler.misses) == (3, 4)


def test_failures_are_not_cached() -> None:
    compiler = new_compiler()
    for _ in range(2):
        with pytest.raises(InvalidRegex):
            compiler.compile(Regex("("))
    assert (compiler.misses, len(compiler)) == (2, 0)


def test_threads_share_a_compiler_and_a_grammar() -> None:
    compiler = new_compiler(cache_size=4)
    faults: list[BaseException] = []

    def work(offset: int) -> None:
        try:
            for index in range(40):
                word = f"{(index + offset) % 6}abc"
                matcher = compiler.compile(Regex(f"{word}|x") if index % 2 else Choices((word, "x"))).matcher()
                assert matcher.validate_tokens(WORLD.encode(word)) == len(WORLD.encode(word))
        except BaseException as error:  # noqa: BLE001 - carried to the test's own thread
            faults.append(error)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert compiler.hits + compiler.misses == 160
    assert len(compiler) <= 4


def test_bad_compiler_options() -> None:
    with pytest.raises(InvalidParameter, match="backend"):
        new_compiler(backend="nope")
    with pytest.raises(InvalidParameter, match="cache_size"):
        new_compiler(cache_size=0)
    assert set(BACKENDS) <= set(TABLES)


def test_nothing_heavy_is_imported_before_the_first_constraint() -> None:
    code = (
        "import sys; import sgl.grammars.compiler as c; c.check(c.Regex('a')); c.check(c.JsonSchema('{}'));"
        "print(sorted({'torch', 'llguidance', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
