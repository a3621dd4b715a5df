"""Random JSON schemas from the words of the keyword table, so that words meet which no hand-written test combines."""

from __future__ import annotations

import random
from typing import Any

NAMES = ["a", "b", "name", "x y", "é"]


def random_schema(rng: random.Random, depth: int = 3) -> Any:
    """One schema; deeper ones are objects, arrays and alternatives of smaller ones."""
    if depth == 0 or rng.random() < 0.3:
        return scalar(rng)
    kind = rng.choice(["object", "object", "array", "anyOf", "oneOf", "allOf", "ref"])
    if kind == "object":
        names = rng.sample(NAMES, rng.randint(1, 3))
        schema: dict[str, Any] = {"type": "object", "properties": {n: random_schema(rng, depth - 1) for n in names}}
        schema["required"] = rng.sample(names, rng.randint(0, len(names)))
        schema["additionalProperties"] = rng.choice([False, False, {"type": "null"}])
        return schema
    if kind == "array":
        schema = {"type": "array", "items": random_schema(rng, depth - 1), "maxItems": rng.randint(1, 3)}
        if rng.random() < 0.3:
            schema["prefixItems"] = [random_schema(rng, depth - 1)]
        return {**schema, "minItems": rng.randint(0, schema["maxItems"])}
    if kind == "ref":
        return {"$defs": {"d": scalar(rng)}, "type": "array", "items": scalar(rng), "maxItems": 2}
    branches = [random_schema(rng, depth - 1) if kind == "anyOf" else scalar(rng) for _ in range(rng.randint(1, 3))]
    return {kind: branches}


def scalar(rng: random.Random) -> dict[str, Any]:
    """A schema of strings, numbers and constants, now and then with a word that nothing here enforces."""
    low = rng.randint(-30, 30)
    if rng.random() < 0.02:
        return rng.choice([{"type": "array", "uniqueItems": True}, {"not": {"type": "null"}}])
    return rng.choice(
        [
            {"type": "boolean"},
            {"type": ["null", "boolean"]},
            {"enum": rng.sample(["a", "bb", 1, 2.5, None, True, 'q"\n', {"k": []}], rng.randint(1, 4))},
            {"const": rng.choice(["x", 0, -1.5, [1, "a"], {"a": None}])},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 200)},
            {"type": "integer", "multipleOf": rng.randint(1, 9), "minimum": 0, "maximum": 90},
            {"type": "number", "exclusiveMinimum": low, "maximum": low + rng.randint(1, 5)},
            {"type": "number"},
            {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)},
            {"type": "string", "pattern": rng.choice(["^[a-c]+$", "\\d", "^(ab|é){1,3}$", "^x?"]), "maxLength": 8},
            {"type": "string", "format": rng.choice(["date", "uuid", "ipv4", "time"])},
        ]
    )
