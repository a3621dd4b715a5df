"""Any way to cut a message into pieces gives the same events, and hostile megabytes are read once, in every format.

Messages are made of what each format writes (calls, reasoning, plain text) and of its own markers in the wrong places;
then some are damaged. Work is counted in characters looked at, never in seconds.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl.errors import InvalidParameter, UnsupportedSchema
from sgl.grammars.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    CallEnd,
    Event,
    ReasoningFormat,
    StreamParser,
    ToolFormat,
    merged,
    message_of,
    message_parser,
)
from sgl.grammars.formats.parser import triggers
from sgl.grammars.formats.shapes import JsonCalls, NamedCalls, TagCalls
from sgl.grammars.formats.values import type_of

TOOLS: list[dict[str, Any]] = [
    {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "ok": {"type": ["boolean", "null"]},
                "tags": {"type": "array", "items": {"type": "string"}},
                "more": {"type": "object"},
            },
        },
    },
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
]
BY_NAME = {fmt.name: fmt for fmt in TOOL_FORMATS}
REASONING = {fmt.name: fmt for fmt in REASONING_FORMATS}
MAX_WORK = 24
"""Characters looked at per character of a text that comes at once: a marker's length is looked ahead at each place."""
MAX_WORK_ALONE = 64
"""The same where each character comes alone: then the longest marker may be looked at again for each."""
MEGABYTE = 2**20

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 10**6) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "city": texts,
        "days": st.integers(-5, 10**12),
        "ok": st.none() | st.booleans(),
        "tags": st.lists(texts, max_size=3),
        "more": st.dictionaries(texts, values, max_size=2),
    },
)
# What bare text cannot hold is refused, which a test of its own shows.
calls = st.lists(st.tuples(st.just("get_weather"), arguments) | st.just(("now", {})), min_size=1, max_size=3)


def events(parser: StreamParser, pieces: list[str]) -> list[Event]:
    return merged([event for piece in pieces for event in parser.feed(piece)] + parser.close())


def cut(text: str, places: list[float]) -> list[str]:
    """The text in pieces; places are fractions of it."""
    bounds = sorted({0, len(text), *(int(place * len(text)) for place in places)})
    return [text[start:end] for start, end in pairwise(bounds)]


def fragments(fmt: ToolFormat, reasoning: ReasoningFormat) -> st.SearchStrategy[str]:
    """Everything that a message of a format may hold, in the right place or not."""
    block = fmt.blocks[0]
    body = [value.strip() for value in vars_of(block.body) if isinstance(value, str)]
    markers = [*triggers(fmt.blocks), block.end, *body, *reasoning.begin, *reasoning.end, *reasoning.silent]
    return st.one_of(
        texts,
        st.sampled_from(["\n", " ", "{", "[", '"', "f(", ")", "}", "]", ": ", ",", ";", '{"name": "', "\\"]),
        st.sampled_from([marker for marker in markers if marker]),
        calls.map(fmt.render),
    )


def vars_of(struct: Any) -> list[Any]:
    return [getattr(struct, name) for name in struct.__struct_fields__]


@pytest.mark.parametrize("name", BY_NAME)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_chunking_gives_the_same_events(name: str, data: st.DataObject) -> None:
    fmt = BY_NAME[name]
    reasoning = data.draw(st.sampled_from(REASONING_FORMATS))
    text = "".join(data.draw(st.lists(fragments(fmt, reasoning), max_size=6)))
    start = data.draw(st.integers(0, 8))
    text = text[start:] if data.draw(st.booleans()) else text[: len(text) - start]
    tools = data.draw(st.sampled_from([None, TOOLS]))
    inside = data.draw(st.sampled_from([None, True, False]))
    pieces = list(text) if data.draw(st.booleans()) else cut(text, data.draw(st.lists(st.floats(0, 1), max_size=6)))

    def parser() -> StreamParser:
        return fmt.parser(tools, reasoning, starts_inside=inside)

    whole = events(parser(), [text])
    assert events(parser(), pieces) == whole
    for call in message_of(whole).calls:
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("name", BY_NAME)
def test_every_format_with_every_reasoning_in_any_pieces(name: str) -> None:
    """All pairs of formats: a message with reasoning, an answer and calls, cut everywhere and anyhow."""
    fmt = BY_NAME[name]
    rng = random.Random(name)
    body = fmt.blocks[0].body
    tags = [body.value_end.strip() + " x" if isinstance(body, TagCalls) else fmt.blocks[0].end, '"\\']
    made: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": "Rome\n", "tags": tags, "days": 3}), ("now", {})]
    written = fmt.render(made).replace("\\u003c", "<")  # which is escaped only to be sure
    for reasoning in REASONING_FORMATS:
        opening, closing = reasoning.begin[0], reasoning.end[0]
        for inside in (False, True):
            text = f"{'' if inside else opening}Hm, <{closing[0]}.\n{closing}\nA.\n{written}"
            whole = events(fmt.parser(TOOLS, reasoning, starts_inside=inside), [text])
            message = message_of(whole)
            assert (message.reasoning, message.content) == (f"Hm, <{closing[0]}.", "A.")
            assert [(call.name, json.loads(call.arguments)) for call in message.calls] == made
            cuts = [list(text)] + [cut(text, [rng.random() for _ in range(rng.randint(1, 8))]) for _ in range(4)]
            for pieces in cuts:
                assert events(fmt.parser(TOOLS, reasoning, starts_inside=inside), pieces) == whole


@pytest.mark.parametrize("name", REASONING)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_chunking_gives_the_same_reasoning(name: str, data: st.DataObject) -> None:
    fmt = REASONING[name]
    parts = st.one_of(texts, st.sampled_from([*fmt.begin, *fmt.end, *fmt.silent, "\n"]))
    text = "".join(data.draw(st.lists(parts, max_size=8)))
    whole = events(message_parser(reasoning=fmt), [text])
    assert events(message_parser(reasoning=fmt), cut(text, data.draw(st.lists(st.floats(0, 1), max_size=6)))) == whole
    assert events(message_parser(reasoning=fmt), list(text)) == whole


@pytest.mark.parametrize("name", BY_NAME)
@settings(max_examples=15, deadline=None)
@given(written=calls, before=st.sampled_from(["", "Let me see.", "One\n\ntwo: "]))
def test_what_a_format_writes_is_read_back(name: str, written: list[tuple[str, dict[str, Any]]], before: str) -> None:
    fmt = BY_NAME[name]
    written = written if fmt.parallel else written[:1]
    starts_line = bool(fmt.blocks[0].begin) or not before
    message = fmt.parse(before + ("" if starts_line else "\n") + fmt.render(written), TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == written
    assert all(call.complete for call in message.calls)
    assert message.content == before.strip()


def awkward(fmt: ToolFormat) -> st.SearchStrategy[str]:
    """Names and strings with what the format itself writes."""
    body = [part for value in vars_of(fmt.blocks[0].body) if isinstance(value, str) for part in (value, value.strip())]
    parts = [*body, *triggers(fmt.blocks), fmt.blocks[0].end, "\n", " ", '"', "'", "\\", "<", ">", "=", "]", ")", "5"]
    return st.lists(st.sampled_from([part for part in parts if part]) | texts, max_size=3).map("".join)


def test_a_name_that_cannot_be_written_is_pointed_at() -> None:
    parameters = {"type": "object", "properties": {"first/name x": {"type": "integer"}}}
    with pytest.raises(UnsupportedSchema, match="'first/name x' of tool 'f'") as caught:
        BY_NAME["pythonic"].constraint([{"name": "f", "parameters": parameters}], "required")
    assert caught.value.details["pointer"] == "/parameters/properties/first~1name x"


def typed(written: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Tools that take what was written."""
    return [
        {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": type_of(given[key])} for key in given}},
        }
        for name, given in written
    ]


@pytest.mark.parametrize("name", BY_NAME)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_json_arguments_are_read_back_or_refused(name: str, data: st.DataObject) -> None:
    fmt = BY_NAME[name]
    strings = awkward(fmt)
    inner = st.recursive(
        strings | values | st.floats(allow_nan=False, allow_infinity=False),
        lambda nested: st.lists(nested, max_size=2) | st.dictionaries(strings, nested, max_size=2),
        max_leaves=3,
    )
    keys = strings if data.draw(st.booleans()) else st.sampled_from(["a", "b_1", "c-d"])
    given_arguments = data.draw(st.lists(st.dictionaries(keys, inner, max_size=2), min_size=1, max_size=3))
    written = [(f"f{index}", each) for index, each in enumerate(given_arguments)]
    try:
        text = fmt.render(written)
    except InvalidParameter:
        assert not isinstance(fmt.blocks[0].body, JsonCalls | NamedCalls), "JSON can say anything"
        return
    tools = typed(written)
    assert read(fmt, text, tools) == written
    # and what a constraint lets be written for these names is the same
    assert fmt.constraint(tools, "auto") is not None or not fmt.blocks[0].begin


def read(fmt: ToolFormat, text: str, tools: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    message = fmt.parse(text, tools)
    assert message.content == ""
    assert all(call.complete for call in message.calls)
    return [(call.name, json.loads(call.arguments)) for call in message.calls]


@pytest.mark.parametrize("name", BY_NAME)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_name_is_constrained_exactly_when_it_can_be_written(name: str, data: st.DataObject) -> None:
    fmt = BY_NAME[name]
    key = data.draw(awkward(fmt))
    tool = {
        "name": "f",
        "parameters": {"type": "object", "properties": {key: {"type": "integer"}}, "required": [key]},
    }
    try:
        fmt.constraint([tool], "required")
    except UnsupportedSchema:
        with pytest.raises(InvalidParameter, match="cannot write argument"):
            fmt.render([("f", {key: 5})])
        return
    assert read(fmt, fmt.render([("f", {key: 5})]), [tool]) == [("f", {key: 5})]


def hostile(fmt: ToolFormat) -> Iterator[str]:
    """What makes careless parsers quadratic: beginnings without end, half calls, long names, quotes, brackets."""
    call = fmt.render([("get_weather", {"city": "Rome"})])
    begins = [*triggers(fmt.blocks)]
    yield "".join(begin[:-1] + begin for begin in begins)
    yield call[: call.index("Rome")]
    yield call[: call.index("Rome") + 2] + "\\"
    yield call + "\n"
    yield "[f(a0=1, a1=1, " + "[" * 30
    yield begins[0] + "\n"


@pytest.mark.parametrize("name", BY_NAME)
def test_hostile_text_is_read_once(name: str) -> None:
    fmt = BY_NAME[name]
    for unit in hostile(fmt):
        text = unit * (2**14 // len(unit) + 1)
        parser = fmt.parser(TOOLS)
        events(parser, [text])
        assert parser.examined <= MAX_WORK * len(text), unit
        parser = fmt.parser(TOOLS)
        events(parser, list(text[:2048]))
        assert parser.examined <= MAX_WORK_ALONE * 2048, unit


@pytest.mark.parametrize("name", BY_NAME)
def test_a_hostile_megabyte_is_read_once(name: str) -> None:
    fmt = BY_NAME[name]
    units = list(hostile(fmt))
    text = "".join(unit * (MEGABYTE // len(units) // len(unit) + 1) for unit in units)
    parser = fmt.parser(TOOLS)
    events(parser, cut(text, [step / 64 for step in range(64)]))
    assert len(text) >= MEGABYTE
    assert parser.examined <= MAX_WORK * len(text)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_megabyte_of_arguments_is_read_once(name: str) -> None:
    fmt = BY_NAME[name]
    call = fmt.render([("get_weather", {"city": "Rome"})])
    text = call.replace("Rome", "a1=</x " * (MEGABYTE // 7))
    parser = fmt.parser(TOOLS)
    *_, last = events(parser, cut(text, [step / 64 for step in range(64)]))
    assert last == CallEnd(0)
    assert parser.examined <= 4 * len(text)


@pytest.mark.parametrize("name", BY_NAME)
def test_markers_in_a_string_are_read_once(name: str) -> None:
    fmt = BY_NAME[name]
    body = fmt.blocks[0].body
    marker = body.value_end.strip() if isinstance(body, TagCalls) else fmt.blocks[0].end or "]"
    text = fmt.render([("get_weather", {"tags": ["@"]})]).replace("@", marker * (2**16 // len(marker)))
    parser = fmt.parser(TOOLS)
    *_, last = events(parser, cut(text, [step / 64 for step in range(64)]))
    assert last == CallEnd(0)
    assert parser.examined <= MAX_WORK * len(text)


def test_twenty_two_arguments_of_half_a_call_are_no_trouble() -> None:
    """Row 38 of the fault table: the text on which a backtracking pattern takes seconds."""
    text = "[f(" + ", ".join(f"a{i}=1" for i in range(22)) + ", "
    parser = BY_NAME["pythonic"].parser()
    assert [type(event) for event in events(parser, [text])][-1] is CallEnd
    assert parser.examined <= 4 * len(text)
