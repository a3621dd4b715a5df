"""Python types: random values of random types through JSON text and back; jsonschema-rs agrees with the schemas."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import pathlib
import random
import typing
import uuid
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import jsonschema_rs
import msgspec
import pydantic
import pytest
import typing_extensions
from annotated_types import Ge, Len, MaxLen
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grammar_walks import walk
from support.matcher_conformance import world

from sgl.errors import GenerationError, UnsupportedSchema
from sgl.grammars.compiler import GrammarCompiler
from sgl.grammars.keywords import check_schema
from sgl.grammars.spec import JsonSchema, canonical_schema, constraint_of
from sgl.grammars.types import dump, function_of, parse, schema_of

WORLD = world()
COMPILER = GrammarCompiler(WORLD.tokenizer_json, WORLD.vocab_size, WORLD.eos_ids)


Each = typing.TypeVar("Each")


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Place(typing.NamedTuple):
    row: int
    name: str = ""


@dataclasses.dataclass
class TypedPlace:
    row: int


@dataclasses.dataclass
class Page(typing.Generic[Each]):
    first: Each
    others: list[Each]
    after: Each | None = None


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 9


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.5
    tags: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Tree:
    value: int
    color: Color
    kids: list[Tree]
    at: Point | None = None


class Movie(TypedDict):
    title: Annotated[str, MaxLen(6)]
    year: NotRequired[int]


class Partial(TypedDict, total=False):
    a: typing.Required[bool]
    b: tuple[int, str]


class Item(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(min_length=1, max_length=4)]
    price: Annotated[int, Ge(0)] = 0
    next: Item | None = None


class Box(pydantic.BaseModel):
    items: set[int]
    point: Point
    item: Item


class Given(typing_extensions.TypedDict):
    item: Item
    n: NotRequired[int]


class Node(msgspec.Struct):
    left: Node | None
    size: Annotated[int, msgspec.Meta(ge=1, le=9)] = 1


class Circle(msgspec.Struct, tag=True):
    radius: int


class Square(msgspec.Struct, tag=True):
    side: int


TEXT = st.text(st.characters(codec="utf-8"), max_size=6)
INTS = st.integers(-(2**53), 2**53)
POINTS = st.builds(Point, INTS, st.floats(allow_nan=False, allow_infinity=False), st.lists(TEXT, max_size=2))
TREES = st.recursive(
    st.builds(Tree, INTS, st.sampled_from(Color), st.just([]), st.none() | POINTS),
    lambda inner: st.builds(Tree, INTS, st.sampled_from(Color), st.lists(inner, max_size=2), st.none()),
    max_leaves=4,
)
ITEMS = st.recursive(
    st.builds(Item, name=st.text("abé", min_size=1, max_size=4), price=st.integers(0, 99), next=st.none()),
    lambda inner: st.builds(Item, name=st.just("ab"), next=inner),
    max_leaves=3,
)
NODES = st.recursive(st.builds(Node, st.none(), st.integers(1, 9)), lambda inner: st.builds(Node, inner), max_leaves=3)
LEAVES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (int, INTS),
    (float, st.floats(allow_nan=False, allow_infinity=False)),
    (bool, st.booleans()),
    (str, TEXT),
    (None, st.none()),
    (Literal["a", "b", 3], st.sampled_from(["a", "b", 3])),
    (Color, st.sampled_from(Color)),
    (Level, st.sampled_from(Level)),
    (Point, POINTS),
    (Tree, TREES),
    (Item, ITEMS),
    (Given, st.fixed_dictionaries({"item": ITEMS}, optional={"n": INTS})),
    (Box, st.builds(Box, items=st.sets(INTS, max_size=3), point=POINTS, item=ITEMS)),
    (Movie, st.fixed_dictionaries({"title": st.text("ab", max_size=6)}, optional={"year": INTS})),
    (Partial, st.fixed_dictionaries({"a": st.booleans()}, optional={"b": st.tuples(INTS, TEXT)})),
    (Annotated[list[int], Len(1, 3)], st.lists(INTS, min_size=1, max_size=3)),
    (Annotated[int, pydantic.Field(gt=2, le=9)], st.integers(3, 9)),
    (uuid.UUID, st.uuids()),
    (datetime.date, st.dates(min_value=datetime.date(1000, 1, 1))),
    (datetime.timedelta, st.timedeltas(datetime.timedelta(days=-9999), datetime.timedelta(days=9999))),
    (decimal.Decimal, st.decimals(-(10**12), 10**12, places=3)),
    (pathlib.Path, st.text("ab/", min_size=1).map(pathlib.Path)),
    (Place, st.builds(Place, st.integers(-9, 9), st.sampled_from(["", "x"]))),
    (Page[int], st.builds(Page, INTS, st.lists(INTS, max_size=2), st.none())),
    (tuple[()], st.just(())),
    (dict[Literal["a", "b"], int], st.dictionaries(st.sampled_from(["a", "b"]), INTS)),
    (dict[Color, bool], st.dictionaries(st.sampled_from(Color), st.booleans())),
    (dict[int, bool], st.dictionaries(INTS, st.booleans(), max_size=3)),
]


def composed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """(type, values of it) around others."""
    return st.one_of(
        inner.map(lambda t: (list[t[0]], st.lists(t[1], max_size=3))),
        inner.map(lambda t: (dict[str, t[0]], st.dictionaries(TEXT, t[1], max_size=3))),
        inner.map(lambda t: (t[0] | None if t[0] is not None else None, st.none() | t[1])),
        st.tuples(inner, inner).map(lambda p: (tuple[p[0][0], p[1][0]], st.tuples(p[0][1], p[1][1]))),
        inner.map(lambda t: (tuple[t[0], ...], st.lists(t[1], max_size=3).map(tuple))),
        st.sampled_from([(set[int], st.sets(INTS, max_size=3)), (frozenset[str], st.frozensets(TEXT, max_size=3))]),
    )


TYPES = st.recursive(st.sampled_from(LEAVES), composed, max_leaves=4)


def optional_of(tp: Any) -> Any:
    return typing.Optional[tp]  # noqa: UP045 - the other spelling of a union


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_values_come_back(data: st.DataObject) -> None:
    tp, values = data.draw(TYPES)
    schema = schema_of(tp)
    check_schema(canonical_schema(schema))
    value = data.draw(values)
    text = dump(tp, value)
    errors = jsonschema_rs.Draft202012Validator(schema, validate_formats=True).iter_errors(json.loads(text))
    assert not [error.message for error in errors], (tp, text)
    assert parse(tp, text) == value


@settings(max_examples=20, deadline=None)
@given(value=st.lists(NODES, max_size=2), shape=st.builds(Circle, INTS) | st.builds(Square, INTS))
def test_structs_come_back(value: list[Node], shape: Any) -> None:
    for tp, one in ((list[Node], value), (Circle | Square, shape), (optional_of(Node), None)):
        text = dump(tp, one)
        assert jsonschema_rs.Draft202012Validator(schema_of(tp)).is_valid(json.loads(text))
        assert parse(tp, text) == one


@pytest.mark.parametrize(
    "tp", [Tree, Movie, Partial, Box, Node, Color, optional_of(Point), dict[str, Level], Circle | Square]
)
def test_generated_text_is_a_value(tp: Any) -> None:
    constraint = constraint_of({"json_schema": tp})
    assert isinstance(constraint, JsonSchema)
    grammar = COMPILER.compile(constraint)
    finished = 0
    for seed in range(4):
        path = walk(grammar, random.Random(seed))
        if path is None:
            continue
        text = WORLD.text(path)
        assert schema_valid(tp, text)
        assert dump(tp, parse(tp, text))
        finished += 1
    assert finished


def schema_valid(tp: Any, text: str) -> bool:
    return bool(jsonschema_rs.Draft202012Validator(schema_of(tp), validate_formats=True).is_valid(json.loads(text)))


def test_schemas_read_as_people_would_write_them() -> None:
    assert schema_of(Movie) == {
        "type": "object",
        "properties": {"title": {"type": "string", "maxLength": 6}, "year": {"type": "integer"}},
        "required": ["title"],
        "additionalProperties": False,
    }
    assert list(schema_of(Tree)["$defs"]["Tree"]["properties"]) == ["value", "color", "kids", "at"]
    assert schema_of(Tree)["$ref"] == "#/$defs/Tree"
    assert schema_of(Color) == {"enum": ["red", "blue"]}
    assert schema_of(Annotated[str, msgspec.Meta(pattern="^a+$", description="d")]) == {
        "type": "string",
        "pattern": "^a+$",
        "description": "d",
    }
    assert schema_of(Partial)["required"] == ["a"]


def test_two_classes_of_one_name() -> None:
    def other() -> Any:
        @dataclasses.dataclass
        class Point:
            z: bool

        return Point

    schema = schema_of(tuple[Point, other(), Point])
    assert set(schema["$defs"]) == {"Point", "Point_2"}
    assert [item["$ref"][-7:] for item in schema["prefixItems"]] == ["s/Point", "Point_2", "s/Point"]


def test_functions() -> None:
    def book(city: str, nights: Annotated[int, Ge(1)] = 1, room: Literal["single", "double"] = "single") -> None:
        """Book a room.

        Not this.
        """

    tool = function_of(book)
    assert tool == {
        "name": "book",
        "description": "Book a room.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "nights": {"type": "integer", "minimum": 1},
                "room": {"enum": ["single", "double"]},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    }
    assert parse(book, '{"city": "Rome", "nights": 2}') == {"city": "Rome", "nights": 2}
    with pytest.raises(GenerationError, match="the text is no book"):
        parse(book, '{"nights": 2}')


@dataclasses.dataclass
class Photo:
    name: str
    pixels: list[bytes]


def no_type(a, b: int) -> None:  # type: ignore[no-untyped-def]
    """Its first parameter says nothing."""


def variadic(*args: int) -> None:
    """Any number."""


@pytest.mark.parametrize(
    ("tp", "path"),
    [
        (bytes, "bytes"),
        (Photo, "Photo.pixels[0]"),
        (dict[float, str], "dict key"),
        (Page, "Page.first"),
        (enum.Enum("Nobody", []), "Nobody"),
        (Annotated[decimal.Decimal, Ge(0)], "Annotated"),
        (dict[str, complex], "dict[str]"),
        (list[typing.Callable[[], int]], "list[0]"),
        (tuple[int, complex], "tuple[1]"),
        (no_type, "no_type.a"),
        (variadic, "variadic.args"),
    ],
)
def test_types_without_a_json_form(tp: Any, path: str) -> None:
    with pytest.raises(UnsupportedSchema) as caught:
        schema_of(tp)
    assert caught.value.details["path"] == path
    assert caught.value.hint


@pytest.mark.parametrize("text", ["", "{", '{"x": 1', '{"x": "a"}', "[1]", '{"x": 1, "y": "b"}'])
def test_wrong_text_is_a_typed_error(text: str) -> None:
    with pytest.raises(GenerationError, match="the text is no Point") as caught:
        parse(Point, text)
    assert caught.value.details["partial"] == text


def test_infinite_numbers_are_no_values() -> None:
    """Text can hold numbers that a float cannot: none is drawn, and one from elsewhere is told apart."""
    for text in ("1e999", "[-1E+400]", "1" + "0" * 400 + ".5"):
        with pytest.raises(GenerationError, match="infinite"):
            parse(Any, text)
    assert parse(float, "1e-999") == 0
    grammar = COMPILER.compile(JsonSchema(canonical_schema({"type": "number"})))
    with_exponent = [WORLD.text(walk(grammar, random.Random(seed)) or []) for seed in range(60)]
    assert any("e" in text.lower() for text in with_exponent)
    assert all(abs(float(text)) < 1e200 for text in with_exponent)


def test_what_is_wrong_is_told_without_addresses() -> None:
    with pytest.raises(GenerationError, match="at /0/row") as caught:
        parse(list[TypedPlace], '[{"row": "x"}]')
    assert "http" not in str(caught.value)
