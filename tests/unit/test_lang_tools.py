"""Tools, reasoning and templates in programs, on the mock: what the model is told, what is read out of what it says."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Literal

import pytest

import sgl
from sgl.errors import InvalidParameter, InvalidProgram, ToolError, UnsupportedSchema
from sgl.grammars.spec import StructuralTag
from sgl.lang.graph import Gen
from sgl.runtime.rendering import ModelRenderer
from sgl.runtime.text.template import ChatTemplate
from sgl.runtime.text.tokenizer import Tokenizer


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


def weather(city: str, unit: Literal["C", "F"] = "C") -> dict[str, object]:
    """The weather in a city.

    Not for the model.
    """
    if city == "Atlantis":
        raise LookupError("no such city")
    return {"city": city, "degrees": 20, "unit": unit}


async def later(x: int) -> str:
    """Something slow."""
    await asyncio.sleep(0)
    return f"later {x}"


def written(*calls: tuple[str, dict[str, object]]) -> str:
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls
    )


@sgl.function
def assistant(s, question, **options):
    s += sgl.system(sgl.tool_prompt([add, weather, later])) + sgl.user(question)
    return s.tools([add, weather, later], **options)


@sgl.function
async def async_assistant(s, question, **options):
    s += sgl.system(sgl.tool_prompt([add, weather, later])) + sgl.user(question)
    return await s.tools([add, weather, later], **options)


BOTH = pytest.mark.parametrize("program", [assistant, async_assistant])


@BOTH
def test_calls_are_run_and_told_until_there_is_an_answer(program):
    mock = sgl.MockBackend(
        [
            written(("add", {"a": 2, "b": 3}), ("weather", {"city": "Rome"}), ("later", {"x": 7})),
            "Let me see. " + written(("add", {"a": 5})),
            "It is 6.",
        ]
    )
    state = program.run("Sum?", backend=mock)
    assert (state.ret_value, state["answer"]) == ("It is 6.",) * 2
    results = state["answer_calls"]
    assert [result.call.name for result in results] == ["add", "weather", "later", "add"]
    assert [result.value for result in results] == [
        5,
        {"city": "Rome", "degrees": 20, "unit": "C"},
        "later 7",
        6,
    ]
    roles = [message["role"] for message in state.messages()]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    told = state.messages()[3]["content"]
    assert told.count("<tool_response>") == 3
    assert '{"city":"Rome","degrees":20,"unit":"C"}' in told
    system = state.messages()[0]["content"]
    assert "Add two numbers." in system
    assert "Not for the model" not in system


@BOTH
def test_what_a_tool_raises_is_told_or_raised(program):
    answers = [written(("weather", {"city": "Atlantis"}), ("add", {"a": "x"}), ("fly", {})), "Sorry."]
    state = program.run("?", backend=sgl.MockBackend(answers))
    assert state.ret_value == "Sorry."
    contents = [result.content for result in state["answer_calls"]]
    assert contents[0] == "Error: LookupError: no such city"
    assert "no add" in contents[1]
    assert contents[2] == "Error: there is no tool 'fly'; there are add, weather, later"
    with pytest.raises(ToolError, match="no such city") as caught:
        program.run("?", on_error="raise", backend=sgl.MockBackend(answers))
    assert isinstance(caught.value.__cause__, LookupError)
    assert (caught.value.tool, caught.value.location.function) == ("weather", program.__name__)


def test_calls_run_beside_each_other():
    barrier = threading.Barrier(2, timeout=30)

    def meet(x: int) -> int:
        """Wait for the other."""
        barrier.wait()
        return x

    @sgl.function
    def program(s):
        return s.tools([meet])

    mock = sgl.MockBackend([written(("meet", {"x": 1}), ("meet", {"x": 2})), "Met."])
    assert [result.value for result in program.run(backend=mock)["answer_calls"]] == [1, 2]


def test_choices_of_tools_become_constraints_and_rounds_end():
    answers = iter([written(("add", {"a": 1})), written(("add", {"a": 1})), "2"])
    mock = sgl.MockBackend(lambda prompt, node: next(answers))
    state = assistant.run("?", tool_choice="add", max_rounds=2, role="tool", backend=mock)
    gens = [node for graph in mock.graphs for node in graph.nodes if isinstance(node, Gen)]
    assert len(gens) == 3
    assert all(isinstance(node.constraint, StructuralTag) for node in gens)
    assert len({node.constraint for node in gens}) == 3, "this one, any, none"
    assert [tool.name for tool in gens[0].tools] == ["add", "weather", "later"]
    roles = [message["role"] for message in state.messages()]
    assert roles[2:] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert state.messages()[3]["content"] == "2", "bare, in a role of its own"


@pytest.mark.parametrize(("max_tokens", "why"), [(3, "max_tokens ended the text"), (99, "its end is missing")])
def test_a_call_that_breaks_off_says_why(max_tokens, why):
    @sgl.function
    def program(s):
        s += sgl.gen("x", tools=[weather], max_tokens=max_tokens)
        return s.calls("x")

    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "New York and so on'
    (call,) = program.run(backend=sgl.MockBackend([text if max_tokens > 3 else text + '"}}\n</tool_call>'])).ret_value
    assert (call.name, call.arguments) == ("weather", {})
    assert call.problem.startswith("the call of weather is not complete: " + why)


def test_a_tool_that_is_not_among_them_is_told_those_that_are():
    with pytest.raises(InvalidParameter, match=r"tool_choice is 'nosuch'; .* of the tools 'add', 'weather'"):
        sgl.gen("x", tools=[add, weather], tool_choice="nosuch")


def test_a_generation_with_tools_by_hand():
    @sgl.function
    def program(s):
        expr = sgl.gen("x", tools=[add], tool_format="pythonic")
        s += expr
        return s.calls("x"), s.calls(expr), s["x"]

    calls, same, text = program.run(backend=sgl.MockBackend(["Well: [add(a=1, b=2)]"])).ret_value
    assert calls == same
    assert [(call.name, call.arguments) for call in calls] == [("add", {"a": 1, "b": 2})]
    assert text == "Well:"

    @sgl.function
    def plain(s):
        s += sgl.gen("x")

    with pytest.raises(InvalidProgram, match="without tools"):
        plain.run(backend=sgl.MockBackend()).calls("x")


def test_wrong_tools():
    def untyped(x): ...

    for tools in ([], "add", [3], [add, add]):
        with pytest.raises(InvalidParameter):
            sgl.gen("x", tools=tools)
    with pytest.raises(UnsupportedSchema):
        sgl.gen("x", tools=[untyped])
    for wrong in ({"regex": "a"}, {"type": int}, {"tool_format": "none such"}, {"tool_choice": "fly"}):
        with pytest.raises(InvalidParameter):
            sgl.gen("x", tools=[add], **wrong)


# --- reasoning ---


@sgl.function
def think(s, n=1):
    s += sgl.user("2 + 2?")
    s += sgl.assistant(sgl.separate_reasoning(sgl.gen("sum", n=n), model_type="qwen3"))
    s += "!"


def test_21_reasoning_is_a_variable_of_its_own():
    mock = sgl.MockBackend(["<think>Two and\ntwo.</think>\n\n4 it is"])
    state = think.run(backend=mock, stream=True)
    assert (state["sum"], state["sum_reasoning_content"]) == ("4 it is", "Two and\ntwo.")
    assert "".join(state.text_iter("sum")) == "4 it is"
    assert "".join(state.text_iter("sum_reasoning_content")) == "Two and\ntwo."
    assert state.messages()[1] == {"role": "assistant", "content": "4 it is"}
    assert state.text().endswith("assistant\n4 it is<|im_end|>\n!")
    many = think.run(2, backend=sgl.MockBackend(["<think>a</think>b", "c"]))
    assert (many["sum"], many["sum_reasoning_content"]) == (["b", "c"], ["a", ""])


def test_wrong_reasoning():
    for wrong in ({"model_type": "no such"}, {"expr": "text"}):
        with pytest.raises(InvalidParameter):
            sgl.separate_reasoning(**{"expr": sgl.gen("x"), "model_type": "qwen3", **wrong})

    @sgl.function
    def program(s):
        s += sgl.separate_reasoning(sgl.gen("x"))

    with pytest.raises(InvalidParameter, match="does not say"):
        program.run(backend=sgl.MockBackend())


class Knowing(sgl.MockBackend):
    """A backend that knows the forms of its model."""

    def server_info(self):
        return {**super().server_info(), "formats": {"tool": "pythonic", "reasoning": "qwen3"}}


def test_forms_are_the_models_own_where_none_is_named():
    @sgl.function
    def program(s):
        s += sgl.system("Help. " + sgl.tool_prompt([add])) + sgl.user("?")
        s += sgl.assistant(sgl.separate_reasoning(sgl.gen("x")))
        return s.tools([add])

    mock = Knowing(["<think>hm</think>ok", "[add(a=1, b=2)]", "3"])
    state = program.run(backend=mock)
    assert (state["x"], state["x_reasoning_content"], state.ret_value) == ("ok", "hm", "3")
    system = state.messages()[0]["content"]
    assert system.startswith("Help. You are an expert in composing functions.")
    assert [result.value for result in state["answer_calls"]] == [3]


TOOLS_TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if loop.first and tools %}

# Tools
{% for tool in tools %}{{ tool.function.name }}: {{ tool.function.description }}
{% endfor %}{% endif %}</{{ m.role }}>{% endfor %}"""


def test_the_models_own_template_tells_of_tools_where_it_knows_them():
    tokenizer = Tokenizer.toy()
    tokenizer.chat_template = ChatTemplate(TOOLS_TEMPLATE)
    mock = sgl.MockBackend(["hi"])
    mock._renderer = ModelRenderer("toy", tokenizer)

    @sgl.function
    def program(s):
        s += sgl.system("Help." + sgl.tool_prompt([add])) + sgl.user("?") + sgl.assistant(sgl.gen("x"))

    told = [{"type": "function", "function": {"name": "add", "description": "Add two numbers."}}]
    messages = [("system", "Help."), ("user", "?"), ("assistant", "hi")]
    expected = tokenizer.chat_template.render([{"role": r, "content": c} for r, c in messages], tools=told)
    assert program.run(backend=mock).text() == expected

    @sgl.function
    def named(s):
        s += sgl.system(sgl.tool_prompt([add], tool_format="hermes"))

    assert "<tool_call>" in named.run(backend=mock).text(), "a format that was named is the program's"


def test_reasoning_that_the_program_has_opened_and_types_behind_it():
    @sgl.function
    def program(s):
        s += "2 + 2? <think>" + sgl.separate_reasoning(sgl.gen("sum", type=int), model_type="qwen3")

    state = program.run(backend=sgl.MockBackend(["Two twos.</think>4"]), stream=True)
    assert (state["sum"], state["sum_reasoning_content"]) == (4, "Two twos.")
    assert "".join(state.text_iter("sum_reasoning_content")) == "Two twos."


def test_compiled_programs_have_typed_values_and_reasoning():
    @sgl.function
    def program(s, question):
        s += question + sgl.gen("n", type=int) + " "
        s += sgl.separate_reasoning(sgl.gen("x"), model_type="qwen3")

    run = program.compile().run(question="?", backend=sgl.MockBackend(["7", "<think>a</think>b"]))
    assert (run["n"], run["x"], run["x_reasoning_content"], run.text()) == (7, "b", "a", "?7 b")


def test_a_model_that_calls_where_it_has_to_answer_is_an_error():
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'

    @sgl.function
    def program(s):
        s += sgl.user("?")
        return s.tools([add], max_rounds=2)

    with pytest.raises(ToolError, match="'add' after 2 rounds of calls") as caught:
        program.run(backend=sgl.MockBackend([call] * 3))
    assert caught.value.location.function == "program"


def test_calls_of_a_conversation_have_ids_of_their_own():
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'

    @sgl.function
    def program(s):
        s += sgl.user("?") + sgl.assistant("")
        s.tools([add])

    state = program.run(backend=sgl.MockBackend([call + call, call, "done"]))
    ids = [result.call.id for result in state["answer_calls"]]
    assert len(set(ids)) == len(ids) == 3


# --- templates ---


def test_35_templates_with_expressions(tmp_path: Path):
    path = tmp_path / "prompt.j2"
    path.write_text("{% for item in items %}{{ loop.index }}. {{ item }}\n{% endfor %}Best: {{ best }}\n")
    form = sgl.template(path)

    @sgl.function
    def program(s):
        s += form(items=["tea {{ x }}", sgl.gen("own", stop="\n")], best=sgl.select("best", ["1", "2"]) + "!")

    state = program.run(backend=sgl.MockBackend(["rice"]))
    assert state.text() == "1. tea {{ x }}\n2. rice\nBest: 1!\n"
    for source, values in (("{{ a }}", {}), ("{{ a.b.c }}", {"a": 1}), ("{{ 1 / a }}", {"a": 0})):
        with pytest.raises(InvalidParameter, match="filled in"):
            sgl.template(source)(**values)
    with pytest.raises(InvalidParameter, match="line 2"):
        sgl.template("\n{% if %}")
    for wrong in (tmp_path / "none", 3):
        with pytest.raises(InvalidParameter):
            sgl.template(wrong)
    with pytest.raises(InvalidParameter):
        sgl.template("{{ ''.__class__.__mro__ }}")()
