"""What newcomers get wrong is a typed error that says what to write instead."""

from __future__ import annotations

import functools
import gc
import pickle
import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sgl
from sgl.errors import DeadlineExceeded, InternalError, InvalidParameter, InvalidProgram, InvalidRequest
from sgl.lang.sampling import Sampling
from sgl.lang.stops import first_stop


def program(body: Callable[[Any], object]) -> sgl.SglFunction:
    return sgl.function(lambda s: body(s))


def append(s: Any, value: object) -> None:
    s += value


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (lambda s: append(s, f"hello {sgl.gen('x')}"), InvalidProgram, "join it with"),
        (lambda s: append(s, "hello %s" % sgl.gen("x")), InvalidProgram, "join it with"),  # noqa: UP031
        (lambda s: append(s, sgl.gen("x", choices=["a", "b"], max_tokens=-5)), InvalidParameter, "max_tokens is -5"),
        (
            lambda s: append(s, sgl.gen("x", choices_method="greedy_token_selection")),
            InvalidParameter,
            "without choices",
        ),
        (lambda s: append(s, sgl.select("x", ["a", "b"], seed="x")), InvalidParameter, "seed is 'x'"),
        (lambda s: append(s, sgl.select("x", ["a", "b"], seed=-1)), InvalidParameter, "seed is -1"),
        (lambda s: append(s, sgl.select("x", {"a", "b"})), InvalidParameter, "expected a list"),
        (lambda s: append(s, sgl.gen("x", stop={"a": 1})), InvalidParameter, "stop is"),
        (lambda s: append(s, sgl.gen("x", max_tokens=10**30)), InvalidParameter, "max_tokens"),
        (lambda s: s.fork(20_000), InvalidParameter, "at most 10000"),
        (lambda s: append(s, sgl.gen("x", max_token=5)), InvalidParameter, "did you mean 'max_tokens'"),
        (lambda s: append(s, sgl.gen("x", temprature=0)), InvalidParameter, "did you mean 'temperature'"),
        (lambda s: append(s, sgl.select("x", choice=["a"])), InvalidParameter, "did you mean 'choices'"),
        (lambda s: s + "more", InvalidProgram, r"write s \+= "),
        (lambda s: s["x"], InvalidProgram, r"append it first: s \+= sgl.gen\('x'\)"),
        (lambda s: (s.fork(2).__iadd__(sgl.gen("x")), s["x"]), InvalidProgram, r"after join\(\).*branches\[i\]\['x'\]"),
    ],
)
def test_mistakes_in_a_body(body: Callable[[Any], object], error: type[Exception], message: str) -> None:
    with sgl.MockBackend() as mock, pytest.raises(error, match=message):
        program(body).run(backend=mock)


def test_mistakes_around_a_program() -> None:
    def generator(s):
        yield s

    with pytest.raises(InvalidParameter, match="generator function"):
        sgl.function(generator)
    with pytest.raises(InvalidParameter, match="expected a function"):
        sgl.function(5)
    with pytest.raises(InvalidParameter, match="there is no parameter 'question'; missing a required argument: 'q'"):
        sgl.function(lambda s, q: None).run(question="a")
    fine = program(lambda s: append(s, "x"))
    with pytest.raises(InvalidParameter, match="backend is 5"):
        fine.run(backend=5)
    with sgl.MockBackend() as mock:
        for rows in (5, None, "abc"):
            with pytest.raises(InvalidParameter, match="batch_kwargs is"):
                fine.run_batch(rows, backend=mock)
        with pytest.raises(InvalidParameter, match="on_result is 5"):
            fine.run_batch([{}], on_result=5, backend=mock)


def test_parameter_with_the_name_of_an_option() -> None:
    @sgl.function
    def asks(s, stop):
        s += stop

    with sgl.MockBackend() as mock:
        with pytest.raises(InvalidParameter, match="pass it by position"):
            asks.run(stop="abc", backend=mock)
        assert asks.run("abc", backend=mock).text() == "abc"


def test_values_of_data_frames_are_values() -> None:
    @sgl.function
    def row(s, text):
        s += text
        s += sgl.gen(np.str_("x"), max_tokens=np.int64(5), temperature=np.float64(0.5), stop=np.array(["z"]))
        s += sgl.select("c", np.array(["a", "b"]), seed=np.int64(3))

    with sgl.MockBackend(["hi"]) as mock:
        state = row.run(np.str_("in"), backend=mock)
        assert (state["x"], state["c"]) == ("hi", "a")
        assert all(type(value) is str for value in (state["x"], state["c"]))


def test_finish_reasons_have_one_shape() -> None:
    @sgl.function
    def short(s):
        s += "x" + sgl.gen("x", max_tokens=2)

    with sgl.Engine(model_path="dummy", max_total_tokens=256) as engine:
        meta = short.run(backend=engine, temperature=0.0, ignore_eos=True).get_meta_info("x")
        plain = engine.generate("x", {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True})["meta_info"]
    assert meta["finish_reason"] == plain["finish_reason"] == {"type": "length", "length": 2}
    assert meta["e2e_latency"] > 0


def test_a_stream_that_is_let_go_is_cancelled() -> None:
    @sgl.function
    def long(s):
        s += "x" + sgl.gen("x", max_tokens=1500, ignore_eos=True)

    with sgl.Engine(model_path="dummy", max_total_tokens=2048) as engine:
        state = long.run(backend=engine, stream=True)
        pieces = state.text_iter()
        next(pieces)
        del state, pieces
        gc.collect()
        waited = threading.Event()
        for _ in range(200):
            if not engine.stats()["num_programs"]:
                break
            waited.wait(0.02)
        assert engine.stats()["num_programs"] == 0
        assert engine.stats()["decode_tokens"] < 1400


def test_probabilities_of_joined_selects_are_at_the_branches() -> None:
    found: list[dict[str, float]] = []

    @sgl.function
    def votes(s: sgl.ProgramState) -> None:
        branches = s.fork(2)
        for branch in branches:
            branch += sgl.select("vote", ["yes", "no"])
        branches.join()
        found.extend(branch.probabilities("vote") for branch in branches)

    state = votes.run(backend=sgl.MockBackend(choices={"vote": "no"}))
    assert [max(votes, key=votes.__getitem__) for votes in found] == state["vote"] == ["no", "no"]
    with pytest.raises(InvalidProgram, match=r"from a join or from n.*ask the branch"):
        state.probabilities("vote")


def test_a_body_that_took_its_whole_time_is_too_late():
    @sgl.function
    def program(s):
        s += sgl.gen("a")
        time.sleep(0.05)

    with pytest.raises(DeadlineExceeded):
        program.run(backend=sgl.MockBackend(), deadline_s=0.01)


def test_an_error_of_a_row_says_which():
    @sgl.function
    def program(s, i):
        return 1 / (i - 1)

    with pytest.raises(ZeroDivisionError) as caught:
        program.run_batch([[0], [1]], backend=sgl.MockBackend())
    assert caught.value.__notes__ == ["in row 1 of 2"]


def test_what_is_no_function_to_decorate():
    class Bot:
        @sgl.function
        def hi(self, s, who):
            s += who

    with pytest.raises(InvalidParameter, match="is a method"):
        Bot.hi.run(Bot(), "Ada", backend=sgl.MockBackend())
    assert Bot().hi("Ada", backend=sgl.MockBackend()).text() == "Ada"
    for wrong, message in ((sgl.function(lambda s: None), "is a program already"), (functools.partial(print), "a def")):
        with pytest.raises(InvalidParameter, match=message):
            sgl.function(wrong)


def test_the_last_run_is_that_of_the_program_also_when_it_failed():
    def make(answer):
        @sgl.function
        def program(s):
            s += "x" + sgl.gen("a")
            return s[answer]

        return program

    one = make("a")
    one.run(backend=sgl.MockBackend(["1"]))
    assert "<h1>Run of program" in one.last_run.to_html()

    @sgl.function
    def program(s):
        s += "y"
        s["none"]

    with pytest.raises(InvalidProgram):
        program.run(backend=sgl.MockBackend())
    assert program.last_run.to_html() != one.last_run.to_html(), "another function of the same name"


def one_program() -> sgl.SglFunction:
    @sgl.function
    def one(s, i=0):
        s += "x" + sgl.gen("a")

    return one


@pytest.mark.parametrize(
    ("slip", "message"),
    [
        (lambda s, one: one(s, i=1), r"to go on with that state: s.call\(one, ...\)"),
        (lambda s, one: s.call(lambda s: 3), r"s.call got .*decorate it with @sgl.function"),
        (lambda s, one: s.assistant(s.fork(2)), "a fork's group of states cannot be appended.*join it"),
        (lambda s, one: s.assistant(one), r"SglFunction.*s.call\(program, ...\) runs it on this state"),
        (lambda s, one: s.tools([add], tool_format="zz"), "tool_format is 'zz'"),
        (lambda s, one: s.tools([add], tool_choice="zz"), "tool_choice is 'zz'.*one of the tools 'add'"),
        (lambda s, one: sgl.gen("a", tool_choice="add"), "tool_choice is given without tools"),
        (lambda s, one: sgl.separate_reasoning(sgl.gen("a"), "foo"), "model_type is 'foo'"),
        (lambda s, one: sgl.gen("a", type="int"), "type is given as text: 'int'"),
        (lambda s, one: sgl.gen("a", type=list["int"]), "type is given as text: 'int' in list"),
        (lambda s, one: sgl.gen("a", json_schema=3), "json_schema is 3; expected JSON text"),
        (lambda s, one: one.run(backend=sgl.MockBackend), "is the class MockBackend; expected an instance"),
        (lambda s, one: sgl.flush_cache(3), "backend is 3; expected an engine"),
        (lambda s, one: one.run_batch([{"i": 1, "temperature": 0.5}]), r"run_batch\(rows, temperature=...\)"),
        (lambda s, one: one.explain(rows=3), "rows is 3; expected a list of rows"),
        (lambda s, one: sgl.Recorder("/none/such/run.json"), "'/none/such' does not exist"),
    ],
)
def test_a_slip_is_told_what_to_write(slip: Callable[[Any, Any], Any], message: str):
    @sgl.function
    def program(s):
        slip(s, one_program())

    with pytest.raises(InvalidRequest, match=message):
        program.run(backend=sgl.MockBackend())


def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b


def test_a_state_is_no_sequence():
    with pytest.raises(TypeError, match="not iterable"):
        list(one_program().run(backend=sgl.MockBackend()))


def test_the_error_of_a_mock_names_the_generation():
    with pytest.raises(InternalError, match="'a' fails as it was told to: OSError: x"):
        one_program().run(backend=sgl.MockBackend(errors={"a": OSError("x")}))


def test_a_value_assumed_for_no_generation_is_told_of():
    one = one_program()
    for look in (one.trace, functools.partial(one.explain, backend=sgl.MockBackend())):
        with pytest.warns(UserWarning, match=r"assumed for 'zz', which is not generated \(a\)"):
            look(assume={"zz": "x", "a": "y"})


def test_a_plan_that_ends_at_an_unknown_name_does_not_ask_for_its_value():
    @sgl.function
    def program(s):
        s += "x"
        s["zz"]

    (blocker,) = program.explain(backend=sgl.MockBackend()).plan.blockers
    assert "a run will fail there" in blocker.reason


def test_list_append_in_a_compiled_program_is_an_error_that_says_so():
    @sgl.function
    def program(s):
        for _ in range(2):
            s += sgl.gen("a", list_append=True)

    with pytest.raises(InvalidProgram, match="also with list_append"):
        program.compile()


@pytest.mark.parametrize("made", [int, float, bool, list[int], dict[str, int]])
def test_a_typed_generation_goes_through_pickle(made: type):
    expr = sgl.gen("a", type=made)
    again = pickle.loads(pickle.dumps(expr))
    text = {float: "1.5", bool: "True", list[int]: "[1]", dict[str, int]: '{"a": 1}'}.get(made, "1")
    assert again.constraint == expr.constraint
    assert again.form.read(text) == expr.form.read(text)


def test_an_unknown_name_is_a_key_error_behind_pickle_too():
    @sgl.function
    def program(s):
        s["zz"]

    with pytest.raises(KeyError) as caught:
        program.run(backend=sgl.MockBackend())
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, KeyError)
    assert str(again) == str(caught.value)


_ENDS = (
    r"a\b",
    r" \b",
    r"[ab]\b ",
    r"(?:b\b|a\B)+c?",
    r"a(?!b\b)",
    r"(?<=b)a$",
    r"(?m)^b",
    r"a(?=b.*c)",
    r"(a)(?:b\b|c)\1",
)


@pytest.mark.parametrize("pattern", _ENDS)
def test_a_stop_pattern_that_looks_at_the_end_stops_where_every_end_was_tried(pattern: str):
    draw = random.Random(pattern)
    for _ in range(100):
        text = "".join(draw.choice("abc \n") for _ in range(draw.randrange(1, 14)))
        matches = (re.search(pattern, text[:end]) for end in range(1, len(text) + 1))
        first = next((match for match in matches if match is not None), None)
        found = first_stop(text, Sampling(stop_regex=(pattern,)))
        assert (found and (found.matched, found.end)) == (first and (first.group(), first.end())), text
