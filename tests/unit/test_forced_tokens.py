"""Forced tokens: with them on and off the same comes out, in fewer forwards, in every mix of parameters."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import msgspec
import pytest
from support.scripted import Rig

from sgl.grammars.compiler import GrammarCompiler
from sgl.grammars.spec import Choices, Constraint, JsonSchema, Regex
from sgl.lang.graph import (
    DeltaEvent,
    FailedEvent,
    Gen,
    Graph,
    LiteralText,
    ProgramOptions,
    Sampling,
    Text,
    Usage,
    ValueEvent,
)

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema(value: dict[str, Any], whitespace: str = "compact") -> JsonSchema:
    return JsonSchema(json.dumps(value), whitespace=whitespace)


CONSTRAINTS: dict[str, Constraint] = {
    "object": schema(PERSON),
    "bounded whitespace": schema(PERSON, "bounded"),
    "nested": schema({
        "type": "object",
        "properties": {"point": {"type": "object", "properties": {"x": {"enum": [1, 2]}, "y": {"type": "boolean"}},
                                 "required": ["x", "y"], "additionalProperties": False}},
        "required": ["point"], "additionalProperties": False,
    }),
    "enum": schema({"enum": ["alpha one", "alpha two", "beta"]}),
    "const": schema({"const": {"fixed": [1, 2, 3]}}),
    "array": schema({"type": "array", "items": {"enum": ["left", "right"]}, "minItems": 2, "maxItems": 3}),
    "union": schema({"anyOf": [{"type": "null"}, {"const": "null and void"}]}),
    "optional": schema({"type": "object", "properties": {"first": {"type": "boolean"}, "second": {"type": "null"}},
                        "additionalProperties": False}),
    "regex": Regex(r"Name: [a-z]{3}, Age: [0-9]{2}\."),
    "regex with a tail": Regex(r"The answer is (yes|no)(, really)?"),
    "choices": Choices(("the first option", "the second option", "the second opinion")),
    "one choice": Choices(("only this",)),
}  # fmt: skip
FREE_FORM = {"enum", "union", "optional"}
"""Where nothing need be forced for long enough to save a forward."""


@cache
def compiler() -> GrammarCompiler:
    """Shared by all rigs, which have the same tokenizer."""
    tokenizer = Rig.tokenizer
    return GrammarCompiler(tokenizer.to_json(), tokenizer.vocab_size, sorted(tokenizer.eos_ids))


def new_rig(**config: object) -> Rig:
    rig = Rig(**config)
    rig.core.compiler = compiler()
    return rig


def run(
    constraint: Constraint | None, *, off: bool = False, prompt: str = "q:", then: bool = False,
    stream: bool = False, n: int = 60, rows: int = 1, config: dict[str, Any] | None = None, **sampling: object,
) -> Rig:  # fmt: skip
    rig = new_rig(disable_forced_tokens=off, **(config or {}))
    for row in range(rows):
        fields = {"max_new_tokens": n, "temperature": 0.0, **sampling}
        nodes: list[Any] = [
            Text(id=0, segments=(LiteralText(prompt + str(row)),)),
            Gen(id=1, name="x", constraint=constraint, sampling=Sampling(**fields)),
        ]
        if then:
            nodes += [
                Text(id=2, segments=(LiteralText(" and"),)),
                Gen(id=3, name="y", sampling=Sampling(max_new_tokens=3, temperature=0.0)),
            ]
        rig.core.open(row, ProgramOptions(stream=stream))
        rig.core.submit(row, Graph(nodes=tuple(nodes)), finish=True)
    rig.run()
    assert rig.core.snapshot().num_running == 0
    return rig


def outcome(rig: Rig, row: int = 0) -> list[Any]:
    """Everything about the values and failures but how they were counted."""
    same = {"usage": Usage(), "latency_s": 0.0, "first_s": 0.0, "forced": ()}
    values = [msgspec.structs.replace(event, **same) for event in rig.of(row, ValueEvent)]
    return [*values, *(event.error.code for event in rig.of(row, FailedEvent))]


def pair(constraint: Constraint | None, rows: int = 1, **fields: Any) -> tuple[Rig, Rig]:
    """With and without forced tokens, after checking that the same came out."""
    on, off = run(constraint, rows=rows, **fields), run(constraint, rows=rows, off=True, **fields)
    assert [outcome(on, row) for row in range(rows)] == [outcome(off, row) for row in range(rows)]
    assert outcome(on)
    return on, off


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_greedy_output_is_the_same_in_fewer_forwards(name: str) -> None:
    on, off = pair(CONSTRAINTS[name], then=True)
    stats, plain = on.core.snapshot(), off.core.snapshot()
    assert plain.forced_tokens == 0
    assert stats.forced_tokens + stats.decode_tokens == plain.decode_tokens
    (usage, _), (other, _) = ([event.usage for event in rig.of(0, ValueEvent)] for rig in (on, off))
    assert (usage.completion_tokens, usage.prompt_tokens) == (other.completion_tokens, other.prompt_tokens)
    if name in FREE_FORM:
        assert stats.forwards <= plain.forwards
    else:
        assert stats.forced_tokens > 0
        assert stats.forwards < plain.forwards
        assert stats.forwards == plain.forwards - stats.forced_tokens + (name in ("const", "one choice"))


def test_json_saves_more_than_half_of_its_forwards() -> None:
    on, off = pair(CONSTRAINTS["nested"])
    assert 2 * on.core.snapshot().forwards < off.core.snapshot().forwards


@pytest.mark.parametrize("name", ["object", "regex", "choices"])
@pytest.mark.parametrize("seed", range(3))
def test_a_seed_draws_the_same(name: str, seed: int) -> None:
    pair(CONSTRAINTS[name], temperature=1.3, seed=seed, top_p=0.9)


MIXES: dict[str, dict[str, Any]] = {
    "stop string in a forced run": {"stop": ("Age",)},
    "stop string over its edge": {"stop": (", A",)},
    "stop kept": {"stop": ("ge:",), "no_stop_trim": True},
    "stop pattern": {"stop_regex": ("A[a-g]",)},
    "stop id": {"stop_token_ids": (ord("g"),)},
    "stop id kept": {"stop_token_ids": (ord("g"),), "no_stop_trim": True},
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.4},
    "bias": {"logit_bias": ((ord("e"), 7.0), (ord("5"), 50.0))},
    "log-probabilities": {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": (65, 66)},
    "of the prompt, too": {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2},
    "log-probabilities of a stop": {"return_logprob": True, "stop": ("Age",)},
    "log-probabilities of a kept stop": {"return_logprob": True, "stop_token_ids": (103,), "no_stop_trim": True},
    "log-probabilities in small steps": {"return_logprob": True, "config": {"chunked_prefill_size": 2}},
    "pages of four": {"return_logprob": True, "config": {"num_pages": 64, "page_size": 4}},
    "no cache": {"config": {"disable_radix_cache": True}},
    "small steps": {"config": {"chunked_prefill_size": 3}},
}


@pytest.mark.parametrize("mix", MIXES)
def test_mixes(mix: str) -> None:
    on, _ = pair(CONSTRAINTS["regex"], then=True, **MIXES[mix])
    assert on.core.snapshot().forced_tokens > 0


@pytest.mark.parametrize("name", ["regex", "one choice"])
def test_a_budget_may_end_anywhere_in_a_run(name: str) -> None:
    for n in range(1, 24):
        on, _ = pair(CONSTRAINTS[name], n=n, return_logprob=n % 2 == 0)
        (event,) = on.of(0, ValueEvent)
        assert len(event.token_ids) <= n


def test_a_forced_token_has_the_log_probability_of_the_model() -> None:
    on, _ = pair(CONSTRAINTS["one choice"], return_logprob=True, top_logprobs_num=1)
    (event,) = on.of(0, ValueEvent)
    assert on.core.snapshot().forced_tokens == len(event.token_ids) == len(event.logprobs) == 9
    assert all(entry.logprob is not None and entry.logprob < 0 and entry.top for entry in event.logprobs)


def test_an_output_that_is_wholly_forced_costs_the_prompt_alone() -> None:
    on, _ = pair(CONSTRAINTS["one choice"])
    assert on.core.snapshot().forwards == 1
    assert on.runner.plans[0].chunks[0].sample is None


def test_streams_say_everything_once() -> None:
    rig = run(CONSTRAINTS["object"], stream=True)
    (event,) = rig.of(0, ValueEvent)
    deltas = rig.of(0, DeltaEvent)
    assert "".join(delta.text for delta in deltas) == event.value
    assert tuple(i for delta in deltas for i in delta.token_ids) == event.token_ids
    assert any(len(delta.token_ids) > 1 for delta in deltas)


def test_pressure_changes_nothing() -> None:
    long = Regex(r"(Name: [a-z]{3}, Age: [0-9]{2}\.){4}")
    on, off = pair(long, rows=6, prompt="z" * 20, n=90, return_logprob=True, config={"num_pages": 120})
    assert off.core.snapshot().retractions
    assert on.core.snapshot().retractions
    assert on.core.snapshot().recomputed_tokens


def test_retraction_in_the_middle_of_a_run() -> None:
    """Every request is put back once, whatever it was about to compute."""
    whole = run(CONSTRAINTS["object"], rows=3, return_logprob=True)
    for at in range(1, 8):
        rig = new_rig()
        for row in range(3):
            node = Gen(
                id=1, name="x", constraint=CONSTRAINTS["object"],
                sampling=Sampling(max_new_tokens=60, temperature=0.0, return_logprob=True),
            )  # fmt: skip
            rig.core.open(row, ProgramOptions())
            rig.core.submit(row, Graph(nodes=(Text(id=0, segments=(LiteralText(f"q:{row}"),)), node)), finish=True)
        rig.run(most_steps=at, to_end=False)
        scheduler = rig.core.scheduler
        for request in list(scheduler.running):
            scheduler._put_back(request)
        rig.core.flush_cache() if not scheduler.has_work else scheduler.paging.flush()
        rig.run()
        assert [outcome(rig, row) for row in range(3)] == [outcome(whole, row) for row in range(3)]


def test_abort_leaves_nothing() -> None:
    for steps in range(1, 6):
        rig = new_rig()
        for row in range(2):
            node = Gen(id=1, name="x", constraint=CONSTRAINTS["object"], sampling=Sampling(max_new_tokens=60))
            rig.core.open(row, ProgramOptions())
            rig.core.submit(row, Graph(nodes=(Text(id=0, segments=(LiteralText("q:"),)), node)), finish=True)
        rig.run(most_steps=steps, to_end=False)
        rig.core.cancel(0)
        rig.run()
        stats = rig.core.snapshot()
        stats.check()
        assert (stats.pages_held, stats.num_running, stats.num_programs) == (0, 0, 0)
        assert len(rig.of(1, ValueEvent)) == 1


def test_rows_that_are_forced_and_rows_that_are_free_share_steps() -> None:
    rig = new_rig()
    alone = run(None, n=12)
    for row, constraint in enumerate([None, CONSTRAINTS["object"]]):
        node = Gen(id=1, name="x", constraint=constraint, sampling=Sampling(max_new_tokens=12, temperature=0.0))
        rig.core.open(row, ProgramOptions())
        rig.core.submit(row, Graph(nodes=(Text(id=0, segments=(LiteralText("q:0"),)), node)), finish=True)
    rig.run()
    assert outcome(rig, 0) == outcome(alone)
