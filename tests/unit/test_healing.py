"""Token healing: the last token of a text is drawn anew with what follows, where a longer one begins with it."""

from __future__ import annotations

from typing import Any

import tokenizers
from support.matcher_conformance import world
from support.scripted import Rig

from sgl.grammars.spec import Constraint, Regex
from sgl.lang.graph import (
    DeltaEvent,
    DoneEvent,
    Gen,
    Graph,
    LiteralText,
    Node,
    ProgramOptions,
    Role,
    Sampling,
    Text,
    TextEvent,
    ValueEvent,
)
from sgl.runtime.healing import find_seam
from sgl.runtime.text.tokenizer import Tokenizer

WORLD = world()
MERGED = Tokenizer(tokenizers.Tokenizer.from_str(WORLD.tokenizer_json), eos_ids=WORLD.eos_ids)
"""Bytes, and the tokens tr tru true fa ab abc 12 ": and a with a blank."""


class MergedRig(Rig):
    tokenizer = MERGED


def run(
    text: str, constraint: Constraint | None = None, *, n: int = 6, before: tuple[Node, ...] = (), **fields: Any
) -> tuple[ValueEvent, Rig]:
    rig = MergedRig()
    sampling = Sampling(max_new_tokens=n, temperature=0.0, **{"token_healing": True, **fields})
    first = len(before)
    nodes = (
        *before,
        Text(id=first, segments=(LiteralText(text),)),
        Gen(id=first + 1, name="x", constraint=constraint, sampling=sampling),
    )
    rig.core.open(0, ProgramOptions(stream=True))
    rig.core.submit(0, Graph(nodes=nodes), finish=True)
    rig.run()
    (event,) = rig.of(0, ValueEvent)
    return event, rig


def streamed(rig: Rig) -> str:
    return "".join(event.text for event in rig.events[0] if isinstance(event, TextEvent | DeltaEvent))


def test_what_may_be_drawn_at_a_seam() -> None:
    def drawn(text: str, constraint: Constraint | None = None) -> set[str]:
        compiler = MergedRig().core.compiler
        grammar = compiler.compile(constraint) if constraint is not None else None
        seam = find_seam(MERGED, MERGED.encode(text), grammar)
        return {MERGED.decode([token_id]) for token_id in seam.rests} if seam is not None else set()

    assert drawn("x t") == {"t", "tr", "tru", "true"}
    assert drawn("x tru") == {"tru", "true"}
    assert drawn("x true") == set()
    assert drawn("q") == set()
    assert drawn("") == set()
    assert drawn("\u00e9") == set(), "its last token begins inside a character"
    assert drawn("x t", Regex("r[a-z]*")) == {"t", "tr"}, "rue is no token that could be followed"
    assert drawn("xa", Regex("b|c")) == {"a", "ab"}
    assert drawn("xa", Regex("[0-9]")) == set()


def test_the_value_begins_after_the_text_and_the_state_holds_both() -> None:
    event, rig = run("say t")
    plain, _ = run("say t", token_healing=False)
    first = MERGED.decode(event.token_ids[:1])
    assert first.startswith("t")
    assert event.value == MERGED.decode(event.token_ids).removeprefix("t")
    assert event.usage.prompt_tokens == plain.usage.prompt_tokens - 1
    (done,) = rig.of(0, DoneEvent)
    assert done.usage.healed_tokens == 1
    assert rig.core.snapshot().healed_tokens == 1
    assert done.text == "say t" + event.value == streamed(rig)


def test_off_unless_asked_for_and_where_nothing_is_to_be_healed() -> None:
    for text, fields in (("say t", {"token_healing": False}), ("say q", {}), ("t", {}), ("say t", {"n": 0})):
        event, rig = run(text, **fields)
        (done,) = rig.of(0, DoneEvent)
        assert done.usage.healed_tokens == 0
        assert done.text == text + event.value == streamed(rig)


def test_the_constraint_begins_at_the_seam() -> None:
    event, rig = run("sea", Regex("b?c{2}d{3}"), n=12)
    assert event.value in ("bccddd", "ccddd")
    assert event.finish == "stop"
    (done,) = rig.of(0, DoneEvent)
    assert done.text == "sea" + event.value
    assert done.usage.healed_tokens == 1
    for budget in range(8, 12):
        assert run("sea", Regex("b?c{2}(d|e)*f"), n=budget)[0].value.endswith("f")


def test_a_token_over_the_seam_after_which_nothing_fits_is_the_texts_own() -> None:
    constraint = Regex("rue[0-9]{9}|x")
    (long,) = WORLD.encode("tr")
    for budget, begins in [(2, "x"), (6, "x"), (12, "rue")]:
        event, _ = run("say t", constraint, n=budget, logit_bias=((long, 100.0),), return_logprob=True)
        assert event.value.startswith(begins)
        assert event.truncated_at is None
        assert [entry.token_id for entry in event.logprobs] == list(event.token_ids)
        assert all(entry.logprob is not None for entry in event.logprobs)


def test_a_stop_inside_the_first_token_leaves_the_text_before_whole() -> None:
    for stop in ("r", "ru", "u", "e"):
        event, rig = run("say t", Regex("r?u?e?xyz"), n=12, stop=(stop,))
        (done,) = rig.of(0, DoneEvent)
        assert done.text == "say t" + event.value == streamed(rig)
        assert stop not in event.value


def test_inside_a_role_the_users_text_is_healed_and_the_templates_is_not() -> None:
    toy = Rig.tokenizer

    class ChatRig(Rig):
        tokenizer = Tokenizer(
            tokenizers.Tokenizer.from_str(WORLD.tokenizer_json),
            eos_ids=WORLD.eos_ids,
            chat_template=toy.chat_template,
        )

    begin = Role(id=0, role="assistant", begin=True)
    for text, num_healed in (("It is t", 1), ("", 0)):
        rig = ChatRig()
        nodes: tuple[Node, ...] = (
            begin,
            *([Text(id=1, segments=(LiteralText(text),))] if text else []),
            Gen(id=2, name="x", sampling=Sampling(max_new_tokens=4, temperature=0.0, token_healing=True)),
            Role(id=3, role="assistant", begin=False),
        )
        rig.core.open(0, ProgramOptions(stream=True))
        rig.core.submit(0, Graph(nodes=nodes), finish=True)
        rig.run()
        (done,), (event,) = rig.of(0, DoneEvent), rig.of(0, ValueEvent)
        assert done.usage.healed_tokens == num_healed
        assert f"assistant\n{text}{event.value}<|im_end|>" in done.text
        assert streamed(rig) == done.text
