"""What newcomers get wrong is a typed error that says what to write instead."""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sgl
from sgl.errors import DeadlineExceeded, InvalidParameter, InvalidProgram


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
