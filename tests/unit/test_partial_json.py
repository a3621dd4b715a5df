"""Where a JSON text breaks off: each prefix of written values, against who wrote them; and a budget that ends early."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import pytest
from support.scripted import Rig

from sgl.grammars.partial_json import open_pointer
from sgl.grammars.spec import Constraint, JsonSchema, Regex
from sgl.lang.graph import Gen, Graph, LiteralText, ProgramOptions, Sampling, Text, ValueEvent
from sgl.lang.meta import meta_info


class Writer:
    """Writes a value and notes for each prefix of its text which value is under way."""

    def __init__(self) -> None:
        self.text = ""
        self.pointers: list[str] = [""]

    def put(self, text: str, pointer: str) -> None:
        for char in text:
            self.text += char
            self.pointers.append(pointer)

    def write(self, value: Any, at: str, around: str) -> None:
        """`at` is the value's pointer, `around` that of what holds it."""
        if isinstance(value, dict):
            self.put("{", at)
            for i, (key, child) in enumerate(value.items()):
                self.put((", " if i else " ") + json.dumps(key), at)
                inner = f"{at}/{key.replace('~', '~0').replace('/', '~1')}"
                self.put(": ", inner)
                self.write(child, inner, at)
            self.put("}", around)
        elif isinstance(value, list):
            self.put("[", at)
            for i, child in enumerate(value):
                if i:
                    self.put(",\n", f"{at}/{i}")
                self.write(child, f"{at}/{i}", at)
            self.put("]", around)
        else:
            text = json.dumps(value)
            self.put(text[:-1], at)
            self.put(text[-1], at if isinstance(value, (int, float)) and not isinstance(value, bool) else around)


def some_value(chance: random.Random, depth: int) -> Any:
    kind = chance.randrange(8 if depth else 5)
    if kind < 5:
        return [True, None, chance.choice([0, -3, 12, 1.5e9]), 'q"\\/~ü{[', ""][kind]
    if kind == 5:
        return [some_value(chance, depth - 1) for _ in range(chance.randrange(4))]
    return {chance.choice(["a", "b/c", "~", '"', "", "[", "é"]): some_value(chance, depth - 1) for _ in range(3)}


@pytest.mark.parametrize("seed", range(40))
def test_every_prefix(seed: int) -> None:
    value = some_value(random.Random(seed), 4)
    writer = Writer()
    writer.write(value, "", "")
    assert json.loads(writer.text) == value
    for length, pointer in enumerate(writer.pointers):
        assert open_pointer(writer.text[:length]) == pointer, writer.text[:length]


def test_any_text_has_an_answer_in_linear_time() -> None:
    for text in ("]]}}", '"\\', ":,:,", "{" * 100_000, '{"a":' * 20_000, "\\" * 1000, '["' + "\\" * 99_999):
        assert isinstance(open_pointer(text), str)


SCHEMA = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1,
                             "maxItems": 2},
                   "n": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["names", "n"], "additionalProperties": False,
}  # fmt: skip


def generate(constraint: Constraint, n: int) -> ValueEvent:
    rig = Rig()
    node = Gen(id=1, name="x", constraint=constraint, sampling=Sampling(max_new_tokens=n, temperature=0.0))
    rig.core.open(0, ProgramOptions())
    rig.core.submit(0, Graph(nodes=(Text(id=0, segments=(LiteralText("q:"),)), node)), finish=True)
    rig.run()
    (event,) = rig.of(0, ValueEvent)
    return event


SHORTEST = len('{"names":[""],"n":10}')


def test_a_budget_that_no_value_fits_says_where_it_ended() -> None:
    constraint = JsonSchema(json.dumps(SCHEMA), whitespace="compact")
    whole = generate(constraint, 100)
    assert (whole.finish, whole.truncated_at) == ("stop", None)
    seen = set()
    for n in range(1, SHORTEST, 3):
        event = generate(constraint, n)
        assert (event.finish, event.value) == ("length", whole.value[:n])
        assert event.truncated_at == open_pointer(event.value)
        assert meta_info(event)["finish_reason"] == {"type": "length", "length": n, "truncated_at": event.truncated_at}
        seen.add(event.truncated_at)
    assert {"", "/names/0"} <= seen


def test_a_budget_that_a_value_fits_ends_in_one() -> None:
    constraint = JsonSchema(json.dumps(SCHEMA), whitespace="compact")
    whole = generate(constraint, 100)
    assert len(whole.token_ids) > SHORTEST + 2
    for n in range(SHORTEST, len(whole.token_ids)):
        event = generate(constraint, n)
        assert (event.finish, event.truncated_at) == ("stop", None)
        assert n - 2 <= len(event.token_ids) <= n
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(event.value))
        num_same = next((i for i, (a, b) in enumerate(zip(event.value, whole.value, strict=False)) if a != b), n)
        assert num_same >= n - SHORTEST, "the model is let go on as long as possible"


def test_a_value_that_is_valid_as_it_is_and_other_constraints_have_no_such_place() -> None:
    number = generate(JsonSchema('{"type": "integer", "minimum": 1000}'), 5)
    assert number.finish == "length"
    assert json.loads(number.value) >= 1000
    assert number.truncated_at is None
    assert "truncated_at" not in meta_info(number)["finish_reason"]
    assert generate(Regex("[a-z]{9}"), 4).truncated_at is None
