"""Test programs 1 to 21: those of SGLang's own tests and examples, on the embedded model.

Numbers are those of `README.md` here, which says where each is tested; 16 (API speculation) and 19 (tracing) are with
their modules. A program runs on the toy model or the mock where its point is not what a model says; the reason stands
at its test.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import json
import re

import pytest

import sgl
from sgl.errors import Unsupported
from sgl.lang.graph import Media
from sgl.runtime.engine import Engine
from sgl.runtime.selection import decide

GREEDY = {"temperature": 0}

SHOTS = """Q: What is the capital of Germany?
A: Berlin
Q: What is the capital of Japan?
A: Tokyo
Q: What is the capital of Egypt?
A: Cairo
"""


@sgl.function
def few_shot(s, question):
    s += SHOTS
    s += "Q: " + question + "\nA:" + sgl.gen("answer", stop="\n", max_tokens=8)


def test_1_few_shot_run_and_batch(smollm2: Engine) -> None:
    smollm2.flush_cache(wait_s=5)
    state = few_shot.run("What is the capital of France?", backend=smollm2, **GREEDY)
    assert state["answer"].strip() == "Paris"
    assert state.usage.cached_tokens == 0
    rows = [{"question": f"What is the capital of {country}?"} for country in ("Italy", "Spain", "Russia")]
    states = few_shot.run_batch(rows, backend=smollm2, **GREEDY)
    assert [state["answer"].strip() for state in states] == ["Rome", "Madrid", "Moscow"], "in the order of the rows"
    for each in states:
        assert each.usage.prefill_tokens < 12, "the shots are computed once, by the first run"


@sgl.function
def chat(s):
    s += sgl.system("Be brief.")
    with s.user():
        s += "Name a colour."
    s += sgl.assistant(sgl.gen("first", max_tokens=8))
    s.user("Another one.")
    s += sgl.assistant_begin() + sgl.gen("second", max_tokens=8) + sgl.assistant_end()


def test_2_two_turns_are_the_models_own_template(smollm2: Engine) -> None:
    state = chat.run(backend=smollm2, **GREEDY)
    turns = [("system", "Be brief."), ("user", "Name a colour."), ("assistant", state["first"]),
             ("user", "Another one."), ("assistant", state["second"])]  # fmt: skip
    assert state.messages() == [{"role": role, "content": content} for role, content in turns]
    assert state.text() == "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)


def test_2_without_a_system_turn_the_template_adds_its_own(smollm2: Engine) -> None:
    @sgl.function
    def program(s):
        s += sgl.user("Hi") + sgl.assistant(sgl.gen("x", max_tokens=1))

    state = program.run(backend=smollm2, **GREEDY)
    assert state.text().startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


STATEMENT = "Statement: Fish live in water.\nTrue, False or Unknown? Answer:"
OPTIONS = [" True", " False", " Unknown"]


def test_3_42_select_is_exhaustive_scoring(smollm2: Engine) -> None:
    @sgl.function
    def program(s):
        s += STATEMENT + sgl.select("truth", OPTIONS)

    state = program.run(backend=smollm2)
    outputs = smollm2.generate(
        [STATEMENT + option for option in OPTIONS],
        {"max_new_tokens": 0, "temperature": 0},
        return_logprob=True,
        logprob_start_len=0,
    )
    prompt_len = smollm2.generate(STATEMENT, {"max_new_tokens": 0})["meta_info"]["prompt_tokens"]
    means = []
    for output in outputs:
        scores = [entry[0] for entry in output["meta_info"]["input_token_logprobs"][prompt_len:]]
        means.append(sum(scores) / len(scores))
    assert state.get_meta_info("truth")["normalized_prompt_logprobs"] == pytest.approx(means, abs=1e-2)
    assert state["truth"] == OPTIONS[means.index(max(means))]
    probabilities = state.probabilities("truth")
    assert sum(probabilities.values()) == pytest.approx(1)
    assert max(probabilities, key=probabilities.__getitem__) == state["truth"]


def test_4_integers(smollm2: Engine) -> None:
    @sgl.function
    def program(s):
        s += "Q: How many days are in a week?\nA: 7\nQ: How many hours are in a day?\nA: " + sgl.gen_int("hours")
        s += "\nQ: How many days are in a year?\nA: " + sgl.gen_int("days")

    state = program.run(backend=smollm2, **GREEDY)
    for name in ("hours", "days"):  # what the small model knows of it is another matter
        assert re.fullmatch("[-+]?[0-9]+", state[name]), "no stop is left in it"
        assert state.value(name) == int(state[name])


@sgl.function
def character(s, name, typed):
    s += f"{name} is a character in Harry Potter.\n"
    with s.var_scope("json"):
        if typed:
            s += (
                '{"name": '
                + sgl.gen("name", dtype=str, max_tokens=12)
                + ', "age": '
                + sgl.gen("age", dtype=int, max_tokens=3)
            )
        else:
            s += '{"name": ' + sgl.gen(regex=r'"[\w ]{1,12}"') + ', "age": ' + sgl.gen(regex="[1-9][0-9]?")
        s += ', "house": "' + sgl.select("house", ["Gryffindor", "Slytherin"]) + '"}'


def test_5_6_json_by_fragments(smollm2: Engine) -> None:
    greedy = character.run("Ron Weasley", False, backend=smollm2, **GREEDY)
    drawn = character.run("Hermione Granger", True, backend=smollm2, seed=3)
    for state in (greedy, drawn):
        value = json.loads(state["json"])
        assert list(value) == ["name", "age", "house"]
        assert isinstance(value["name"], str)
        assert isinstance(value["age"], int)
        assert value["house"] in ("Gryffindor", "Slytherin")


def test_7_expert_prompting(smollm2: Engine) -> None:
    @sgl.function
    def program(s, question):
        s += sgl.user("Who knows about this: " + question)
        s += sgl.assistant("An expert on it is " + sgl.gen("expert", max_tokens=8, stop=[".", "\n"]))
        s += sgl.user(f"You are {s['expert']}. " + question)
        s += sgl.assistant(sgl.gen("answer", max_tokens=8))

    state = program.run("How do planes fly?", backend=smollm2, **GREEDY)
    assert state.messages()[-2]["content"] == f"You are {state['expert']}. How do planes fly?"


def test_8_calculator(smollm2: Engine) -> None:
    @sgl.function
    def program(s, question):
        s += "Q: 3 boxes of 12 eggs?\nA: (3 * 12) = 36\nQ: 7 weeks in days?\nA: (7 * 7) = 49\n"
        s += f"Q: {question}\nA: (" + sgl.gen("product", regex=r"[0-9]{1,3} \* [0-9]{1,3}\)", stop=")") + ") = "
        left, right = s["product"].split("*")
        with s.var_scope("answer"):
            s += str(int(left) * int(right))

    state = program.run("13 boxes of 17 eggs?", backend=smollm2, **GREEDY)
    assert (state["product"], state["answer"]) == ("13 * 17", "221")
    assert state.text().endswith("(13 * 17) = 221")


def test_9_react_extends_the_cached_prefix(smollm2: Engine) -> None:
    @sgl.function
    def program(s):
        s += "Question: Where was Ada Lovelace born?\n"
        for step in range(1, 5):
            s += f"Thought {step}:" + sgl.gen("thought", max_tokens=10, stop="\n", list_append=True)
            s += f"\nAction {step}: " + sgl.select("action", ["Search", "Finish"], list_append=True) + "\n"
            if s["action"][-1] == "Finish":
                break
            s += f"Observation {step}: She was born in London.\n"

    state = program.run(backend=smollm2, **GREEDY)
    assert len(state["thought"]) == len(state["action"]) <= 4
    metas = state.get_meta_info("thought")
    for before, after in itertools.pairwise(metas):
        reached = before["prompt_tokens"] + before["completion_tokens"] - 1
        assert after["cached_tokens"] >= reached - 1, "all of the steps before; the last token at most is healed"


def test_9_real_functions_as_tools(smollm2: Engine) -> None:
    seen: list[tuple[int, int]] = []

    def multiply(a: int, b: int) -> int:
        """Multiply two integers."""
        seen.append((a, b))
        return a * b

    @sgl.function
    def program(s, question):
        s += sgl.system(sgl.tool_prompt([multiply])) + sgl.user(question)
        return s.tools([multiply], tool_choice="multiply", max_rounds=1, max_tokens=48)

    state = program.run("What is 17 times 3?", backend=smollm2, **GREEDY)
    (result,) = state["answer_calls"]
    assert seen == [(result.call.arguments["a"], result.call.arguments["b"])], "integers, by the constraint"
    assert result.value == seen[0][0] * seen[0][1]
    told = state.messages()[3]["content"]
    assert told == f"<tool_response>\n{result.content}\n</tool_response>"
    assert "<tool_call>" not in state.ret_value, "the last round has to answer"


@sgl.function
def skeleton(s, num):
    s += "Tips for a long and healthy life, in a few words each:\n"
    s += "1. " + sgl.gen("skeleton", max_tokens=24, stop="\n\n") + "\n"
    forks = s.fork(num)
    forks += lambda i: f"More on tip {i + 1}:"
    forks += sgl.gen("detail", max_tokens=6)
    forks.join()
    s += "In short:" + sgl.gen("summary", max_tokens=6)


def test_10_skeleton_of_thought(smollm2: Engine) -> None:
    smollm2.flush_cache(wait_s=5)
    state = skeleton.run(5, backend=smollm2, **GREEDY)
    assert len(state["detail"]) == 5
    alone = state.get_meta_info("skeleton")
    prefix = alone["prompt_tokens"] + alone["completion_tokens"]
    suffixes = sum(meta["prompt_tokens"] - meta["cached_tokens"] for meta in state.get_meta_info("detail"))
    assert suffixes <= 5 * 9, "each child its own words, and a token at the seam"
    assert state.usage.prefill_tokens < prefix + suffixes + 16


def test_11_joined_statements_in_order(smollm2: Engine) -> None:
    @sgl.function
    def program(s):
        s += "Statements.\n"
        forks = s.fork(3)
        forks += [f"{i}. {text}\n" for i, text in enumerate(["Bob is tall.", "The cat is black.", "It rains."])]
        forks.join("concate_and_append")
        s += "Q: What colour is the cat?\nA: The cat is" + sgl.gen("answer", max_tokens=1)

    state = program.run(backend=smollm2, **GREEDY)
    assert "0. Bob is tall.\n1. The cat is black.\n2. It rains.\nQ:" in state.text()
    assert state["answer"] == " black"


def test_12_images_are_ordered_parts() -> None:
    """On the mock: the local engine has no model that sees, and says so with the line."""

    @sgl.function
    def program(s):
        with s.user():
            s += sgl.image(b"one") + "and" + sgl.image(b"two") + sgl.image(b"one") + sgl.video(b"film", 4)
        s += sgl.assistant(sgl.gen("x"))

    mock = sgl.MockBackend()
    program.run(backend=mock)
    media = [node for graph in mock.graphs for node in graph.nodes if isinstance(node, Media)]
    assert [node.data for node in media] == [b"one", b"two", b"one", b"film"]
    assert media[0].digest == media[2].digest != media[1].digest, "the same image is the same in the cache"
    assert [node.num_frames for node in media] == [None, None, None, 4]


def test_12_the_engine_refuses_images_with_the_line(dummy_engine: Engine) -> None:
    @sgl.function
    def program(s):
        s += "look: " + sgl.image(b"one")
        s += sgl.gen("x")

    with pytest.raises(Unsupported, match="Media") as caught:
        program.run(backend=dummy_engine)
    assert caught.value.location.function == "program"


def test_13_streams_add_up(smollm2: Engine) -> None:
    @sgl.function
    def program(s):
        s += sgl.user("Greet me in Greek.") + sgl.assistant(sgl.gen("hello", max_tokens=12, return_logprob=True))

    state = program.run(backend=smollm2, stream=True, **GREEDY)
    whole = list(state.text_iter())
    assert "".join(whole) == state.text() == program.run(backend=smollm2, **GREEDY).text()
    assert len(whole) > 3

    async def consume() -> list[tuple[str, dict]]:
        state = program.run(backend=smollm2, stream=True, **GREEDY)
        return [pair async for pair in state.text_async_iter("hello", return_meta_data=True)]

    pairs = asyncio.run(consume())
    assert "".join(piece for piece, _ in pairs) == state["hello"]
    counts = [len(meta.get("output_token_logprobs", ())) for _, meta in pairs]
    assert sum(counts) == pairs[-1][1]["completion_tokens"] == 12
    assert pairs[-1][1]["finish_reason"]["type"] == "length"


IPV4 = r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"


def test_14_regular_expressions(smollm2: Engine) -> None:
    @sgl.function
    def program(s):
        s += "The address of Google's name server is " + sgl.gen("ip", regex=IPV4, max_tokens=16)
        s += "\nIn Chinese: " + sgl.gen("word", regex="(你好|谢谢)。", max_tokens=12)

    state = program.run(backend=smollm2, **GREEDY)
    ipaddress.ip_address(state["ip"])
    assert re.fullmatch("(你好|谢谢)。", state["word"])


def test_15_data_types(smollm2: Engine) -> None:
    @sgl.function
    def program(s):
        s += 'A word in quotes: "tea"\nA word in quotes: ' + sgl.gen("str", dtype=str, max_tokens=12)
        s += "\nA number: 5\nA number: " + sgl.gen("int", dtype=int, stop="\n")
        s += "\nPi is " + sgl.gen("float", dtype=float, max_tokens=8)
        s += "\nSnow is white, True or False: " + sgl.gen("bool", dtype="bool")

    state = program.run(backend=smollm2, **GREEDY)
    values = {name: state.value(name) for name in ("str", "int", "float", "bool")}
    assert {name: type(value).__name__ for name, value in values.items()} == {name: name for name in values}
    assert values["float"] == pytest.approx(3.14, abs=0.01)


def test_17_least_number_of_tokens(dummy_engine: Engine) -> None:
    """On the toy model: what is said makes no difference."""

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("x", min_tokens=64, max_tokens=80, stop=[chr(i) for i in range(97, 113)])

    state = program.run(backend=dummy_engine, **GREEDY)
    assert 64 <= state.get_meta_info("x")["completion_tokens"] <= 80


def test_18_methods_of_choice() -> None:
    """By hand: log-probabilities as they are known of these words, without and with the prompt that asks for one."""
    choices = ["organ", "organism", "antidisestablishmentarianism"]
    paths = [(10,), (11, 12), (13, 14, 15, 16, 17)]
    logprobs = [[-2.0], [-2.2, -0.6], [-6.0, -0.05, -0.02, -0.02, -0.01]]
    unconditional = [[-2.1], [-5.0, -3.5], [-6.1, -0.05, -0.02, -0.02, -0.01]]

    def best(method: str) -> str:
        index, _ = decide(choices, paths, logprobs, method, unconditional=unconditional)
        return choices[index]

    assert best("token_length_normalized") == "antidisestablishmentarianism", "its mean is high"
    assert best("greedy_token_selection") == "organ"
    assert best("unconditional_likelihood_normalized") == "organism"


def test_20_bound_arguments_are_part_of_the_constant_prefix(smollm2: Engine) -> None:
    @sgl.function(num_api_spec_tokens=32)
    def program(s, shots, question):
        s += shots + "Q: " + question + "\nA:" + sgl.gen("answer", stop="\n", max_tokens=4)

    bound = program.bind(shots=SHOTS)
    assert bound.num_api_spec_tokens == 32
    smollm2.flush_cache(wait_s=5)
    num_cached = bound.cache(smollm2)
    assert num_cached > 30
    state = bound.run(question="What is the capital of Italy?", backend=smollm2, **GREEDY)
    assert state.usage.cached_tokens >= num_cached - 1


def test_21_reasoning_leaves_the_state(smollm2: Engine) -> None:
    @sgl.function
    def program(s):
        for country, city in (("Germany", "Berlin"), ("Italy", "Rome")):
            s += f"Q: Capital of {country}?\nA: <think>It is {city}.</think>The capital of {country} is {city}.\n"
        s += "Q: Capital of France?\nA:"
        s += sgl.separate_reasoning(sgl.gen("answer", stop="\n", max_tokens=30), model_type="qwen3")
        s += "\nQ: Capital of Spain?\nA:" + sgl.gen("more", max_tokens=4)

    state = program.run(backend=smollm2, stream=True, **GREEDY)
    assert "".join(state.text_iter("answer")) == state["answer"]
    assert "".join(state.text_iter("answer_reasoning_content")) == state["answer_reasoning_content"] != ""
    assert "Paris" in state["answer"]
    assert state.text().endswith(f"France?\nA:{state['answer']}\nQ: Capital of Spain?\nA:{state['more']}")
    assert state.usage.rerendered_tokens > 0
