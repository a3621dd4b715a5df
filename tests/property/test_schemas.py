"""Many random schemas: what decodes under the mask is valid for jsonschema-rs, or the schema was refused by name.

The schemas are drawn from the keywords of the table, so that keywords meet that no hand-written test combines.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from decimal import Decimal

import jsonschema_rs
import pytest
from support.grammar_walks import walk
from support.matcher_conformance import world
from support.schemas import random_schema

from sgl.errors import ConstraintTooComplex, InvalidSchema, UnsupportedSchema
from sgl.grammars.compiler import GrammarCompiler
from sgl.grammars.spec import JsonSchema, canonical_schema

WORLD = world()
COMPILER = GrammarCompiler(WORLD.tokenizer_json, WORLD.vocab_size, WORLD.eos_ids)


def decode(seeds: range) -> Counter[str]:
    """Compile and walk one schema per seed; what became of them."""
    found: Counter[str] = Counter()
    for seed in seeds:
        schema = random_schema(random.Random(seed))
        for whitespace in ("compact", "bounded"):
            try:
                grammar = COMPILER.compile(JsonSchema(canonical_schema(schema), whitespace))
            except (UnsupportedSchema, InvalidSchema, ConstraintTooComplex) as error:
                found[type(error).__name__ if error.hint and "pointer" in error.details else "untyped"] += 1
                continue
            path = walk(grammar, random.Random(seed))
            if path is None:
                found["unfinished"] += 1
                continue
            text = WORLD.text(path)
            validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
            assert validator.is_valid(json.loads(text, parse_float=Decimal)), (seed, schema, text)
            found["valid"] += 1
    return found


def test_random_schemas() -> None:
    found = decode(range(200))
    assert found["valid"] >= 280, found
    assert found["unfinished"] <= 8, found
    assert not found["untyped"], found


@pytest.mark.slow
def test_many_random_schemas() -> None:
    found = decode(range(200, 2200))
    assert found["valid"] >= 2500, found
