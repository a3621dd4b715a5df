"""EBNF, Lark and structural tags: what they match, exactly, and what is refused, with the place."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import matcher_conformance as conformance

import sgl
from sgl.errors import ConstraintTooComplex, InvalidGrammar, InvalidParameter, InvalidRegex, SglError, UnsupportedSchema
from sgl.grammars import ebnf
from sgl.grammars.compiler import GrammarCompiler, check
from sgl.grammars.spec import Constraint, Ebnf, Lark, StructuralTag, constraint_of, structural_tag
from sgl.lang.expr import GenExpr
from sgl.runtime.engine import Engine

WORLD = conformance.world()
COMPILER = GrammarCompiler(WORLD.tokenizer_json, WORLD.vocab_size, WORLD.eos_ids)
JSON_EBNF = r"""
# JSON, as grammars for llama.cpp write it
root   ::= value
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
EBNF: dict[str, tuple[str, list[str], list[str]]] = {
    "capitals": (
        'root ::= city " is " status\ncity ::= "London" | "Paris"\nstatus ::= "a " thing\nthing ::= "city" | "town"',
        ["London is a city", "Paris is a town"],
        ["", "London", "Rome is a city", "London is a city "],
    ),
    "repeats": ("root ::= [a-c]{2} 'x'?".replace("'", '"'), ["ab", "ccx"], ["a", "abc", "abxx"]),
    "open repeat": ('root ::= "a"{2,} [0-9]{1,3} "b"*', ["aa1", "aaaa123bb"], ["a1", "aa", "aa1234"]),
    "zero": ('root ::= "a"{0} "b"{0,2} "c"+', ["c", "bbc", "cc"], ["ac", "bbbc", ""]),
    "classes": (r'root ::= [^a-y\n] [\]\-x] [\x41-\x43] "\u00e9"', ["z]Aé", "Z-Cé", "éxBé"], ["a]Aé", "z]Dé", "\n]Aé"]),
    "dash at the end": ("root ::= [a-]+", ["a-a", "-"], ["b"]),
    "any": ("root ::= . .", ["ab", "é日", "\n\n"], ["a", "abc"]),
    "escapes": (r'root ::= "a\"\\\n\t\x62" "\U0001F600"', ['a"\\\n\tb😀'], ["a"]),
    "unicode": ('root ::= "日" [é-ë]+', ["日é", "日êë"], ["日", "日e"]),
    "nested groups": ('root ::= (("a" | ("b" "c")*) "d")+', ["ad", "bcbcd", "dad"], ["a", "bd"]),
    "comments": ('root ::= "a" # "b"\n  # nothing\n  | "c"  # more', ["a", "c"], ["ab", "b"]),
    "alternatives on lines": ('root ::=\n  "a"\n  | x\nx ::=\n  "b"\n  "c"', ["a", "bc"], ["b", "abc"]),
    "empty": ('root ::= "" | "a" e\ne ::= ', ["", "a"], ["b"]),
    "not the longest word": ('root ::= "abc" | [a-z] "bd"', ["abc", "abd"], ["abcd", "ab"]),
    "recursive, not the longest word": ('root ::= "abc" | [a-z] "bd" | "(" root ")"', ["abc", "(abd)"], ["(abc", "ab"]),
    "balanced": ('root ::= "(" root ")" root | ""', ["", "()", "(())()"], ["(", ")("]),
    "left recursion": ('root ::= root "," item | item\nitem ::= [ab]+', ["a", "ab,b,a"], [",", "a,"]),
    "json": (JSON_EBNF, ['{"a": [1, -2.5e3, true]}', '"é\\n\\u00e9"', "[]", "null"], ['{"a"}', "[1,]", "tru", '"\n"']),
    "deep groups": (f'root ::= {"(" * 60}[ab] "c"{")?" * 60}', ["", "ac"], ["c", "aac"]),
}


@pytest.mark.parametrize("name", EBNF)
def test_ebnf_language(name: str) -> None:
    grammar, words, others = EBNF[name]
    conformance.check_language(COMPILER.compile(Ebnf(grammar)), WORLD, words, others)


@pytest.mark.parametrize(
    ("grammar", "line", "column", "says"),
    [
        ('root ::= "a', 1, 10, "not closed"),
        ('root ::= "a"\nx = "b"', 2, 3, "has '=' where"),
        ('= "a"', 1, 1, "a rule: name ::="),
        ("root", 1, 5, "expects ::="),
        ('root ::= "a"\n  b', 2, 3, "not defined"),
        ("root ::= [a", 1, 10, "not closed by ]"),
        ("root ::= [z-a]", 1, 11, "end is before its start"),
        ('root ::= ("a"', 1, 10, "not closed"),
        ('root ::= "a")', 1, 13, "nothing opened"),
        ('root ::= * "a"', 1, 10, "repeats nothing"),
        ('root ::= "a"{3,1}', 1, 13, "repeats 3 to 1"),
        ('root ::= "a"{x}', 1, 13, "cannot be read"),
        (r'root ::= "\q"', 1, 11, "unknown escape"),
        (r'root ::= "\uD800"', 1, 11, "no character"),
        ("root ::= []", 1, 10, "no character is in"),
        ('start ::= "a"', 1, 1, "no rule 'root'"),
        ("", 1, 1, "no rule 'root'"),
        ('root ::= "a"\nroot ::= "b"', 2, 1, "twice"),
        ('root ::= "a" root', 1, 1, "never end"),
        ('root ::= "x" | loop\nloop ::= "y" loop', 2, 1, "never end"),
        ("root ::= <[1]>", 1, 10, "expects"),
    ],
)
def test_ebnf_errors_say_where(grammar: str, line: int, column: int, says: str) -> None:
    with pytest.raises(InvalidGrammar, match=says.replace("(", r"\(")) as caught:
        check(Ebnf(grammar))
    assert (caught.value.details["line"], caught.value.details["column"]) == (line, column)
    assert caught.value.hint


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "' + "a" * 70_000 + '"',
        "root ::= " + "(" * 80 + '"a"' + ")" * 80,
        'root ::= "a"{100000}',
        'root ::= (("a"{1000}){1000}){1000}',
        "root ::= r0\n" + "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(2000)) + 'r2000 ::= "b"',
    ],
)
def test_ebnf_over_a_limit(grammar: str) -> None:
    with pytest.raises(ConstraintTooComplex):
        check(Ebnf(grammar))


LETTERS = st.sampled_from("abcé")
NODES: st.SearchStrategy[ebnf.Node] = st.recursive(
    st.text(LETTERS, max_size=3).map(ebnf.Text)
    | st.lists(LETTERS, min_size=1, max_size=3).map(
        lambda found: ebnf.Chars(tuple(sorted((ord(c), ord(c)) for c in found)))
    ),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(lambda items: ebnf.Sequence(tuple(items)))
        | st.lists(inner, min_size=1, max_size=3).map(lambda items: ebnf.Choice(tuple(items)))
        | st.tuples(inner, st.integers(0, 2), st.integers(2, 3)).map(lambda found: ebnf.Repeat(*found))
    ),
    max_leaves=6,
)


def words_of(node: ebnf.Node) -> set[str]:
    """Every text up to a length, worked out from the meaning alone."""
    if isinstance(node, ebnf.Text):
        found = {node.text}
    elif isinstance(node, ebnf.Chars):
        found = {chr(low) for low, _ in node.ranges}
    elif isinstance(node, ebnf.Choice):
        found = set().union(*map(words_of, node.items))
    elif isinstance(node, ebnf.Sequence):
        found = {""}
        for item in node.items:
            found = {a + b for a in found for b in words_of(item) if len(a + b) <= 5}
    elif isinstance(node, ebnf.Repeat):
        inner, found, so_far = words_of(node.item), set(), {""}
        for count in range((node.high or 0) + 1):
            found |= so_far if count >= node.low else set()
            so_far = {a + b for a in so_far for b in inner if len(a + b) <= 5}
    else:
        raise TypeError(node)
    return {word for word in found if len(word) <= 5}


def written(node: ebnf.Node) -> str:
    if isinstance(node, ebnf.Text):
        return json.dumps(node.text, ensure_ascii=False)
    if isinstance(node, ebnf.Chars):
        return "[" + "".join(chr(low) for low, _ in node.ranges) + "]"
    if isinstance(node, ebnf.Repeat):
        return f"({written(node.item)}){{{node.low},{node.high}}}"
    assert isinstance(node, (ebnf.Sequence, ebnf.Choice))
    return "(" + (" " if isinstance(node, ebnf.Sequence) else " | ").join(map(written, node.items)) + ")"


@settings(max_examples=40, deadline=None)
@given(node=NODES, recursive=st.booleans(), texts=st.lists(st.text(LETTERS, max_size=5), max_size=6))
def test_ebnf_means_what_it_says(node: ebnf.Node, recursive: bool, texts: list[str]) -> None:
    words = words_of(node)
    option = ' | "(" root ")"' if recursive else ""
    grammar = COMPILER.compile(Ebnf(f"root ::= x{option}\nx ::= {written(node)}"))
    for text in {*texts, *sorted(words)[:8]}:
        conformance.check_language(grammar, WORLD, [text] if text in words else [], [] if text in words else [text])


# --- Lark -------------------------------------------------------------------------------------------------------------


def test_lark_language() -> None:
    fields = '"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false'
    text = (
        'start: "call " name args // a comment with %json {\nname: /[a-z]+/\n'
        f'args: %json {{"type": "object", "title": "t",\n {fields}}}\n'
    )
    conformance.check_language(
        COMPILER.compile(Lark(text)),
        WORLD,
        ['call f{"a":12}', 'call fab{ "a" : 1 }'],
        ["call f", 'call f{"a":"x"}', 'call f{  "a":1}'],
    )


@pytest.mark.parametrize(
    ("text", "kind", "line"),
    [
        ('start: "a" b', InvalidGrammar, 1),
        ('start: "a"\nb: [', InvalidGrammar, 2),
        ('start: "a"\nx: %json {"a": }', InvalidGrammar, 2),
        ('\nstart: %json {"properties": {"a": {"uniqueItems": true}}}', UnsupportedSchema, 2),
        ("%import common.INT\nstart: INT", InvalidGrammar, 1),
    ],
)
def test_lark_errors_say_where(text: str, kind: type[SglError], line: int) -> None:
    with pytest.raises(kind) as caught:
        COMPILER.compile(Lark(text))
    assert caught.value.details["line"] == line


@pytest.mark.parametrize(
    "text",
    [
        "start: " + "(" * 100 + '"a"' + ")" * 100,
        "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(3000)) + 'r3000: "b"',
        "start: /" + "a" * 70_000 + "/",
    ],
)
def test_lark_over_a_limit(text: str) -> None:
    with pytest.raises(ConstraintTooComplex):
        check(Lark(text))


# --- structural tags --------------------------------------------------------------------------------------------------

INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def tag(begin: str, content: Any, end: Any = "") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": value}


def triggered(**options: Any) -> dict[str, Any]:
    tags = [tag("<f=ab>", schema(INTEGER), "</f>"), tag("<f=abc>", schema({"type": "boolean"}), "</f>")]
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": tags, **options}


REGEX = {"type": "regex", "pattern": "[a-z<]+"}
TEXT = {"type": "any_text"}
TAGS: dict[str, tuple[Any, list[str], list[str]]] = {
    "triggered": (
        triggered(),
        ["", "free <f text", 'x<f=ab>{"a":12}</f>', 'x<f=ab>{"a":1}</f> and <f=abc>true</f>.'],
        ["<f=", "<f=x>", '<f=ab>{"a":true}</f>', '<f=ab>{"a":1}', "<f=abc>true</f><f="],
    ),
    "at least one": (
        triggered(at_least_one=True),
        ['<f=ab>{"a":12}</f>', "<f=abc>true</f> more"],
        ["", "text", "<f=abc>true"],
    ),
    "first only": (
        triggered(stop_after_first=True),
        ["", "text", "text <f=abc>true</f>"],
        ["<f=abc>true</f> more", "<f=abc>true"],
    ),
    "exactly one": (
        triggered(at_least_one=True, stop_after_first=True),
        ["<f=abc>true</f>"],
        ["", "x<f=abc>true</f>", "<f=abc>true</f>x"],
    ),
    "excludes": (triggered(excludes=["ab"]), ["a b", "x<f=abc>true</f>"], ["xab"]),
    "separator": (
        {"type": "tags_with_separator", "tags": triggered()["tags"], "separator": ", "},
        ["", "<f=abc>true</f>", '<f=abc>true</f>, <f=ab>{"a":1}</f>'],
        ["<f=abc>true</f>, ", "x"],
    ),
    "thought, then a tag": (
        {"type": "sequence", "elements": [tag("<t>", TEXT, "</t>"), triggered()]},
        ["<t></t>", "<t>a </t b</t>x <f=abc>true</f>"],
        ["", "<t>", "<t>a", "<t>a</t><f=x"],
    ),
    "several ends": (tag("(", TEXT, [")", "]"]), ["(ab)", "(ab]"], ["(ab", "(a)b]"]),
    "regex before an end": (
        {"type": "sequence", "elements": [tag("(", REGEX, "<)"), {"type": "const_string", "value": "b"}, TEXT]},
        ["(a<)b", "(a<<)b<)"],
        ["(<)", "(a<)", "(a"],
    ),
    "regular parts": (
        {
            "type": "sequence",
            "elements": [
                {"type": "regex", "pattern": "[0-9]+"},
                {"type": "optional", "content": {"type": "const_string", "value": "."}},
                {
                    "type": "or",
                    "elements": [{"type": "const_string", "value": "7"}, {"type": "regex", "pattern": "ab?"}],
                },
            ],
        },
        ["127", "1.7", "12ab", "77"],
        ["1", "7", "1.", "7.b"],
    ),
    "star and plus": (
        {
            "type": "sequence",
            "elements": [
                {"type": "plus", "content": schema({"type": "boolean"})},
                {"type": "star", "content": {"type": "const_string", "value": ";"}},
            ],
        },
        ["true", "truefalse", "true;;"],
        ["", ";", "true;true"],
    ),
    "recursive grammar": (
        tag("<g>", {"type": "grammar", "grammar": 'root ::= "a" root "b" | "c"'}, "</g>"),
        ["<g>c</g>", "<g>aacbb</g>"],
        ["<g>acbb</g>", "<g>c"],
    ),
    "plain": ({"type": "const_string", "value": 'a"\n/é'}, ['a"\n/é'], ["a"]),
}


@pytest.mark.parametrize("name", TAGS)
def test_structural_tag_language(name: str) -> None:
    fmt, words, others = TAGS[name]
    constraint = structural_tag({"type": "structural_tag", "format": fmt})
    conformance.check_language(COMPILER.compile(constraint), WORLD, words, others)


def test_legacy_form_is_the_same() -> None:
    _, words, others = TAGS["triggered"]
    structures = [
        {"begin": "<f=ab>", "schema": INTEGER, "end": "</f>"},
        {"begin": "<f=abc>", "schema": {"type": "boolean"}, "end": "</f>"},
    ]
    constraint = structural_tag({"type": "structural_tag", "structures": structures, "triggers": ["<f="]})
    conformance.check_language(COMPILER.compile(constraint), WORLD, words, others)


def test_special_token_is_written_as_itself() -> None:
    special = len(WORLD.token_bytes) + 1
    begin = conformance.SPECIALS[1]
    fmt = {"type": "triggered_tags", "triggers": [begin], "tags": [tag(begin + "f ", schema({"type": "boolean"}), ";")]}
    matcher = COMPILER.compile(structural_tag({"type": "structural_tag", "format": fmt})).matcher()
    path = [*WORLD.encode("ab"), special, *WORLD.encode("f true;ab")]
    assert matcher.validate_tokens(path) == len(path)
    assert special in conformance.allowed_ids(matcher, WORLD)
    for token_id in path[:-1]:
        assert matcher.accept(token_id)
        assert (special in conformance.allowed_ids(matcher, WORLD)) == (token_id in (path[0], path[-2]))
    plain = COMPILER.compile(structural_tag({"type": "structural_tag", "format": TEXT})).matcher()
    assert not plain.accept(special)


@pytest.mark.parametrize(
    ("value", "kind", "pointer"),
    [
        ({"type": "structural_tag"}, InvalidGrammar, ""),
        ({"format": TEXT}, InvalidGrammar, "/type"),
        ({"type": "structural_tag", "format": {"type": "nope"}}, InvalidGrammar, "/format/type"),
        ({"type": "structural_tag", "format": {"type": "const_string"}}, InvalidGrammar, "/format"),
        ({"type": "structural_tag", "format": {"type": "any_text", "max_tokens": 3}}, InvalidGrammar, "/format"),
        ({"type": "structural_tag", "format": triggered(triggers=[])}, InvalidGrammar, "/format/triggers"),
        ({"type": "structural_tag", "format": triggered(tags=[])}, InvalidGrammar, "/format/tags"),
        ({"type": "structural_tag", "format": triggered(triggers=["<g"])}, InvalidGrammar, "/format/tags/0/begin"),
        (
            {"type": "structural_tag", "format": triggered(triggers=["<f=", "<f=a"])},
            InvalidGrammar,
            "/format/triggers/1",
        ),
        (
            {"type": "structural_tag", "format": triggered(tags=[tag("<f=", schema({"not": {}}), "x")])},
            UnsupportedSchema,
            "/format/tags/0/content/json_schema/not",
        ),
        (
            {
                "type": "structural_tag",
                "structures": [{"begin": "<f", "schema": {"items": {"contains": {}}}, "end": ""}],
                "triggers": ["<f"],
            },
            UnsupportedSchema,
            "/structures/0/schema/items/contains",
        ),
        (
            {"type": "structural_tag", "format": tag("a", {"type": "regex", "pattern": "("}, "b")},
            InvalidRegex,
            "/format/content/pattern",
        ),
        (
            {"type": "structural_tag", "format": {"type": "sequence", "elements": [TEXT, TEXT]}},
            InvalidGrammar,
            "/format/elements/0",
        ),
    ],
)
def test_structural_tag_errors_have_a_pointer(value: Any, kind: type[SglError], pointer: str) -> None:
    with pytest.raises(kind) as caught:
        check(StructuralTag(json.dumps(value)))
    assert caught.value.details["pointer"] == pointer


WALKED: dict[str, Constraint] = {
    "ebnf-json": Ebnf(JSON_EBNF),
    "ebnf-regular": Ebnf(EBNF["nested groups"][0]),
    "ebnf-left": Ebnf(EBNF["left recursion"][0]),
    "lark": Lark('start: "ab" x\nx: /[12]+/ | "(" x ")"'),
    "tags": structural_tag({"type": "structural_tag", "format": triggered()}),
    "tags-once": structural_tag(
        {"type": "structural_tag", "format": triggered(at_least_one=True, stop_after_first=True)}
    ),
    "tags-text": structural_tag({"type": "structural_tag", "format": TAGS["thought, then a tag"][0]}),
}


@pytest.mark.parametrize("name", WALKED)
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_conformance(name: str, seed: int) -> None:
    conformance.check_walk(COMPILER.compile(WALKED[name]), WORLD, random.Random(seed))


# --- as users give them -----------------------------------------------------------------------------------------------


def test_parameters_of_an_engine_call(dummy_engine: Engine) -> None:
    tags = {"type": "structural_tag", "format": triggered(at_least_one=True, stop_after_first=True)}
    given = [{"ebnf": 'root ::= "a" root "b" | "c"'}, {"lark": 'start: "12" /[ab]{3}/'}, {"structural_tag": tags}]
    given += [{"structural_tag": json.dumps(tags)}, {"json_schema": list[bool]}]
    outputs = dummy_engine.generate(["x"] * 5, [{**one, "max_new_tokens": 300, "seed": 3} for one in given])
    texts = [output["text"] for output in outputs if output["meta_info"]["finish_reason"]["type"] == "stop"]
    patterns = ["a*cb*", "12[ab]{3}", r"(?s)<f=(ab|abc)>.*</f>", r"(?s)<f=(ab|abc)>.*</f>", r"\[.*\]"]
    assert len(texts) >= 2
    for output, pattern in zip(outputs, patterns, strict=True):
        if output["meta_info"]["finish_reason"]["type"] == "stop":
            assert re.fullmatch(pattern, output["text"]), output["text"]
    with pytest.raises(InvalidParameter, match="ebnf and lark are both given"):
        dummy_engine.generate("x", {"ebnf": "root ::= x", "lark": "start: x"})
    with pytest.raises(InvalidGrammar, match="line 1, column 10"):
        dummy_engine.generate("x", {"ebnf": "root ::= x"})


def test_arguments_of_gen() -> None:
    for name, value in {"ebnf": "root ::= [ab]", "lark": "start: /[ab]/", "structural_tag": {"type": "x"}}.items():
        expr = sgl.gen("x", **{name: value})
        assert isinstance(expr, GenExpr)
        assert expr.constraint == constraint_of({name: value})
        with pytest.raises(InvalidParameter, match="both given"):
            sgl.gen("x", regex="a", **{name: value})
        with pytest.raises(InvalidParameter, match="both given"):
            sgl.gen("x", choices=["a", "b"], **{name: value})
    for bad in ({"ebnf": 3}, {"lark": b"x"}, {"structural_tag": "{"}, {"structural_tag": [1]}):
        with pytest.raises(InvalidGrammar):
            constraint_of(bad)
