"""Programs on the mock: what they submit, what comes back, and which arguments they take.

Numbers in names are those of the test programs in the language's reference: 1 few-shot QA, 2 chat, 4 integers,
5 JSON by fragments, 7 data dependency, 8 calculator, 9 ReAct, 10 skeleton, 11 append join.
"""

from __future__ import annotations

import gc
import itertools
import json

import pytest

import sgl
from sgl.errors import (
    GenerationError,
    InvalidParameter,
    InvalidProgram,
    InvalidRegex,
    InvalidSchema,
    StateLost,
    Truncated,
    Unsupported,
)
from sgl.grammars.spec import JsonSchema, Regex
from sgl.lang.graph import Gen, Join, Release


def nodes_of(mock: sgl.MockBackend) -> list:
    return [node for graph in mock.graphs for node in graph.nodes]


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
