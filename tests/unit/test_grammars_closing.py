"""A token budget ends in a complete text: completions that are found, and generations kept within reach of one."""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal
from math import inf
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.matcher_conformance import state, world
from support.schemas import random_schema
from support.scripted import Rig

from sgl.errors import InvalidConstraint
from sgl.grammars.closing import Steering
from sgl.grammars.compiler import GrammarCompiler
from sgl.grammars.lengths import lengths_of
from sgl.grammars.matcher import Matcher, StopReason, allocate_bitmask, bitmask_to_bool
from sgl.grammars.reasoning import Reasoning
from sgl.grammars.spec import Choices, Constraint, Ebnf, JsonSchema, Regex, canonical_schema, structural_tag
from sgl.lang.graph import Gen, Graph, LiteralText, ProgramOptions, Sampling, Text, ValueEvent

WORLD = world()
COMPILER = GrammarCompiler(WORLD.tokenizer_json, WORLD.vocab_size, WORLD.eos_ids)


def schema(value: Any) -> JsonSchema:
    return JsonSchema(canonical_schema(value))


TAGS = structural_tag(
    {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<f="],
            "tags": [
                {"type": "tag", "begin": "<f=a>", "content": {"type": "regex", "pattern": r"\d{2}"}, "end": "</f>"},
            ],
        },
    }
)  # fmt: skip


@pytest.mark.parametrize(
    ("constraint", "begun", "shortest"),
    [
        (Regex("xyz"), "x", "yz"),
        (Regex("(a|b)*c{3}"), "ab", "ccc"),
        (Regex("[a-z]+@[a-z]+[.]com"), "who", "@a.com"),
        (Regex(r"\d{3}-\d{4}(x\d+)?"), "12", "0-0000"),
        (Choices(("xbcdef", "xbz", "b")), "x", "bz"),
        (Ebnf('root ::= "(" root ")" | "x"'), "((", "x))"),
        (TAGS, "free text", ""),
        (TAGS, "text <f=a>1", "0</f>"),
        (schema({}), '{"a": ["b', '"]}'),
        (schema({"type": "string", "minLength": 4}), '"a', '000"'),
        (schema({"type": "object", "additionalProperties": {"type": "null"}}), '{"', '":null}'),
        (schema({"type": "array", "items": {"enum": ["long text", 7]}, "minItems": 1}), "[", "7]"),
    ],
)  # fmt: skip
def test_a_short_completion_is_found(constraint: Constraint, begun: str, shortest: str) -> None:
    matcher = COMPILER.compile(constraint).matcher()
    for token_id in WORLD.encode(begun):
        assert matcher.accept(token_id)
    before = state(matcher, WORLD)
    found = COMPILER.closer.find(matcher, len(shortest.encode()))
    assert state(matcher, WORLD) == before
    assert found is not None
    assert all(matcher.accept(token_id) for token_id in found)
    assert matcher.is_complete()


def test_what_is_longer_than_asked_for_is_not_found() -> None:
    grammar = COMPILER.compile(Regex("[xy]{9}"))
    assert COMPILER.closer.find(grammar.matcher(), 8) is None
    assert len(COMPILER.closer.find(grammar.matcher(), 9) or ()) == 9
    endless = COMPILER.compile(Regex("[a-z]{2,}7")).matcher()
    assert COMPILER.closer.find(endless, 4096) is not None, "though a greedy walk goes in circles"
    assert endless.stop_reason() is StopReason.NOT_STOPPED
    assert endless.validate_tokens(WORLD.encode("7")) == 0, "left as it was"
    assert COMPILER.closer.start(grammar, 8) is None
    assert COMPILER.closer.start(grammar) is COMPILER.closer.start(grammar, 9), "looked for once"


def draw(matcher: Matcher, steering: Steering | None, budget: int, rng: random.Random) -> tuple[list[int], int]:
    """What a model of random logits writes, and how many of its tokens were replaced."""
    assert steering is not None
    bitmask = allocate_bitmask(1, WORLD.vocab_size)
    written: list[int] = []
    num_replaced = 0
    while len(written) < budget and matcher.stop_reason() is StopReason.NOT_STOPPED:
        matcher.fill(bitmask, 0)
        token_id = rng.choice(np.flatnonzero(bitmask_to_bool(bitmask, WORLD.vocab_size)[0]).tolist())
        if token_id in WORLD.eos_ids:
            break
        assert matcher.accept(token_id)
        if not steering.keeps(token_id, budget - len(written) - 1):
            num_replaced += 1
            if steering.instead is None:
                break
            token_id = steering.instead
            assert matcher.accept(token_id)
            assert steering.keeps(token_id, budget - len(written) - 1)
        written.append(token_id)
    return written, num_replaced


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), budget=st.integers(1, 80))
@example(seed=4993, budget=50)  # "{" makes the shortest completion longer by 60 tokens, with 48 to spare
def test_what_a_random_model_writes_is_complete_wherever_a_completion_fits(seed: int, budget: int) -> None:
    rng = random.Random(seed)
    given_schema = random_schema(rng)
    try:
        grammar = COMPILER.compile(schema(given_schema))
    except InvalidConstraint:
        return
    start = COMPILER.closer.start(grammar, budget)
    matcher = grammar.matcher()
    written, _ = draw(matcher, COMPILER.closer.steering(grammar, matcher, budget), budget, rng)
    assert len(written) <= budget
    if start is not None:
        assert matcher.is_complete(), WORLD.text(written)
        jsonschema_rs.Draft202012Validator(given_schema).validate(json.loads(WORLD.text(written), parse_float=Decimal))


BRANCHES = schema(
    {
        "anyOf": [
            {"const": 0},
            {
                "type": "object",
                "properties": {
                    "id": {"type": "string", "format": "uuid"},
                    "more": {"type": "array", "minItems": 4, "items": {"enum": ["one long word", "another long word"]}},
                },
                "required": ["id"],
                "additionalProperties": False,
            },
        ]
    }
)  # fmt: skip


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_a_long_branch_is_not_begun_where_its_rest_does_not_fit(backend: str) -> None:
    if backend == "xgrammar":
        pytest.importorskip("xgrammar")
    grammar = COMPILER.compile(BRANCHES, backend)
    lengths = set()
    for budget in range(1, 180, 6):
        matcher = grammar.matcher()
        written, _ = draw(matcher, COMPILER.closer.steering(grammar, matcher, budget), budget, random.Random(budget))
        assert matcher.is_complete(), WORLD.text(written)
        lengths.add(len(written))
    assert len(lengths) > 5, "the long branch is taken where it fits"


@pytest.mark.parametrize("begun", ["", "<thi", "<think>", "<think>so</th"])
def test_reasoning_ends_in_time_for_what_follows_it(begun: str) -> None:
    grammar = COMPILER.after_reasoning(Reasoning("<think>", "</think>"), COMPILER.compile(BRANCHES))
    for budget in (30, 41, 90, 200):
        matcher = grammar.matcher()
        steering = COMPILER.closer.steering(grammar, matcher, budget)
        assert steering is not None
        begin = WORLD.encode(begun)
        for place, token_id in enumerate(begin):
            assert matcher.accept(token_id)
            assert steering.keeps(token_id, budget - place - 1)
        written, _ = draw(matcher, steering, budget - len(begin), random.Random(budget))
        assert len(written) <= budget - len(begin)
        assert matcher.is_complete()


def test_nothing_is_looked_for_while_whatever_is_left_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = COMPILER.compile(BRANCHES)
    COMPILER.closer.start(grammar)
    looks: list[int] = []
    find = COMPILER.closer.find
    monkeypatch.setattr(COMPILER.closer, "find", lambda *args, **kwargs: looks.append(1) or find(*args, **kwargs))
    matcher = grammar.matcher()
    written, num_replaced = draw(
        matcher, COMPILER.closer.steering(grammar, matcher, 400), 400, random.Random(7)
    )  # fmt: skip
    assert len(written) > 1
    assert (len(looks), num_replaced) == (0, 0)


def test_numbers_end_where_more_digits_could_follow_and_go_on_where_zeros_lead_nowhere() -> None:
    above_nine = {"type": "number", "exclusiveMinimum": 9, "maximum": 11}
    thousands = {"type": "integer", "multipleOf": 10_000}
    for items, begun, longest in [
        ({"type": "number"}, "[1", 3), (above_nine, "[9", 12), (above_nine, "[9.0", 11), (thousands, "[1", 7)
    ]:  # fmt: skip
        matcher = COMPILER.compile(schema({"type": "array", "items": items, "minItems": 2})).matcher()
        for token_id in WORLD.encode(begun):
            assert matcher.accept(token_id)
        found = COMPILER.closer.find(matcher, 100, search=False)
        assert found is not None
        assert len(found) <= longest, WORLD.text(found)


CHAIN = ['root ::= "x" | r1', *(f"r{n} ::= r{n + 1}" for n in range(1, 12)), f'r12 ::= "{"l" * 200}"']


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (Regex("ab|c{9}(x|yz)?"), (2, 14, 7)),
        (Choices(("b", "abcde")), (1, 5, 4)),
        (Ebnf('root ::= "(" root ")" | "x"'), (1, inf, 2)),
        (Ebnf('root ::= item*\nitem ::= "begin" "end"'), (0, 8, 8)),
        (Ebnf("\n".join(CHAIN)), (1, 200, 199)),
        (Ebnf("\n".join(reversed(CHAIN))), (1, 200, 199)),
        (TAGS, (0, 17, 11)),
        (schema({"enum": ["yes", "perhaps"]}), (5, 9, 4)),
        (schema({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}), (2, inf, 3)),
        (schema({"$ref": "#x", "$defs": {"a/b": {"$anchor": "x", "const": None}}}), (4, 4, 0)),
        (schema({"anyOf": [False, {"type": "string", "format": "uuid"}, {"type": "null"}]}), (4, 43, 34)),
        (schema({"properties": {"a": {"const": 12}}, "required": ["a"], "type": "object"}), (9, inf, 8)),
    ],
)  # fmt: skip
def test_lengths_of_completions_are_told_from_the_constraint(
    constraint: Constraint, expected: tuple[float, ...]
) -> None:
    assert tuple(lengths_of(constraint)) == expected


def generate(constraint: Constraint, budget: int, **fields: Any) -> ValueEvent:
    rig = Rig()
    sampling = Sampling(max_new_tokens=budget, **{"temperature": 0.0, **fields})
    node = Gen(id=1, name="x", constraint=constraint, sampling=sampling)
    rig.core.open(0, ProgramOptions())
    rig.core.submit(0, Graph(nodes=(Text(id=0, segments=(LiteralText("q:"),)), node)), finish=True)
    rig.run()
    (event,) = rig.of(0, ValueEvent)
    return event


def test_other_constraints_end_complete_too_and_tokens_that_were_not_drawn_have_log_probabilities() -> None:
    for budget in range(6, 20):
        event = generate(Regex("[a-z]+@[a-z]+"), budget, return_logprob=True)
        assert re.fullmatch("[a-z]+@[a-z]+", event.value)
        assert [entry.token_id for entry in event.logprobs] == list(event.token_ids)
        assert all(entry.logprob is not None and entry.logprob <= 0 for entry in event.logprobs)
        assert event.usage.completion_tokens == len(event.token_ids) == budget


def test_a_text_that_is_complete_ends_before_a_token_that_would_open_it_again() -> None:
    pattern = r"[a-z]{3}(,[a-z]{3})*"
    for budget in range(3, 20):
        event = generate(Regex(pattern), budget, temperature=2.0, seed=budget)
        assert re.fullmatch(pattern, event.value)
        assert event.truncated_at is None
