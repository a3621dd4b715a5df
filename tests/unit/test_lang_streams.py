"""Streams of programs on the mock: they add up, every consumer hears of an error, and none keeps a program alive.

Numbers in names are those of the test programs in the language's reference.
"""

from __future__ import annotations

import asyncio
import threading

import pytest

import sgl
from sgl.errors import GenerationError, InvalidProgram
from sgl.lang.graph import DeltaEvent, ProgramOptions, Sampling, ValueEvent
from sgl.lang.interpreter import Capture, Program
from sgl.lang.streams import Cursor


@sgl.function
def streamed(s):
    s += "A: " + sgl.gen("a") + " B: " + sgl.select("b", ["x", "y"])


def test_13_stream_adds_up():
    answers = {"a": "one two three"}
    state = streamed.run(backend=sgl.MockBackend(answers), stream=True)
    pieces = list(state.text_iter())
    assert "".join(pieces) == state.text() == "A: one two three B: x"
    assert len(pieces) > 3
    state = streamed.stream(backend=sgl.MockBackend(answers))
    assert list(state.text_iter("a")) == ["one", " two", " three"]
    assert list(state.text_iter("b")) == ["x"]
    assert state["a"] == "one two three"


def test_text_iter_without_stream_is_one_piece():
    state = streamed.run(backend=sgl.MockBackend(["v"]))
    assert list(state.text_iter()) == ["A: v B: x"]
    assert list(state.text_iter("a")) == ["v"]


def test_13_async_stream():
    async def consume():
        state = streamed.run(backend=sgl.MockBackend({"a": "one two"}), stream=True)
        whole = [piece async for piece in state.text_async_iter()]
        pairs = [pair async for pair in state.text_async_iter("a", return_meta_data=True)]
        return "".join(whole), pairs

    whole, pairs = asyncio.run(consume())
    assert whole == "A: one two B: x"
    assert "".join(piece for piece, _ in pairs) == "one two"
    assert pairs[-1][1]["completion_tokens"] == 2


def test_25_error_in_a_stream_reaches_every_consumer():
    mock = sgl.MockBackend(errors={"b": GenerationError("no luck")})
    state = streamed.run(backend=mock, stream=True)
    for _ in range(2):
        with pytest.raises(GenerationError, match="no luck"):
            list(state.text_iter())
    with pytest.raises(GenerationError):
        state.text()


def test_python_error_in_a_streaming_body_is_raised_at_the_read():
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        raise ZeroDivisionError("mine")

    state = program.run(backend=sgl.MockBackend(), stream=True)
    with pytest.raises(ZeroDivisionError, match="mine"):
        state["never"]
    with pytest.raises(ZeroDivisionError):
        list(state.text_iter())


@sgl.function
def of_all_kinds(s):
    s["set"] = "by hand"
    with s.var_scope("scope"):
        s += "x" + sgl.gen("a")
    forks = s.fork(2)
    forks += sgl.gen("v")
    forks.join()


def test_stream_of_a_variable_that_was_not_generated_is_one_piece():
    gate = threading.Event()

    def answer(prompt, node):
        gate.wait()
        return node.name.upper()

    state = of_all_kinds.run(backend=sgl.MockBackend(answer), stream=True)
    threading.Timer(0.02, gate.set).start()
    for _ in range(2):  # while it runs, and afterwards
        found = {name: list(state.text_iter(name)) for name in ("set", "scope", "v", "a")}
        assert found == {"set": ["by hand"], "scope": ["xA"], "v": [["V", "V"]], "a": ["A"]}

    async def consume(name):
        return [piece async for piece in state.text_async_iter(name)]

    assert asyncio.run(consume("scope")) == ["xA"]


def test_stream_of_an_unknown_name_is_an_error():
    gate = threading.Event()
    mock = sgl.MockBackend(lambda prompt, node: "v" if gate.wait() else "")
    state = streamed.run(backend=mock, stream=True)
    threading.Timer(0.02, gate.set).start()
    for _ in range(2):
        with pytest.raises(KeyError, match="typo"):
            list(state.text_iter("typo"))

    async def consume():
        return [piece async for piece in state.text_async_iter("typo")]

    with pytest.raises(InvalidProgram, match="typo"):
        asyncio.run(consume())


def test_streams_in_the_body_end():
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        s["n"] = "set"
        with pytest.raises(KeyError, match="typo"):
            list(s.text_iter("typo"))
        return list(s.text_iter("a")), list(s.text_iter("n")), list(s.text_iter())

    state = program.run(backend=sgl.MockBackend(["one two"]), stream=True)
    state.sync()
    assert state.ret_value == (["one", " two"], ["set"], ["xone two"])


def test_cursor_follows_the_first_capture_of_a_name_and_misses_nothing_before_it():
    program = Program(sgl.MockBackend(), ProgramOptions(stream=True), Sampling())
    first, second = (Capture("a", 0, None) for _ in range(2))
    first.node, second.node = 0, 1
    known = [None]
    cursor = Cursor(program, 0, "a", lambda: known[0], lambda: "")
    program._fragments.captures = {0: first, 1: second}

    def texts():
        pieces, over = cursor.take()
        return [piece.text for piece in pieces], over

    program._on_event(DeltaEvent(0, 0, "a", "one", (1, 2)))
    assert texts() == ([], False)
    known[0] = first
    assert texts() == (["one"], False)
    known[0] = second
    program._on_event(DeltaEvent(0, 0, "a", "", (3,)))
    program._on_event(DeltaEvent(0, 0, "a", " two", (4,)))
    program._on_event(ValueEvent(node=0, branch=0, name="a", value="one two", token_ids=(1, 2, 3, 4, 5)))
    program._on_event(DeltaEvent(1, 0, "a", "three"))
    pieces, over = cursor.take()
    assert over
    assert [(piece.text, piece.token_ids) for piece in pieces] == [(" two", (3, 4)), ("", (5,))], "no token is lost"


def test_closed_loop_of_a_consumer_does_not_reach_the_backend():
    gate = threading.Event()
    state = streamed.run(backend=sgl.MockBackend(lambda prompt, node: "v" if gate.wait() else ""), stream=True)
    loop = asyncio.new_event_loop()
    pieces = state.text_async_iter()
    assert loop.run_until_complete(anext(pieces)) == "A: "
    loop.close()
    loop.is_closed = lambda: False  # as it was when the backend's thread looked
    gate.set()
    try:
        assert state.text() == "A: v B: x"
    finally:
        del loop.is_closed
