"""What the language adds to SGLang's: typed values, lists in loops, seeds, marks and repair, events, batches in
completion order, backends that nested programs inherit. On the mock: what is submitted, and what comes back."""

from __future__ import annotations

import enum
import itertools
import threading
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import pytest

import sgl
from sgl.errors import (
    DeadlineExceeded,
    GenerationError,
    InvalidParameter,
    InvalidProgram,
    RequirementFailed,
    Truncated,
    UnsupportedSchema,
)
from sgl.grammars.spec import Choices, JsonSchema, Regex
from sgl.lang.graph import Gen, Mark, Rewind, Select


def nodes_of(mock: sgl.MockBackend, kind: type = Gen) -> list[Any]:
    return [node for graph in mock.graphs for node in graph.nodes if isinstance(node, kind)]


# --- types ---


@dataclass
class Person:
    name: str
    age: int


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Movie(TypedDict):
    title: str


@pytest.mark.parametrize(
    ("tp", "text", "value"),
    [
        (int, "24 hours", 24),
        (float, "2.5\n", 2.5),
        (bool, "True", True),
        (str, "free text", "free text"),
        (Literal["yes", "no"], "no", "no"),
        (Literal[1, 2], "2", 2),
        (Literal["1", 1], '"1"', "1"),  # bare words would collide
        (Color, "blue", Color.BLUE),
        (list[Literal["a"]], '["a"]', ["a"]),
        (Person, '{"name": "Ada", "age": 36}', Person("Ada", 36)),
        (Movie, '{"title": "Metropolis"}', {"title": "Metropolis"}),
        (int | None, "null", None),
    ],
)
def test_32_33_typed_values(tp, text, value):
    @sgl.function
    def program(s):
        expr = sgl.gen("x", type=tp)
        s += expr
        assert s[expr] == s["x"] == s.value("x")

    mock = sgl.MockBackend({"x": text})
    state = program.run(backend=mock)
    assert state["x"] == value
    assert type(state["x"]) is type(value)


def test_types_become_constraints():
    assert sgl.gen("x", type=Literal["a", "b"]).constraint == Choices(("a", "b"))
    assert sgl.gen("x", type=Color).constraint == Choices(("red", "blue"))
    assert isinstance(sgl.gen("x", type=list[Color]).constraint, JsonSchema)
    assert sgl.gen("x", type=str).constraint is None
    with pytest.raises(UnsupportedSchema):
        sgl.gen("x", type=list[bytes])
    for wrong in ({"regex": "a"}, {"dtype": int}, {"choices": ["a"]}):
        with pytest.raises(InvalidParameter):
            sgl.gen("x", type=int, **wrong)


def test_9_a_value_that_was_cut_is_truncated_and_another_is_no_value():
    @sgl.function
    def program(s):
        s += sgl.gen("cut", type=Person, max_tokens=1) + sgl.gen("odd", type=Person)

    state = program.run(backend=sgl.MockBackend({"cut": '{"name": "Ada", "age": 36}', "odd": '{"name": "Ada"}'}))
    with pytest.raises(Truncated, match="complete Person") as caught:
        state["cut"]
    assert caught.value.partial == '{"name":'
    assert caught.value.location.function == "program"
    with pytest.raises(GenerationError, match="age") as caught:
        state["odd"]
    assert not isinstance(caught.value, Truncated)
    assert list(state.text_iter("odd")) == ['{"name": "Ada"}'], "streams give text"


def test_samples_and_joins_of_typed_values():
    @sgl.function
    def program(s):
        s += sgl.gen("n", type=int, n=2)
        forks = s.fork(2)
        forks += sgl.gen("m", type=int)
        forks.join()

    state = program.run(backend=sgl.MockBackend(["1", "2", "3", "4"]))
    assert (state["n"], state["m"]) == ([1, 2], [3, 4])


def test_8_any_constraint_as_a_value_one_per_row():
    @sgl.function
    def program(s, constraint):
        s += sgl.gen("x", constraint=constraint)

    mock = sgl.MockBackend()
    rows = [Regex("[0-9]"), Choices(("a", "b")), JsonSchema('{"type":"object"}')]
    program.run_batch([(row,) for row in rows], backend=mock)
    assert sorted(type(node.constraint).__name__ for node in nodes_of(mock)) == ["Choices", "JsonSchema", "Regex"]
    for wrong in ("[0-9]", {"type": "object"}):
        with pytest.raises(InvalidParameter, match="regex="):
            sgl.gen("x", constraint=wrong)
    with pytest.raises(InvalidParameter, match="both"):
        sgl.gen("x", constraint=Regex("a"), regex="a")


def test_an_unnamed_expression_stands_for_its_value():
    @sgl.function
    def program(s):
        number, word = sgl.gen(type=int), sgl.select(choices=["a", "b"])
        s += number + word
        assert (s[number], s[word], s.get_meta_info(number)["completion_tokens"]) == (7, "a", 1)
        with pytest.raises(KeyError, match="not appended"):
            s[sgl.gen(type=int)]

    program.run(backend=sgl.MockBackend(["7"]))


# --- lists ---


def test_26_captures_of_a_loop_become_a_list():
    @sgl.function
    def program(s):
        for _ in range(3):
            s += sgl.gen("item", list_append=True) + sgl.select("kind", ["a", "b"], list_append=True)
        first = list(s["item"])
        child = s.fork(1)[0]
        child += sgl.gen("item", list_append=True)
        return first, child["item"], s["item"]

    state = program.run(backend=sgl.MockBackend(["ä", "é", "語", "x"]))
    first, child, parent = state.ret_value
    assert first == parent == state["item"] == ["ä", "é", "語"]
    assert child == ["ä", "é", "語", "x"], "the child adds to its own"
    assert state["kind"] == ["a", "a", "a"]
    assert [meta["finish_reason"]["type"] for meta in state.get_meta_info("item")] == ["stop"] * 3

    @sgl.function
    def mixed(s):
        s += sgl.gen("x") + sgl.gen("x", list_append=True)

    with pytest.raises(InvalidProgram, match="no list"):
        mixed.run(backend=sgl.MockBackend())
    with pytest.raises(InvalidParameter):
        sgl.gen(list_append=True)


# --- seeds ---


def test_13_seeds_come_from_the_program_and_the_place():
    @sgl.function
    def program(s, order=(0, 1)):
        s += sgl.gen("a") + sgl.gen("b", seed=5) + sgl.select("c", ["x", "y"], temperature=1.0)
        forks = s.fork(2)
        for i in order:  # who goes first makes no difference
            forks[i] += sgl.gen(f"d{i}")
        s += sgl.gen("e", n=2)

    def seeds(**options: Any) -> dict[str, Any]:
        mock = sgl.MockBackend()
        program.run(backend=mock, **options)
        found = {f"{node.name}{node.branch}": node.sampling.seed for node in nodes_of(mock)}
        return found | {node.name: node.seed for node in nodes_of(mock, Select)}

    assert set(seeds().values()) == {None, 5}
    once = seeds(seed=1)
    assert once == seeds(seed=1, order=(1, 0))
    assert once["b0"] == 5
    assert len(set(once.values())) == len(once), "no two draw alike"
    assert not set(seeds(seed=2).values()) & set(once.values()) - {5}
    mock = sgl.MockBackend()
    few = program.run_batch([{}, {}], backend=mock, seed=1)
    assert len(few) == 2
    assert len({node.sampling.seed for node in nodes_of(mock) if node.name == "a"}) == 2, "each row its own"


# --- marks ---


def test_44_rewind_keeps_values_and_drops_text():
    @sgl.function
    def program(s):
        s += sgl.user("Q")
        s += sgl.assistant_begin()
        here = s.mark()
        s += "draft " + sgl.gen("draft") + sgl.assistant_end()
        s += sgl.user("more")
        s.rewind(here)
        later = s.mark()
        s += "final " + sgl.gen("final")
        s.rewind(here)
        with pytest.raises(InvalidProgram, match="rewound past"):
            s.rewind(later)
        s += "end" + sgl.assistant_end()
        with pytest.raises(InvalidProgram, match="mark of the same branch"):
            s.fork(1)[0].rewind(here)

    mock = sgl.MockBackend({"draft": "1", "final": "2"})
    state = program.run(backend=mock)
    assert (state["draft"], state["final"]) == ("1", "2")
    assert state.messages() == [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "end"}]
    assert state.text().endswith("assistant\nend<|im_end|>\n")
    assert [len(nodes_of(mock, kind)) for kind in (Mark, Rewind)] == [2, 2]


def test_requirements_draw_again_and_keep_what_was_before():
    @sgl.function
    def program(s):
        s += "N: "
        value = s.require(sgl.gen("n", type=int, stop="."), lambda n: n > 2 or f"{n} is too small", attempts=4)
        s += " and " + sgl.gen("next")
        return value

    mock = sgl.MockBackend({"n": ["1.", "no number", "3."], "next": "on"})
    state = program.run(backend=mock, seed=3)
    assert (state.ret_value, state.text()) == (3, "N: 3 and on")
    assert [prompt for name, prompt in mock.prompts if name == "n"] == ["N: "] * 3
    assert len({node.sampling.seed for node in nodes_of(mock) if node.name == "n"}) == 3
    with pytest.raises(RequirementFailed, match="1 is too small") as caught:
        program.run(backend=sgl.MockBackend({"n": ["1"] * 4}))
    assert caught.value.location.function == "program"
    assert "4 times" in str(caught.value)
    with pytest.raises(RequirementFailed, match="1 times"):  # greedy: it would say the same again
        program.run(backend=sgl.MockBackend({"n": ["1"] * 4}), temperature=0)


def test_feedback_is_seen_by_the_next_attempt_and_then_gone():
    def check(text):
        if "!" not in text:
            raise ValueError("say it louder")
        return True

    @sgl.function
    def program(s):
        s += "Shout: "
        s.require(sgl.gen("cry"), check, feedback=lambda value, reason: f" ({reason}) ")

    @sgl.function
    async def later(s):
        s += "Shout: "
        await s.require(sgl.gen("cry"), check, feedback=lambda value, reason: f" ({reason}) ")

    for each in (program, later):
        mock = sgl.MockBackend({"cry": ["hey", "hey!"]})
        state = each.run(backend=mock)
        assert (state["cry"], state.text()) == ("hey!", "Shout: hey!")
        assert mock.prompts[1] == ("cry", "Shout: hey (say it louder) ")
        with pytest.raises(RequirementFailed, match="louder"):
            each.run(backend=sgl.MockBackend({"cry": ["a", "b", "c"]}))


# --- programs in programs ---


@pytest.mark.parametrize("verdict", [0, None, "", [], "too small"])
def test_only_what_is_true_passes_a_requirement(verdict: Any):
    @sgl.function
    def program(s):
        return s.require(sgl.gen("n", type=int), lambda n: True if n > 2 else verdict)

    assert program.run(backend=sgl.MockBackend(["1", "3"])).ret_value == 3


def test_arguments_of_a_requirement_are_checked():
    async def later(n):
        return True

    wrong: list[tuple[Any, ...]] = [
        ("text", bool, None),
        (sgl.select("a", ["x"]), bool, None),
        (sgl.assistant(sgl.gen("a")), bool, None),
        (sgl.gen("a"), 3, None),
        (sgl.gen("a"), later, None),
        (sgl.gen("a"), bool, "louder"),
    ]

    @sgl.function
    def program(s, expr, check, feedback):
        s.require(expr, check, feedback=feedback)

    for arguments in wrong:
        with pytest.raises(InvalidParameter) as caught:
            program.run(*arguments, backend=sgl.MockBackend(["x"]))
        assert caught.value.param in ("expr", "check", "feedback")


def test_39_a_nested_program_leaves_its_text_out_and_uses_the_same_backend():
    @sgl.function
    def inner(s, x):
        s += f"inner {x}: " + sgl.gen("y")
        return s["y"]

    @sgl.function
    def outer(s):
        s += "outer: " + inner.run("a").ret_value + " " + s.call(inner, x="b")
        return s["y"]

    mock = sgl.MockBackend({"y": ["1", "2"]})
    state = outer.run(backend=mock)
    assert state.text() == "inner b: 2outer: 1 2"
    assert (state.ret_value, [prompt for _, prompt in mock.prompts]) == ("2", ["inner a: ", "inner b: "])


# --- events ---


@sgl.function
def branching(s):
    s += "root " + sgl.gen("r", return_logprob=True)
    forks = s.fork(2)
    forks += lambda i: f" {i}:" + sgl.gen("leaf")
    forks.join()
    s += sgl.select("pick", ["a", "b"])


def test_11_one_stream_of_everything():
    state = branching.run(backend=sgl.MockBackend({"r": "one two", "leaf": "x"}), stream=True)
    events = list(state.events())
    assert [event.kind for event in events if event.branch == 0] == ["text", "delta", "delta", "value", "joined",
                                                                     "text", "value", "done"]  # fmt: skip
    assert {(event.branch, event.text) for event in events if event.kind == "value"} == {
        (0, "one two"), (1, "x"), (2, "x"), (0, "a"),
    }  # fmt: skip
    value = next(event for event in events if event.name == "r" and event.kind == "value")
    assert (value.location.function, len(value.logprobs), value.usage.completion_tokens) == ("branching", 2, 2)
    assert value.finish == "stop"
    assert events[-1].usage == state.usage
    assert all(one.time_s <= other.time_s for one, other in itertools.pairwise(events))
    for kwargs in ({}, {"stream": False}):
        with pytest.raises(InvalidProgram, match="stream=True"):
            list(branching.run(backend=sgl.MockBackend({"r": "1", "leaf": "x"}), **kwargs).events())


def test_streams_of_a_fork_in_the_body():
    @sgl.function
    def program(s):
        s += "root"
        forks = s.fork(2)
        forks += sgl.gen("leaf")
        pieces = list(forks.text_iter())
        kinds = {(event.branch, event.kind) for event in forks.events()}
        own = [event.kind for event in forks[1].events()]
        return pieces, kinds, own

    state = program.run(backend=sgl.MockBackend({"leaf": "one two"}), stream=True)
    pieces, kinds, own = state.ret_value
    for index in range(2):
        assert "".join(piece for which, piece in pieces if which == index) == "one two"
    assert kinds == {(branch, kind) for branch in (1, 2) for kind in ("delta", "value")}
    assert own == ["delta", "delta", "value"]


def test_an_error_ends_every_stream():
    mock = sgl.MockBackend({"r": "one"}, errors={"leaf": GenerationError("no luck")})
    state = branching.run(backend=mock, stream=True)
    seen = []
    events = (seen.append(event.kind) for event in state.events())
    with pytest.raises(GenerationError, match="no luck") as caught:
        list(events)
    assert caught.value.location.function == "branching"
    assert any("branch" in note for note in caught.value.__notes__)
    with pytest.raises(GenerationError):
        list(state.events())
    assert "value" in seen


# --- batches ---


@sgl.function
def row(s, i):
    s += f"{i}:" + sgl.gen("v")
    if s["v"] == "boom":
        raise ValueError(f"row {i}")


def echo(prompt, node):
    return "boom" if prompt == "3:" else prompt


def test_12_results_come_as_rows_end():
    gate = threading.Event()

    @sgl.function
    def waits(s, i):
        if i == 0:
            gate.wait()
        s += f"{i}"

    seen = []
    batch = waits.batch([(i,) for i in range(3)], backend=sgl.MockBackend(), on_result=lambda i, state: seen.append(i))
    order = []
    for result in batch:
        order.append(result.index)
        if len(order) == 2:
            gate.set()
    assert (sorted(order[:2]), order[2], seen) == ([1, 2], 0, order)
    assert batch.num_done == len(batch) == 3
    with pytest.raises(InvalidProgram, match="once"):
        list(batch)


def test_a_slow_consumer_holds_a_batch_back():
    mock = sgl.MockBackend(echo)
    rows = iter(row.batch([(i,) for i in range(1000)], backend=mock, num_threads=4))
    next(rows)
    for _ in range(50):  # whatever the threads do meanwhile
        threading.Event().wait(0.001)
        assert len({prompt for _, prompt in mock.prompts}) <= 202
    rows.close()
    assert len({prompt for _, prompt in mock.prompts}) <= 300


def test_45_a_row_that_fails_is_a_result_of_its_own():
    results = {result.index: result for result in row.batch([(i,) for i in range(5)], backend=sgl.MockBackend(echo))}
    assert isinstance(results[3].error, ValueError)
    with pytest.raises(ValueError, match="row 3"):
        results[3].state  # noqa: B018
    assert [results[i].state["v"] for i in (0, 1, 2, 4)] == ["0:", "1:", "2:", "4:"]


def test_events_of_a_batch_name_their_row():
    batch = row.batch([(i,) for i in range(3)], backend=sgl.MockBackend(echo))
    events = list(batch.events())
    for i in range(3):
        assert [event.kind for event in events if event.row == i] == ["text", "delta", "value", "done"]
    with pytest.raises(ValueError, match="row 3"):
        list(row.batch([(i,) for i in range(5)], backend=sgl.MockBackend(echo)).events())

    @sgl.function
    async def task(s, i):
        s += f"{i}:" + sgl.gen("v")
        await s["v"]

    events = list(task.batch([(i,) for i in range(20)], backend=sgl.MockBackend(echo)).events())
    assert sorted(event.row for event in events if event.kind == "done") == list(range(20))


def test_options_of_a_batch_are_checked():
    with pytest.raises(InvalidParameter, match="no option"):
        row.batch([(1,)], i=3)
    with pytest.raises(InvalidParameter, match="row 0"):
        row.batch([{"j": 1}])


def test_deadline_of_a_program():
    mock = sgl.MockBackend(delay_s=60)
    with pytest.raises(DeadlineExceeded) as caught:
        row.run(1, backend=mock, deadline_s=0.05)
    assert "0.05" in str(caught.value)
    for wrong in ({"deadline_s": 0}, {"deadline_s": "1"}, {"seed": -1}, {"priority": 1.5}):
        with pytest.raises(InvalidParameter):
            row.run(1, backend=sgl.MockBackend(echo), **wrong)
