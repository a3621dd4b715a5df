"""Programs on the mock: what they submit, what comes back, what goes wrong and how it is told.

Numbers in names are those of the test programs in the language's reference: 1 few-shot QA, 2 chat, 4 integers,
5 JSON by fragments, 7 data dependency, 8 calculator, 9 ReAct, 10 skeleton, 11 append join, 13 streams.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import json
import threading
import time

import pytest

import sgl
from sgl.errors import (
    Cancelled,
    EngineDead,
    GenerationError,
    InternalError,
    InvalidParameter,
    InvalidProgram,
    InvalidRegex,
    InvalidSchema,
    StateLost,
    Truncated,
    Unsupported,
)
from sgl.grammars.spec import JsonSchema, Regex
from sgl.lang.graph import (
    DeltaEvent,
    Fork,
    Gen,
    Join,
    ProgramOptions,
    Release,
    Sampling,
    Select,
    Text,
    ValueEvent,
    validate,
)
from sgl.lang.interpreter import Capture, Program
from sgl.lang.streams import Cursor
from sgl.limits import Limits


def nodes_of(mock: sgl.MockBackend) -> list:
    return [node for graph in mock.graphs for node in graph.nodes]


def line_of(function: sgl.SglFunction, offset: int) -> int:
    return function.func.__code__.co_firstlineno + offset


# --- programs ---


@sgl.function
def few_shot(s, question):
    s += "Q: 1 + 1?\nA: 2\n"
    s += "Q: " + question + "\nA:" + sgl.gen("answer", stop="\n")


def test_1_few_shot_run_and_batch():
    mock = sgl.MockBackend(lambda prompt, node: " " + prompt.splitlines()[-2][-2:-1] + "\nQ: more")
    assert few_shot.run("What is 7?", backend=mock)["answer"] == " 7"
    states = few_shot.run_batch([{"question": f"What is {i}?"} for i in range(5)], backend=mock)
    assert [state["answer"] for state in states] == [f" {i}" for i in range(5)]
    assert len(mock.graphs) == 6, "one submission per program"


@sgl.function
def chat(s):
    s += sgl.system("Be brief.")
    with s.user():
        s += "Hello"
    s += sgl.assistant(sgl.gen("a1"))
    s.user("More")
    s += sgl.assistant_begin() + sgl.gen("a2") + sgl.assistant_end()


def test_2_chat_by_all_spellings():
    state = chat.run(backend=sgl.MockBackend(["Hi.", "Bye."]))
    assert state.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "More"},
        {"role": "assistant", "content": "Bye."},
    ]
    assert state.text().startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n")


def test_3_select_and_its_probabilities():
    @sgl.function
    def program(s):
        s += "True? " + sgl.select("truth", ["True", "False", "Unknown"])

    state = program.run(backend=sgl.MockBackend(choices={"truth": "Unknown"}))
    assert state["truth"] == "Unknown"
    assert state.probabilities("truth") == {"True": 0.0, "False": 0.0, "Unknown": 1.0}
    meta = state.get_meta_info("truth")
    assert {"normalized_prompt_logprobs", "input_token_logprobs", "output_token_logprobs"} <= set(meta)
    assert len({len(row) for row in meta["greedy_logprob_matrix"]}) == 1


def test_4_15_typed_values():
    @sgl.function
    def program(s):
        s += sgl.gen_int("i", stop="!") + sgl.gen("f", dtype=float) + sgl.gen_string("t") + sgl.gen("b", dtype="bool")

    mock = sgl.MockBackend({"i": "24 hours", "f": "2.5\nx", "t": '"tea"', "b": "False"})
    state = program.run(backend=mock)
    assert [state[name] for name in "iftb"] == ["24", "2.5", '"tea"', "False"]
    assert [state.value(name) for name in "iftb"] == [24, 2.5, "tea", False]
    integer = next(node for node in nodes_of(mock) if node.name == "i")
    assert integer.constraint == Regex(r"[-+]?[0-9]+[ \n]*")
    assert integer.sampling.stop == ("!", " ", "\n")


def test_typed_value_that_was_cut():
    @sgl.function
    def program(s):
        s += sgl.gen("doc", json_schema={"type": "object"}) + sgl.gen("flag", dtype=bool, max_tokens=2)
        s += sgl.gen("wrong", dtype=bool)

    state = program.run(backend=sgl.MockBackend({"doc": '{"a": ', "flag": "T r ue", "wrong": "true"}))
    with pytest.raises(GenerationError, match="'wrong' is no bool") as wrong:
        state.value("wrong")
    assert not isinstance(wrong.value, Truncated), "nothing cut it"
    for name, partial in (("doc", '{"a": '), ("flag", "T r")):
        with pytest.raises(Truncated) as caught:
            state.value(name)
        assert caught.value.partial == partial


def test_5_json_by_fragments_in_a_scope():
    @sgl.function
    def program(s):
        s += "Describe.\n"
        with s.var_scope("json"):
            s += '{"name": ' + sgl.gen(regex=r'"\w+"') + ', "age": ' + sgl.gen(regex="[0-9]+") + "}"

    state = program.run(backend=sgl.MockBackend(['"Ada"', "36"]))
    assert json.loads(state["json"]) == {"name": "Ada", "age": 36}


def test_7_reading_a_value_submits_and_the_next_fragment_is_new_nodes_only():
    @sgl.function
    def program(s):
        s += "Who knows? " + sgl.gen("expert")
        s += f"\n{s['expert']} says: " + sgl.gen("answer")

    mock = sgl.MockBackend({"expert": "Ada", "answer": "yes"})
    state = program.run(backend=mock)
    assert state.text() == "Who knows? Ada\nAda says: yes"
    assert [[type(node).__name__ for node in graph.nodes] for graph in mock.graphs] == [["Text", "Gen"]] * 2
    ids = [node.id for node in nodes_of(mock)]
    assert ids == sorted(set(ids)), "ids go on over fragments"
    assert mock.graphs[0].handles == ()


def test_handles_travel_once_the_state_is_known():
    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x")
        s.sync()
        s.sync()
        s += "b" + sgl.gen("y")

    mock = sgl.MockBackend(["1", "2"])
    assert program.run(backend=mock).text() == "a1b2"
    assert [handle.branch for graph in mock.graphs[1:] for handle in graph.handles] == [0]


def test_8_calculator():
    @sgl.function
    def program(s):
        s += "12 * 12 = " + sgl.gen("expression", stop=")") + ") = "
        left, right = s["expression"].strip("(").split("*")
        with s.var_scope("answer"):
            s += str(int(left) * int(right))

    assert program.run(backend=sgl.MockBackend(["(12*12) = nonsense"]))["answer"] == "144"


def test_9_react_loop():
    @sgl.function
    def program(s):
        for step in range(1, 5):
            s += f"Thought {step}:" + sgl.gen(f"thought{step}", stop="\n")
            s += f"\nAct {step}: " + sgl.select(f"act{step}", ["Search", "Finish"]) + "\n"
            if s[f"act{step}"] == "Finish":
                return step
        return None

    mock = sgl.MockBackend(choices={"act3": "Finish"})
    state = program.run(backend=mock)
    assert state.ret_value == 3
    assert len(mock.graphs) == 4, "three reads, and the end"
    assert "thought4" not in state
    prompts = [prompt for _, prompt in mock.prompts]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(prompts))


def test_10_skeleton_fork_join_is_one_submission():
    @sgl.function
    def program(s):
        s += "Tips: " + sgl.gen("skeleton") + "\n"
        forks = s.fork(5)
        forks += lambda i: f"Tip {i}: "
        forks += sgl.gen("detail")
        forks.join()
        s += "Summary: " + sgl.gen("summary")

    mock = sgl.MockBackend(lambda prompt, node: f"<{node.name} after {prompt[-3:-1]}>")
    state = program.run(backend=mock)
    assert state["detail"] == [f"<detail after {i}:>" for i in range(5)]
    assert len(mock.graphs) == 1
    nodes = nodes_of(mock)
    joined = next(i for i, node in enumerate(nodes) if isinstance(node, Join))
    assert sorted(node.branch for node in nodes if isinstance(node, Release)) == [1, 2, 3, 4, 5]
    assert all(i > joined for i, node in enumerate(nodes) if isinstance(node, Release))
    assert [meta["finish_reason"]["type"] for meta in state.get_meta_info("detail")] == ["stop"] * 5


def test_11_append_join_in_fork_order():
    @sgl.function
    def program(s):
        s += "Facts."
        forks = s.fork(3)
        forks += [f" Fact {i}:" + sgl.gen("fact") for i in range(3)]
        forks.join("concate_and_append")
        s += " Which?" + sgl.gen("answer")

    mock = sgl.MockBackend({"fact": ["a", "b", "c"], "answer": "b"})
    assert program.run(backend=mock).text() == "Facts. Fact 0:a Fact 1:b Fact 2:c Which?b"


def test_join_replaces_and_never_drops():
    @sgl.function
    def program(s):
        for round in range(2):
            forks = s.fork(2)  # before any text
            for i, fork in enumerate(forks):
                fork += sgl.gen("x")
                fork["tag"] = (round, i)
            forks.join()
            s["rounds"] = (s["x"], s["tag"])

    state = program.run(backend=sgl.MockBackend(list("abcd")))
    assert state["rounds"] == (["c", "d"], [(1, 0), (1, 1)])


def test_children_see_the_parents_values_and_not_each_others():
    @sgl.function
    def program(s):
        s += sgl.gen("p")
        s["n"] = 1
        left, right = s.fork(2)
        left["n"] = 2
        left += sgl.gen("own")
        assert (left["p"], left["n"], right["n"], s["n"]) == ("v", 2, 1, 1)
        assert "own" in left
        assert "own" not in right

    program.run(backend=sgl.MockBackend(lambda prompt, node: "v"))


def test_copy_joins_at_its_end():
    @sgl.function
    def program(s):
        s += "x"
        with s.copy() as twin:
            twin += sgl.gen("y")
        assert s["y"] == ["1"]
        with pytest.raises(InvalidProgram, match="was joined"):
            twin += "more"
        with pytest.raises(StateLost):
            twin.text()

    program.run(backend=sgl.MockBackend(["1"]))


def test_group_protocol():
    @sgl.function
    def program(s):
        group = s.fork(3)
        assert len(group) == 3
        assert list(group)[1] is group[1]
        with pytest.raises(InvalidProgram, match="a list of 2 for 3"):
            group += ["a", "b"]
        with pytest.raises(InvalidParameter):
            s.fork(0)
        with pytest.raises(InvalidParameter):
            group.join("sum")

    program.run(backend=sgl.MockBackend())


def test_collected_children_are_released():
    @sgl.function
    def program(s):
        s += "x"
        s.fork(1)[0] += sgl.gen("y")
        gc.collect()
        s += sgl.gen("z")
        s.sync()
        s += sgl.gen("w")

    mock = sgl.MockBackend()
    program.run(backend=mock)
    assert [node.branch for node in mock.graphs[0].nodes if isinstance(node, Release)] == [1]


def test_text_inside_the_body_and_of_a_child():
    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x")
        child = s.fork()[0]
        child += "c"
        assert (s.text(), child.text()) == ("a1", "a1c")
        s += "b"

    assert program.run(backend=sgl.MockBackend(["1"])).text() == "a1b"


def test_empty_program():
    @sgl.function
    def program(s):
        assert s.text() == ""
        return 5

    state = program.run(backend=sgl.MockBackend())
    assert (state.ret_value, state.text(), state.messages(), state.error()) == (5, "", [], None)


# --- streams ---


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


# --- errors ---


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
    state = streamed.run(backend=mock, stream=True)
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
    few_shot.run("Next?1?", backend=mock)  # the cancelled session is closed by then
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
    state = few_shot.run("What?1?", backend=sgl.MockBackend())
    with pytest.raises(InvalidProgram, match="has ended"):
        state += "more"


# --- arguments ---


@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"dtype": list}, "dtype"),
        ({"choices": []}, "choices"),
        ({"choices": "abc"}, "choices"),
        ({"choices": ["a", "a"]}, "choices"),
        ({"choices": ["a"], "regex": "a"}, "regex"),
        ({"choices": ["a"], "choices_method": "best"}, "choices_method"),
        ({"regex": "a", "json_schema": "{}"}, "json_schema"),
        ({"name": ""}, "name"),
    ],
)
def test_wrong_arguments_raise_at_the_call(kwargs, param):
    with pytest.raises(InvalidParameter) as caught:
        sgl.gen(**kwargs)
    assert caught.value.param == param


def test_constraints_are_checked_at_the_call():
    with pytest.raises(InvalidRegex):
        sgl.gen("x", regex="(")
    with pytest.raises(InvalidSchema):
        sgl.gen("x", json_schema="{")
    with pytest.raises(Unsupported):
        sgl.gen("x", return_text_in_logprobs=True)
    with pytest.raises(Unsupported):
        few_shot.run("x", return_text_in_logprobs=True, backend=sgl.MockBackend())


def test_schema_as_text_dict_and_model():
    class Model:
        @classmethod
        def model_json_schema(cls):
            return {"type": "object"}

    expected = JsonSchema('{"type":"object"}')
    for schema in ('{"type": "object"}', {"type": "object"}, Model):
        assert sgl.gen("x", json_schema=schema).constraint == expected


def test_dtype_wins_over_regex_with_a_warning():
    with pytest.warns(UserWarning, match="dtype wins"):
        expr = sgl.gen("x", dtype=int, regex="a")
    assert expr.constraint == Regex(r"[-+]?[0-9]+[ \n]*")


def test_17_27_precedence_and_lists_unchanged():
    stop = ["\n"]

    @sgl.function
    def program(s):
        s += sgl.gen("a", max_tokens=200, min_tokens=64, stop=stop, temperature=0, seed=7)
        s += sgl.gen("b")
        s += sgl.gen_int("c", stop=stop)

    mock = sgl.MockBackend()
    program.run(backend=mock, temperature=0.5, stop=stop, max_new_tokens=10)
    a, b, c = (node.sampling for node in nodes_of(mock) if isinstance(node, Gen))
    assert (a.max_new_tokens, a.min_new_tokens, a.stop, a.temperature, a.seed) == (200, 64, ("\n",), 0, 7)
    assert (b.max_new_tokens, b.min_new_tokens, b.stop, b.temperature) == (10, 0, ("\n",), 0.5)
    assert c.stop == ("\n", " ")
    assert stop == ["\n"]


def test_expressions_compose_and_do_not_change():
    base = "a" + sgl.gen("x")
    longer = base + "b" + base
    assert len(base.items) == 2
    assert len(longer.items) == 5
    with pytest.raises(TypeError):
        base + 3
    with pytest.raises(AttributeError):
        base.items = ()


# --- functions ---


def test_decorated_function_behaves_like_one():
    class Agent:
        greeting = "Hi "

        @sgl.function
        def greet(self, prompt, name="you"):
            """Greets."""
            prompt += self.greeting + name + sgl.gen("rest")
            return self

    agent = Agent()
    assert (Agent.greet.__name__, Agent.greet.__doc__, str(agent.greet.__signature__)) == (
        "greet",
        "Greets.",
        "(name='you')",
    )
    state = agent.greet("Ada", backend=sgl.MockBackend(["!"]))
    assert (state.text(), state.ret_value) == ("Hi Ada!", agent)


def test_20_bind_and_wrong_arguments():
    bound = few_shot.bind(question="Bound?1?")
    assert "Q: Bound?1?" in bound.run(backend=sgl.MockBackend()).text()
    rows = [{"question": "Row?"}]
    assert "Q: Bound?1?" in bound.run_batch(rows, backend=sgl.MockBackend())[0].text()
    assert rows == [{"question": "Row?"}]
    with pytest.raises(InvalidParameter, match="nothing"):
        few_shot.bind(nothing=1)
    for kwargs in ({}, {"question": "x", "temprature": 1}):
        with pytest.raises(InvalidParameter):
            few_shot.run(backend=sgl.MockBackend(), **kwargs)


def test_functions_that_cannot_be_programs():
    with pytest.raises(InvalidParameter):
        sgl.function(lambda: None)

    def later(s):
        yield

    async def much_later(s):
        yield

    for generator in (later, much_later):
        with pytest.raises(InvalidParameter, match="generator"):
            sgl.function(generator)


# --- batches ---


@sgl.function
def row(s, i, label="x"):
    s += f"{label}{i}:" + sgl.gen("v")
    if s["v"] == "boom":
        raise ValueError(f"row {i}")


def boom_at(*rows: int) -> sgl.MockBackend:
    return sgl.MockBackend(lambda prompt, node: "boom" if int(prompt[1:-1]) in rows else prompt[1:-1])


def test_batch_order_forms_and_empty():
    mock = boom_at()
    states = row.run_batch([{"i": 0}, (1, "y"), [2]], backend=mock, num_threads=2)
    assert [state["v"] for state in states] == ["0", "1", "2"]
    assert row.run_batch([], backend=mock) == []
    assert list(row.run_batch([], backend=mock, generator_style=True)) == []
    seen = [state["v"] for state in row.run_batch([(i,) for i in range(450)], backend=mock, generator_style=True)]
    assert seen == [str(i) for i in range(450)]


def test_batch_wrong_rows_run_nothing():
    mock = boom_at()
    for wrong in ([(1, 2, 3)], [{"j": 1}], ["text"], [{"i": 1}, {}]):
        with pytest.raises(InvalidParameter, match="row"):
            row.run_batch(wrong, backend=mock)
    assert mock.graphs == []


def test_45_one_row_fails_others_finish():
    seen = []
    results = row.run_batch(
        [(i,) for i in range(100)],
        backend=boom_at(57),
        on_error="return",
        on_result=lambda index, result: seen.append(index),
    )
    assert sorted(seen) == list(range(100))
    assert isinstance(results[57], ValueError)
    assert [result["v"] for i, result in enumerate(results) if i != 57] == [str(i) for i in range(100) if i != 57]


@pytest.mark.parametrize("generator_style", [False, True])
def test_batch_raises_the_first_error(generator_style):
    with pytest.raises(ValueError, match="row 3"):
        list(
            row.run_batch([(i,) for i in range(9)], backend=boom_at(3), num_threads=1, generator_style=generator_style)
        )


def test_an_interrupt_in_a_row_ends_the_batch():
    @sgl.function
    def interrupted(s, i):
        s += sgl.gen("v")
        if i == 1:
            raise KeyboardInterrupt
        s["v"]

    with pytest.raises(KeyboardInterrupt):
        interrupted.run_batch([(i,) for i in range(4)], backend=sgl.MockBackend(delay_s=60), on_error="return")


def test_batch_lets_the_others_end_when_asked():
    mock = boom_at(0)
    with pytest.raises(ValueError, match="row 0"):
        row.run_batch([(i,) for i in range(5)], backend=mock, stop_on_error=False)
    assert len(mock.prompts) == 5


def test_iterator_lets_the_others_end_when_asked():
    mock = boom_at(1, 3)
    seen = {}
    results = row.run_batch(
        [(i,) for i in range(5)],
        backend=mock,
        generator_style=True,
        stop_on_error=False,
        on_result=seen.__setitem__,
    )
    assert next(results)["v"] == "0"
    with pytest.raises(ValueError, match="row 1"):
        next(results)
    assert list(seen) == [0, 1, 2, 3, 4]
    assert [isinstance(result, ValueError) for result in seen.values()] == [False, True, False, True, False]
    assert list(results) == []


def test_batch_arguments_are_checked_like_those_of_a_run():
    mock = boom_at()
    for call in (lambda **k: row.run(0, **k), lambda **k: row.run_batch([(0,)], **k)):
        with pytest.raises(Unsupported):
            call(backend=mock, return_text_in_logprobs=True)
    for kwargs in ({"temperature": -1}, {"stop": 5}, {"stop_token_ids": "x"}):
        for call in (lambda **k: row.run(0, **k), lambda **k: row.run_batch([(0,)], **k)):
            with pytest.raises(InvalidParameter):
                call(backend=mock, **kwargs)
    assert mock.graphs == []
    row.run_batch([(0,)], backend=mock, stop="s", stop_token_ids=7, top_k=3, presence_penalty=0.5, logprob_start_len=-1)
    sampling = nodes_of(mock)[1].sampling
    assert (sampling.stop, sampling.stop_token_ids, sampling.top_k, sampling.presence_penalty) == (("s",), (7,), 3, 0.5)


# --- scale ---


def test_46_many_live_states_without_a_thread_each():
    @sgl.function
    def program(s):
        s += "prefix"
        forks = s.fork(2000)
        forks += sgl.gen("x")
        before = threading.active_count()
        values = [fork["x"] for fork in forks]
        assert threading.active_count() <= before + 1
        return len(values)

    mock = sgl.MockBackend(lambda prompt, node: "v")
    state = program.run(backend=mock)
    assert state.ret_value == 2000
    assert len(mock.graphs) == 2
    assert sum(isinstance(node, Fork) for node in nodes_of(mock)) == 1
    assert len([node for node in nodes_of(mock) if isinstance(node, (Text, Select))]) == 1
