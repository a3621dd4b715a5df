"""Forced tokens on real models: the embedded one with and without, and the bits of deterministic mode."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from sgl.grammars.spec import Constraint, JsonSchema, Regex
from sgl.lang.graph import Event, Gen, Graph, LiteralText, ProgramOptions, Sampling, Text, Usage, ValueEvent
from sgl.runtime.config import EngineConfig
from sgl.runtime.core import EngineCore
from sgl.runtime.engine_start import build_core

CHARACTER = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "house": {"enum": ["Gryffindor", "Slytherin", "Ravenclaw", "Hufflepuff"]},
        "blood status": {"enum": ["Pure-blood", "Half-blood", "Muggle-born"]},
        "alive": {"type": "boolean"},
    },
    "required": ["name", "house", "blood status", "alive"],
    "additionalProperties": False,
}
CONSTRAINTS: list[Constraint] = [
    JsonSchema(json.dumps(CHARACTER), whitespace="compact"),
    JsonSchema(json.dumps(CHARACTER), whitespace="bounded"),
    Regex(r'\{\n   "name": "[A-Za-z ]{1,12}",\n   "house": "(Gryffindor|Slytherin)",\n   "patronus": "[a-z]{1,8}"\n\}'),
]


def load(**fields: object) -> tuple[EngineCore, list[tuple[int, Event]]]:
    events: list[tuple[int, Event]] = []
    core, _ = build_core(EngineConfig(**fields), emit=lambda program, event: events.append((program, event)))  # type: ignore[arg-type]
    return core, events


def run(
    engine: tuple[EngineCore, list[tuple[int, Event]]], *, off: bool, **sampling: Any
) -> tuple[list[ValueEvent], int, int]:
    """The values of all constraints, decoded together, without their counters; forwards and forced tokens."""
    core, events = engine
    events.clear()
    config = msgspec.structs.replace(core.config, disable_forced_tokens=off)
    core.apply(config, core.limits)
    before = core.snapshot().as_dict()
    for program, constraint in enumerate(CONSTRAINTS):
        fields = {"max_new_tokens": 120, "temperature": 0.0, **sampling}
        gen = Gen(id=1, name="x", constraint=constraint, sampling=Sampling(**fields))
        core.open(program, ProgramOptions())
        core.submit(
            program, Graph(nodes=(Text(id=0, segments=(LiteralText("Harry Potter as JSON: "),)), gen)), finish=True
        )
    while core.has_work:
        core.step()
    after = core.snapshot()
    after.check()
    values = {program: event for program, event in events if isinstance(event, ValueEvent)}
    same = {"usage": Usage(), "latency_s": 0.0, "first_s": 0.0, "forced": ()}  # what may differ
    plain = [msgspec.structs.replace(values[p], **same) for p in sorted(values)]
    assert len(plain) == len(CONSTRAINTS)
    return plain, after.forwards - before["forwards"], after.forced_tokens - before["forced_tokens"]


def test_the_embedded_model_says_the_same_in_fewer_forwards() -> None:
    engine = load(model_path="smollm2-135m", dtype="float32", max_total_tokens=1024)
    values, forwards, forced = run(engine, off=False, max_new_tokens=26)
    plain, all_forwards, none = run(engine, off=True, max_new_tokens=26)
    assert [(v.value, v.token_ids) for v in values] == [(v.value, v.token_ids) for v in plain]
    assert none == 0
    assert forced > 0
    assert forwards < all_forwards


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}])
def test_deterministic_mode_gives_the_same_bits(fields: dict[str, Any]) -> None:
    engine = load(
        model_path="dummy", max_total_tokens=2048, num_threads=1, enable_deterministic_inference=True
    )  # fmt: skip
    fields = {**fields, "return_logprob": True, "top_logprobs_num": 4, "logprob_start_len": 0}
    values, forwards, forced = run(engine, off=False, **fields)
    plain, all_forwards, _ = run(engine, off=True, **fields)
    assert values == plain, "log-probabilities included"
    assert forced > 0
    assert forwards < all_forwards
