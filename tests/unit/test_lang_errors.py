"""Programs on the mock that go wrong: where it is told, with which line, and what ends with it.

Numbers in names are those of the test programs in the language's reference.
"""

from __future__ import annotations

import functools
import threading
import time

import pytest

import sgl
from sgl.errors import Cancelled, EngineDead, GenerationError, InternalError, InvalidParameter, InvalidProgram
from sgl.lang.graph import validate
from sgl.limits import Limits


def line_of(function: sgl.SglFunction, offset: int) -> int:
    return function.func.__code__.co_firstlineno + offset


@sgl.function
def short(s):
    s += "Q: 1 + 1?\nA:" + sgl.gen("a", stop="\n")


class Refusing(sgl.MockBackend):
    """Its sessions raise when they are given something."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def open(self, sink, options):
        session = super().open(sink, options)
        session.submit = self.refuse
        return session

    def refuse(self, graph, *, finish=False):
        raise self.error


@pytest.mark.parametrize(
    ("raised", "kind"),
    [(ZeroDivisionError("odd"), InternalError), (InvalidParameter("odd", param="x"), InvalidParameter)],
)
def test_submission_that_raises_fails_the_program(raised, kind):
    @sgl.function
    def program(s):
        s += sgl.gen("x")
        for _ in range(2):
            with pytest.raises(kind, match="odd"):
                s["x"]
        with pytest.raises(kind):
            s += "more"

    mock = Refusing(raised)
    with pytest.raises(kind, match="odd") as caught:
        program.run(backend=mock)
    assert caught.value is raised or caught.value.__cause__ is raised
    while mock.server_info()["num_open"]:  # cancelled: closed by the backend's thread
        time.sleep(0.001)


def test_fragment_that_breaks_a_rule_fails_the_program(monkeypatch):
    monkeypatch.setattr("sgl.lang.fragments.validate", functools.partial(validate, limits=Limits(max_graph_nodes=3)))

    @sgl.function
    def program(s):
        s += sgl.gen("x")
        for _ in range(5):
            s += sgl.gen()
        for _ in range(2):
            with pytest.raises(InvalidProgram, match="nodes in one graph"):
                s["x"]

    with pytest.raises(InvalidProgram, match="nodes in one graph"):
        program.run(backend=sgl.MockBackend())


def test_failure_is_raised_at_the_read_with_its_line():
    @sgl.function
    def program(s):
        s += "x"
        s += sgl.gen("bad")
        s += sgl.gen("after")
        s["after"]

    with pytest.raises(GenerationError, match="no luck") as caught:
        program.run(backend=sgl.MockBackend(errors={"bad": GenerationError("no luck")}))
    location = caught.value.location
    assert (location.line, location.function) == (line_of(program, 3), "program")
    assert location.file == __file__


def test_45_faults_end_everything():
    """In a fork child, in the middle, followed by more text: raised, nothing hangs."""

    @sgl.function
    def child(s):
        s += "x"
        forks = s.fork(3)
        forks += sgl.gen("c")
        forks.join()
        s += "more"
        s += sgl.gen("d")

    error = {"c": GenerationError("child")}
    with pytest.raises(GenerationError, match="child"):
        child.run(backend=sgl.MockBackend(errors=error))

    @sgl.function
    def goes_on(s):
        s += sgl.gen("c")
        with pytest.raises(GenerationError):
            s.sync()
        with pytest.raises(GenerationError):
            s += "after the failure"
        assert isinstance(s.error(), GenerationError)
        with pytest.raises(GenerationError):
            s.text()

    with pytest.raises(GenerationError):
        goes_on.run(backend=sgl.MockBackend(errors=error))


def test_death_of_the_backend_reaches_a_waiting_read():
    @sgl.function
    def program(s):
        s += sgl.gen("x")
        threading.Timer(0.05, mock.die).start()
        s["x"]

    mock = sgl.MockBackend(delay_s=60)
    with pytest.raises(EngineDead):
        program.run(backend=mock)


def test_cancel_from_another_thread_ends_a_wait():
    mock = sgl.MockBackend(delay_s=60)
    state = short.run(backend=mock, stream=True)
    while not mock.prompts:
        time.sleep(0.001)
    state.cancel()
    with pytest.raises(Cancelled):
        state["a"]


def test_python_error_in_the_body_is_unchanged_and_cancels():
    mock = sgl.MockBackend()
    mine = ZeroDivisionError("mine")

    @sgl.function
    def program(s):
        s += sgl.gen("a")
        s["a"]
        raise mine

    with pytest.raises(ZeroDivisionError) as caught:
        program.run(backend=mock)
    assert caught.value is mine
    short.run(backend=mock)  # the cancelled session is closed by then
    assert mock.server_info()["num_open"] == 0


@pytest.mark.parametrize("wrong", [None, 3, ["a"]])
def test_what_cannot_be_appended_names_the_line(wrong):
    @sgl.function
    def program(s):
        s += "x"
        s += wrong

    mock = sgl.MockBackend()
    with pytest.raises(InvalidProgram, match="cannot be appended") as caught:
        program.run(backend=mock)
    assert caught.value.location.line == line_of(program, 3)
    assert mock.graphs == []


def test_unknown_name_is_also_a_key_error():
    @sgl.function
    def program(s):
        s += sgl.gen("known")

    state = program.run(backend=sgl.MockBackend())
    with pytest.raises(KeyError) as caught:
        state["unknwon"]
    assert isinstance(caught.value, InvalidProgram)
    assert "'known'" in str(caught.value)


def test_roles_do_not_nest():
    @sgl.function
    def nested(s):
        s += sgl.user(sgl.user("x"))

    @sgl.function
    def unopened(s):
        s += sgl.user_end()

    for program in (nested, unopened):
        with pytest.raises(InvalidProgram, match="role 'user'"):
            program.run(backend=sgl.MockBackend())


def test_append_after_the_end():
    state = short.run(backend=sgl.MockBackend())
    with pytest.raises(InvalidProgram, match="has ended"):
        state += "more"
