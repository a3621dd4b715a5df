"""Constraints behind reasoning, and reasoning budgets: the matcher, and what holds a generation in an engine."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from support.matcher_conformance import State, state, world

from sgl.errors import InvalidParameter
from sgl.grammars.compiler import GrammarCompiler
from sgl.grammars.formats import REASONING_FORMATS, ReasoningFormat, message_parser, reasoning_format
from sgl.grammars.matcher import CompiledGrammar, StopReason, allocate_bitmask, bitmask_to_bool
from sgl.grammars.reasoning import Reasoning, ReasoningMatcher
from sgl.grammars.spec import Choices, Regex
from sgl.lang.graph import Gen, Sampling
from sgl.runtime.generation import Generation
from sgl.runtime.plan import RowResult
from sgl.runtime.thinking import ReasoningCount, reasoning_section

WORLD = world()
COMPILER = GrammarCompiler(WORLD.tokenizer_json, WORLD.vocab_size, WORLD.eos_ids)
DIGITS = COMPILER.compile(Regex("[0-9]{3}"))
THINK = Reasoning("<think>", "</think>")


def matcher(inner: CompiledGrammar | None = DIGITS, **section: Any) -> ReasoningMatcher:
    fields = {"begin": THINK.begin, "end": THINK.end, **section}
    return COMPILER.after_reasoning(Reasoning(**fields), inner).matcher()


def follow(following: ReasoningMatcher, text: str) -> bool:
    """Whether a text is accepted, in its canonical tokens."""
    return all(following.accept(token_id) for token_id in WORLD.encode(text))


def allowed(following: ReasoningMatcher) -> set[int]:
    bitmask = allocate_bitmask(1, WORLD.vocab_size)
    following.fill(bitmask, 0)
    return set(np.flatnonzero(bitmask_to_bool(bitmask, WORLD.vocab_size)[0]).tolist())


@pytest.mark.parametrize(
    ("text", "is_open", "complete"),
    [
        ("<think>so: 1 < 2, </thin>k</think>123", False, True),
        ("so</think>\n\n123", True, True),
        ("123", False, True),
        ("<think>123", False, False),
        ("123", True, False),
        ("</think>12", True, False),
    ],
)
def test_the_constraint_begins_behind_the_reasoning(text: str, is_open: bool, complete: bool) -> None:
    following = matcher(is_open=is_open)
    assert follow(following, text)
    assert following.is_complete() == complete
    assert (following.stop_reason() is StopReason.COMPLETE) == complete


@pytest.mark.parametrize("inner", [COMPILER.compile(Regex(r"(?s).*")), None])
@pytest.mark.parametrize("lead", ["", "\n"])
def test_the_answer_is_what_the_matcher_takes_for_it(inner: CompiledGrammar | None, lead: str) -> None:
    grammar = COMPILER.after_reasoning(THINK, inner)
    following, text = grammar.matcher(), f"{lead}<think>so</think>12"
    assert follow(following, text)
    assert grammar.answer(text) == ("12" if following.num_reasoning_tokens else text)


@pytest.mark.parametrize("text", ["so</think>x", "so</think>\n\n\n", "so</think> 123", "</think>1234"])
def test_nothing_gets_past_the_constraint(text: str) -> None:
    assert not follow(matcher(is_open=True), text)


def test_the_end_cannot_come_inside() -> None:
    following = matcher(is_open=True, excludes=("<|im_start|>",))
    assert not allowed(following) & {*WORLD.eos_ids, following._grammar.tables.vocabulary.specials["<|im_start|>"]}
    assert follow(following, "x</think>123")
    assert allowed(following) == set(WORLD.eos_ids)


def test_a_token_that_ends_the_reasoning_and_goes_on_is_not_allowed() -> None:
    """`tru` would end a reasoning whose marker ends in `t` and begin the answer with `ru`."""
    following = matcher(is_open=True, end="</t")
    assert follow(following, "so</")
    ids = {text: token_id for token_id, text in WORLD.token_bytes.items()}
    assert not following.accept(ids[b"tru"])
    assert following.accept(ids[b"t"])
    assert follow(following, "123")


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("inner", [DIGITS, None])
def test_the_budget_is_exact(budget: int, inner: CompiledGrammar | None) -> None:
    following = matcher(inner, is_open=True, max_tokens=budget)
    for _ in range(budget):
        assert not following.forced_tokens()
        assert follow(following, "a")
    end = WORLD.encode("</think>")
    assert following.forced_tokens() == end
    assert allowed(following) == {end[0]}
    assert follow(following, "</think>")
    assert following.num_reasoning_tokens == budget
    assert follow(following, "123")


@pytest.mark.parametrize("fmt", REASONING_FORMATS, ids=lambda fmt: fmt.name)
def test_the_budget_is_exact_in_every_format(fmt: ReasoningFormat) -> None:
    prompt = f"Q?{fmt.begin[0]}\n"
    section = reasoning_section(
        Gen(
            id=0,
            name="x",
            reasoning=fmt.name,
            constraint=Regex("[0-9]{3}"),
            sampling=Sampling(max_reasoning_tokens=3),
        ),
        prompt,
        None,
    )
    assert section is not None
    following = COMPILER.after_reasoning(section, DIGITS).matcher()
    text = "aaa"
    assert follow(following, text)
    assert following.forced_tokens() == WORLD.encode(fmt.end[0])
    assert follow(following, fmt.end[0] + "123")
    assert following.is_complete()
    assert following.num_reasoning_tokens == len(WORLD.encode("a")) * 3
    message = message_parser(reasoning=fmt, prompt=prompt).parse(f"{text}{fmt.end[0]}123")
    assert (message.reasoning, message.content) == (text, "123")


class Bytes:
    """The world's tokens as a decoder sees them."""

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        return WORLD.token_bytes.get(token_id, b"")


@pytest.mark.parametrize(
    ("text", "is_open", "count"),
    [
        ("<think>true, ab</think>123", False, 4 + 7),  # "true", ",", " a", "b", and an end marker but its last token
        ("<think></think>123", False, 7),
        ("\u00e9\u00e9", True, 4),  # characters of two tokens
        ("123", False, 0),
        ("", True, 0),
    ],
)
def test_tokens_of_reasoning_are_counted_with_a_matcher_and_without_alike(text: str, is_open: bool, count: int) -> None:
    following = matcher(is_open=is_open)
    assert follow(following, text)
    counting = ReasoningCount(reasoning_format("qwen3"), "<think>" if is_open else "", Bytes())
    generations = [
        Generation(Sampling(temperature=0.0), Bytes(), frozenset(), seed=0, max_new_tokens=99, **held)
        for held in ({"matcher": following}, {"reasoning": counting}, {})
    ]
    for token_id in WORLD.encode(text):
        generations[1].push(RowResult(sequence=0, token_id=token_id))
    assert [generation.num_reasoning_tokens for generation in generations] == [count, count, 0]


def test_a_budget_that_ends_within_a_character_of_the_end_marker() -> None:
    end = "◁/think▷"
    following = matcher(begin="◁think▷", end=end, is_open=True, max_tokens=1)
    first = next(token_id for token_id, text in WORLD.token_bytes.items() if text == end.encode()[:1])
    assert following.accept(first)
    assert b"".join(WORLD.token_bytes[i] for i in following.forced_tokens()) == end.encode()[1:]


def test_reasoning_that_does_not_come_has_no_budget() -> None:
    following = matcher(None, max_tokens=1)
    assert follow(following, " An answer without it, <think>for once.")
    assert WORLD.eos_ids[0] in allowed(following)


def walk(seed: int, inner: CompiledGrammar | None, **section: Any) -> tuple[list[int], list[State], ReasoningMatcher]:
    """A random text that likes markers, with what the matcher showed at each place."""
    rng, following = random.Random(seed), matcher(inner, **section)
    path: list[int] = []
    states = [state(following, WORLD)]
    wanted: list[int] = []
    while len(path) < 40:
        options = sorted(allowed(following) - set(WORLD.eos_ids))
        if not options:
            break
        wanted = wanted or WORLD.encode(rng.choice(["<think>", "</think>", "\n", "a", "<", "12"]))
        token_id = wanted.pop(0)
        if token_id not in options:
            token_id, wanted = rng.choice(options), []
        assert following.accept(token_id)
        path.append(token_id)
        states.append(state(following, WORLD))
    return path, states, following


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("max_tokens", [None, 3])
@pytest.mark.parametrize("inner", [DIGITS, COMPILER.compile(Choices(("<thing>", "<think"))), None])
def test_rollback_and_clone_lead_back_to_each_place(
    is_open: bool, max_tokens: int | None, inner: CompiledGrammar | None
) -> None:
    for seed in range(3):
        path, states, following = walk(seed, inner, is_open=is_open, max_tokens=max_tokens)
        rng = random.Random(seed)
        for _ in range(6):
            to = rng.randint(0, len(path))
            other = following.clone()
            other.rollback(len(path) - to)
            assert state(other, WORLD) == states[to]
            assert other.validate_tokens(path[to:]) == len(path) - to
        assert state(following, WORLD) == states[len(path)]


TEMPLATE = "{% if enable_thinking %}<think>{% endif %}<|im_start|>"


@pytest.mark.parametrize(
    ("node", "prompt", "template", "expected"),
    [
        (Gen(id=0, name="x"), "", TEMPLATE, None),
        (Gen(id=0, name="x", reasoning="qwen3"), "", TEMPLATE, None),
        (Gen(id=0, name="x", reasoning="deepseek-r1", constraint=Regex("a")), "Q", "", (True, None)),
        (Gen(id=0, name="x", reasoning="deepseek-r1", constraint=Regex("a")), "<think>\n\n</think>", "", (False, None)),
        (Gen(id=0, name="x", sampling=Sampling(max_reasoning_tokens=5)), "<think>\n", TEMPLATE, (True, 5)),
        (Gen(id=0, name="x", sampling=Sampling(max_reasoning_tokens=5)), "Q", TEMPLATE, (False, 5)),
    ],
)
def test_what_is_held_follows_from_the_node_and_the_prompt(
    node: Gen, prompt: str, template: str, expected: tuple[bool, int | None] | None
) -> None:
    section = reasoning_section(node, prompt, template)
    assert (section and (section.is_open, section.max_tokens)) == expected


def test_a_budget_without_reasoning_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="has no reasoning"):
        reasoning_section(Gen(id=0, name="x", sampling=Sampling(max_reasoning_tokens=5)), "", "{{ messages }}")
