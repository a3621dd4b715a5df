"""The mock backend: the conformance suite, and what it adds for tests of programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from support.backend_conformance import BackendConformance
from support.suite import chat, extract, judge

import sgl
from sgl.errors import EngineDead, GenerationError, InternalError, InvalidParameter, SglError
from sgl.lang.graph import Gen

if TYPE_CHECKING:
    from sgl.runtime.engine import Engine


class TestMock(BackendConformance):
    @pytest.fixture
    def backend(self) -> Iterator[sgl.MockBackend]:
        with sgl.MockBackend() as mock:
            yield mock


class TestMockOfAModel(BackendConformance):
    @pytest.fixture
    def backend(self) -> Iterator[sgl.MockBackend]:
        with sgl.MockBackend(lambda prompt, node: "é is 1 letter", model="dummy") as mock:
            yield mock


@sgl.function
def two(s):
    s += "A: " + sgl.gen("a")
    s += " B: " + sgl.gen("b")


def test_answers_by_list_dict_and_function():
    assert two.run(backend=sgl.MockBackend(["x", "y"])).text() == "A: x B: y"
    assert two.run(backend=sgl.MockBackend({"b": "y", "a": ["x"]})).text() == "A: x B: y"

    def answer(prompt: str, node: Gen) -> str:
        return f"[{len(prompt)}{node.name}]"

    assert two.run(backend=sgl.MockBackend(answer)).text() == "A: [3a] B: [11b]"


def test_stop_and_budget():
    @sgl.function
    def program(s):
        s += sgl.gen("cut", stop=[".", "!"])
        s += sgl.gen("long", max_tokens=2)

    state = program.run(backend=sgl.MockBackend({"cut": "one! two.", "long": "a b c d"}))
    assert (state["cut"], state["long"]) == ("one", "a b")
    assert state.get_meta_info("cut")["finish_reason"] == {"type": "stop", "matched": "!"}
    assert state.get_meta_info("long")["finish_reason"]["type"] == "length"


def test_answers_used_up():
    with pytest.raises(GenerationError, match="no answer left for 'b'"):
        two.run(backend=sgl.MockBackend(["x"]))


def test_answer_function_that_raises_names_the_line():
    def answer(prompt: str, node: Gen) -> str:
        raise ZeroDivisionError("oops")

    with pytest.raises(InternalError, match="ZeroDivisionError: oops") as caught:
        two.run(backend=sgl.MockBackend(answer))
    assert caught.value.location.function == "two"


def test_scripted_error_keeps_its_type():
    mock = sgl.MockBackend(errors={"b": GenerationError("no luck")})
    with pytest.raises(GenerationError, match="no luck"):
        two.run(backend=mock)
    assert mock.server_info()["num_open"] == 0


def test_death_reaches_the_program_and_later_ones():
    mock = sgl.MockBackend(die_at="b")
    for _ in range(2):
        with pytest.raises(EngineDead):
            two.run(backend=mock)


def test_shutdown_is_idempotent():
    mock = sgl.MockBackend()
    mock.shutdown()
    mock.shutdown()
    with pytest.raises(SglError):
        two.run(backend=mock)


def test_backend_must_be_one():
    with pytest.raises(InvalidParameter):
        sgl.set_default_backend("http://localhost")  # type: ignore[arg-type]


@pytest.mark.parametrize("program", [chat, judge, extract], ids=lambda program: program.__name__)
def test_prompts_are_token_for_token_those_of_an_engine(program: sgl.SglFunction, dummy_engine: Engine):
    arguments = ["tea é <|im_end|>", "and why?"][: len(program.arg_names)]
    real = program.run(*arguments, backend=dummy_engine)
    values = {name: real[name] for name in ("one", "two", "note", "name", "year") if name in real}
    choices = {name: real[name] for name in ("grade", "kind") if name in real}
    mock = sgl.MockBackend(values, choices=choices, model="dummy")
    mocked = program.run(*arguments, backend=mock)
    assert mocked.text() == real.text()
    for name in (*values, *choices):
        metas = [state.get_meta_info(name) for state in (real, mocked)]
        ours, theirs = ([meta] if isinstance(meta, dict) else meta for meta in metas)
        assert [m["output_ids"] for m in ours] == [m["output_ids"] for m in theirs]
        if name not in choices:  # scoring options counts them as prompt
            assert [m["prompt_tokens"] for m in ours] == [m["prompt_tokens"] for m in theirs]


def test_an_unknown_model_is_said_at_once():
    with pytest.raises(sgl.errors.ModelNotFound):
        sgl.MockBackend(model="no-such-model")
