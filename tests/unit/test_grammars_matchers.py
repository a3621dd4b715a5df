"""Every matcher of the grammars room against the conformance suite, and the suite against broken matchers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import matcher_conformance as conformance

from sgl.errors import ConstraintTooComplex, InvalidConstraint
from sgl.grammars.choices import ChoicesGrammar, Vocabulary
from sgl.grammars.compiler import GrammarCompiler
from sgl.grammars.llguidance_backend import MAX_FORCED
from sgl.grammars.matcher import CompiledGrammar, Matcher, StopReason, allocate_bitmask, bitmask_to_bool, prepare
from sgl.grammars.spec import Choices, Constraint, JsonSchema, Regex

WORLD = conformance.world()
COMPILER = GrammarCompiler(WORLD.tokenizer_json, WORLD.vocab_size, WORLD.eos_ids)

WORDS = ["true", "trap", "fab", "fabulous", "12", "é", "日本", "a a"]
RECORD = (
    '{"type":"object","properties":{"a":{"type":"integer"},"b":{"enum":["true","12"]}},'
    '"required":["a","b"],"additionalProperties":false}'
)
CONSTRAINTS: dict[str, Constraint] = {
    "regex-literal": Regex("abc true"),
    "regex-optional": Regex("ab?c?"),
    "regex-star": Regex("(true|12)*"),
    "regex-empty": Regex(""),
    "regex-unicode": Regex("[é日]{1,2}x"),
    "regex-any": Regex("."),
    "schema-bool": JsonSchema('{"type":"boolean"}'),
    "schema-record": JsonSchema(RECORD),
    "schema-compact": JsonSchema(RECORD, "compact"),
    "schema-string": JsonSchema('{"type":"string","maxLength":3}'),
    "schema-any": JsonSchema("{}"),
    "schema-short-numbers": JsonSchema('{"type":"array","items":{"type":"number"}}', "compact", 3),
    "choices": Choices(tuple(WORDS)),
    "choices-one": Choices(("abc true",)),
    "choices-empty-text": Choices(("", "ab")),
    "choices-only-empty": Choices(("",)),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_conformance(name: str, seed: int) -> None:
    grammar = COMPILER.compile(CONSTRAINTS[name])
    assert isinstance(grammar, CompiledGrammar)
    assert isinstance(grammar.matcher(), Matcher)
    conformance.check_walk(grammar, WORLD, random.Random(seed))


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_reference_conforms(seed: int) -> None:
    conformance.check_walk(conformance.ReferenceGrammar(WORDS, WORLD), WORLD, random.Random(seed))


def _mutants() -> dict[str, type[Any]]:
    base = conformance.ReferenceMatcher

    class ForgetsRollback(base):  # type: ignore[misc,valid-type]
        def rollback(self, num_tokens: int) -> None:
            super().rollback(max(0, num_tokens - 1) if num_tokens <= len(self.accepted) else num_tokens)

    class SharesClone(base):  # type: ignore[misc,valid-type]
        def clone(self) -> Any:
            return type(self)(self.grammar, self.accepted)

    class AlwaysEnds(base):  # type: ignore[misc,valid-type]
        def follows(self, token_id: int) -> bool:
            return token_id in WORLD.eos_ids or super().follows(token_id)

    class AllowsPadding(base):  # type: ignore[misc,valid-type]
        def fill(self, bitmask: Any, row: int) -> None:
            super().fill(bitmask, row)
            bitmask[row, -1] = -1

    class WritesNextRow(base):  # type: ignore[misc,valid-type]
        def fill(self, bitmask: Any, row: int) -> None:
            super().fill(bitmask, row)
            bitmask[row + 1, 0] = 0

    class MovesOnRefusal(base):  # type: ignore[misc,valid-type]
        def accept(self, token_id: int) -> bool:
            if super().accept(token_id):
                return True
            if token_id in WORLD.token_bytes:
                self.accepted.append(token_id)
            return False

    class AcceptsAnything(base):  # type: ignore[misc,valid-type]
        def accept(self, token_id: int) -> bool:
            self.accepted.append(token_id)
            return True

    class ForcesWrongly(base):  # type: ignore[misc,valid-type]
        def forced_tokens(self) -> list[int]:
            rest = [word[len(self.text()) :] for word in self.grammar.words if word.startswith(self.text())]
            return list(rest[0][:1]) if rest else []

    class NeverStops(base):  # type: ignore[misc,valid-type]
        def stop_reason(self) -> StopReason:
            return StopReason.NOT_STOPPED

    class ForgetsEnd(base):  # type: ignore[misc,valid-type]
        def is_complete(self) -> bool:
            return super().is_complete() and not self.accepted

    class CountsTooFew(base):  # type: ignore[misc,valid-type]
        def validate_tokens(self, token_ids: Any) -> int:
            return min(1, super().validate_tokens(token_ids))

    class RollsPastStart(base):  # type: ignore[misc,valid-type]
        def rollback(self, num_tokens: int) -> None:
            del self.accepted[max(0, len(self.accepted) - num_tokens) :]

    kinds = [ForgetsRollback, SharesClone, AlwaysEnds, AllowsPadding, WritesNextRow, MovesOnRefusal]
    kinds += [AcceptsAnything, ForcesWrongly, NeverStops, ForgetsEnd, CountsTooFew, RollsPastStart]
    return {kind.__name__: kind for kind in kinds}


@pytest.mark.parametrize("name", _mutants())
def test_a_wrong_matcher_fails(name: str) -> None:
    grammar = conformance.ReferenceGrammar(WORDS, WORLD, _mutants()[name])

    def suite() -> None:
        for seed in range(20):
            conformance.check_walk(grammar, WORLD, random.Random(seed))
        conformance.check_language(grammar, WORLD, WORDS, [])

    with pytest.raises(AssertionError):
        suite()


@pytest.mark.parametrize(
    ("constraint", "words", "others"),
    [
        (Choices(tuple(WORDS)), WORDS, ["", "tru", "truee", "f", "fabu", "1", "本"]),
        (Regex("true|trap|fab(ulous)?|12|é|日本|a a"), WORDS, ["", "tru", "truee", "f", "fabu", "1", "本"]),
        (JsonSchema('{"type":"boolean"}'), ["true", "false"], ["", "tru", "True", "null", " true", "true "]),
        (Regex(""), [""], ["a", " "]),
        (JsonSchema('{"enum":["a",1,null]}'), ['"a"', "1", "null"], ["a", "12", '"ab"', "nul"]),
    ],
)
def test_language(constraint: Constraint, words: list[str], others: list[str]) -> None:
    conformance.check_language(COMPILER.compile(constraint), WORLD, words, others)
    conformance.check_language(conformance.ReferenceGrammar(words, WORLD), WORLD, words, others)


def test_whitespace_policies() -> None:
    schema = '{"type":"object","properties":{"a":{"type":"array","items":{"type":"null"}}},"required":["a"]}'
    tight, spaced = '{"a":[null,null]}', '{ "a" : [ null , null ] }'
    wide = ['{  "a":[]}', '{\n"a":[]}', '{"a":[] }\n', ' {"a":[]}', '{"a":[]}  ']
    conformance.check_language(COMPILER.compile(JsonSchema(schema, "compact")), WORLD, [tight], [spaced, *wide])
    conformance.check_language(COMPILER.compile(JsonSchema(schema, "bounded")), WORLD, [tight, spaced], wide)


def test_numbers_are_bounded() -> None:
    grammar = COMPILER.compile(JsonSchema('{"type":"array","items":{"type":"number"}}', "compact", 4))
    words = ["[1234,-123]", "[1.25]", "[1e10]", "[1e-12]", "[]"]
    conformance.check_language(grammar, WORLD, words, ["[12345]", "[-1234]", "[1.255]", "[1e105]"])
    top = COMPILER.compile(JsonSchema('{"type":"integer"}', max_number_len=2))
    conformance.check_language(top, WORLD, ["12", "-1", "0"], ["123", "-123"])
    constant = COMPILER.compile(JsonSchema('{"enum":["12345678",123456789012]}', max_number_len=3))
    conformance.check_language(constant, WORLD, ["123456789012", '"12345678"'], ["123"])
    default = COMPILER.compile(JsonSchema('{"type":"number"}'))
    conformance.check_language(
        default,
        WORLD,
        ["1" * 32, "-2.2250738585072014e-308", "1E+99"],
        ["1" * 40, "1e1001", "1e100", "1e-1000", "1.5E-00001"],
    )


def test_a_long_forced_text_is_asked_for_once() -> None:
    """Asking at each token for all that is left would be quadratic."""
    matcher = COMPILER.compile(Regex("x(ab){3000}c?")).matcher()
    asked = 0

    class Counted:
        def __init__(self, library: Any) -> None:
            self.library = library

        def __getattr__(self, name: str) -> Any:
            nonlocal asked
            asked += name == "compute_ff_tokens"
            return getattr(self.library, name)

    matcher._library = Counted(matcher._library)  # type: ignore[attr-defined]
    for taken in range(600):
        forced = matcher.forced_tokens()
        if taken % 100 == 0:
            fresh = matcher.clone().forced_tokens()
            assert forced[:100] == fresh[:100]
        assert len(forced) <= MAX_FORCED
        assert matcher.accept(forced[0])
    assert asked == 1
    matcher.rollback(600)
    assert matcher.forced_tokens()[:1] == WORLD.encode("x")


@pytest.mark.parametrize(
    "constraint", [Regex("(a{9000}){9000}"), JsonSchema('{"type":"array","items":{"const":"abc"},"minItems":200000}')]
)
def test_a_text_that_no_generation_could_complete_is_refused(constraint: Constraint) -> None:
    with pytest.raises(ConstraintTooComplex, match="longer than the 524,288 bytes"):
        COMPILER.compile(constraint)


def test_forced_text_is_canonical() -> None:
    text = "abc true"
    for constraint in (Regex(text), Choices((text,)), JsonSchema('{"const":"abc true"}', "compact")):
        written = f'"{text}"' if isinstance(constraint, JsonSchema) else text
        assert COMPILER.compile(constraint).matcher().forced_tokens() == WORLD.encode(written)


def test_two_options_force_what_they_share() -> None:
    matcher = COMPILER.compile(Choices(("12 abc", "12 true"))).matcher()
    shared = matcher.forced_tokens()
    assert WORLD.text(shared).startswith("12")
    assert WORLD.encode("12 abc")[: len(shared)] == WORLD.encode("12 true")[: len(shared)] == shared


@pytest.mark.parametrize("constraint", [Regex(""), Choices(("",))])
def test_empty_text_is_complete_at_once(constraint: Constraint) -> None:
    matcher = COMPILER.compile(constraint).matcher()
    assert matcher.is_complete()
    assert matcher.stop_reason() is StopReason.COMPLETE
    assert matcher.accept(WORLD.eos_ids[0])
    assert matcher.stop_reason() is StopReason.EOS


def test_wider_bitmask_rows_allow_nothing_beyond_the_vocabulary() -> None:
    for constraint in (Regex("a"), Choices(("a",))):
        bitmask = allocate_bitmask(1, WORLD.vocab_size + 100)
        COMPILER.compile(constraint).matcher().fill(bitmask, 0)
        assert np.unpackbits(bitmask.view(np.uint8)).sum() == 1


def test_model_vocabulary_smaller_than_the_tokenizers() -> None:
    compiler = GrammarCompiler(WORLD.tokenizer_json, 256, WORLD.eos_ids)
    bitmask = allocate_bitmask(1, 256)
    matcher = compiler.compile(Regex("[ab]{2}")).matcher()
    matcher.fill(bitmask, 0)
    letters = [token_id for token_id, text in WORLD.token_bytes.items() if text in (b"a", b"b")]
    assert np.flatnonzero(bitmask_to_bool(bitmask, 256)).tolist() == sorted(letters)
    assert matcher.validate_tokens(WORLD.encode("ab")) == 0  # the merged token has no logit
    assert matcher.validate_tokens(letters) == 2


def test_vocabulary_without_the_bytes_is_a_dead_end() -> None:
    vocabulary = Vocabulary({0: b"a", 1: b"b"}, 3, [2], lambda text: [byte - 97 for byte in text])
    grammar = ChoicesGrammar(["ac"], vocabulary)
    matcher = grammar.matcher()
    assert matcher.accept(0)
    assert matcher.stop_reason() is StopReason.DEAD_END
    with pytest.raises(InvalidConstraint, match="choices is empty"):
        ChoicesGrammar([], vocabulary)


def test_rows_that_are_computed_together_are_those_computed_alone() -> None:
    rng = random.Random(0)
    grammars = [COMPILER.compile(constraint) for constraint in CONSTRAINTS.values()]
    for _ in range(6):
        together, alone = [], []
        for grammar in grammars:
            matcher = grammar.matcher()
            for _ in range(rng.randint(0, 8)):
                allowed = sorted(conformance.allowed_ids(matcher, WORLD))
                if not allowed or not matcher.accept(rng.choice(allowed)):
                    break
            together.append(matcher)
            alone.append(matcher.clone())
        vocab_size = WORLD.vocab_size
        bitmask, expected = (allocate_bitmask(len(together) + 1, vocab_size) for _ in range(2))
        prepare(together, 2, bitmask, range(len(together)))
        assert (bitmask[-1] == -1).all(), "a row of nobody's was written"
        for row, (left, right) in enumerate(zip(together, alone, strict=True)):
            left.fill(bitmask, row)
            right.fill(expected, row)
            left.fill(bitmask, row)  # nothing is left to do
        assert bitmask.tolist() == expected.tolist()
        for left, right in zip(together, alone, strict=True):
            assert conformance.state(left, WORLD) == conformance.state(right, WORLD)
