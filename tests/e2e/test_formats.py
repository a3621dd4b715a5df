"""Tools and reasoning on the embedded model: a call that must come does, and a constraint waits for the reasoning."""

from __future__ import annotations

import json

import jsonschema_rs
import pytest

import sgl
from sgl.errors import InvalidParameter
from sgl.grammars.formats import Tool, message_parser, reasoning_format, tool_format
from sgl.runtime.engine import Engine

WEATHER = Tool(
    "get_weather",
    "Get the current weather of a city.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
        },
        "required": ["city", "unit", "days"],
    },
)
NOW = Tool("now", "Get the time.")


@pytest.mark.parametrize("name", ["hermes", "pythonic"])
def test_a_required_call_comes_and_obeys_its_schema(smollm2: Engine, name: str) -> None:
    """The embedded model's template knows no tools, so that the system text tells of them; any format will do then."""
    fmt = tool_format(name)

    @sgl.function
    def ask(s: sgl.ProgramState) -> None:
        s += sgl.system(fmt.tool_prompt([WEATHER, NOW]).system)
        s += sgl.user("What will the weather be in Paris tomorrow, in celsius?")
        tag = fmt.constraint([WEATHER, NOW], {"name": "get_weather"})
        assert tag is not None
        s += sgl.assistant(sgl.gen("call", structural_tag=tag.tag, max_tokens=160, temperature=0))

    message = fmt.parse(ask.run(backend=smollm2)["call"], [WEATHER, NOW])
    (call,) = message.calls
    assert (call.name, call.complete, message.content) == ("get_weather", True, "")
    assert jsonschema_rs.is_valid(WEATHER.parameters, json.loads(call.arguments))


def test_a_constraint_waits_for_the_reasoning_whose_budget_is_exact(smollm2: Engine) -> None:
    prompt = "Question: what is 2 + 2? First think, then answer.\n<think>\n"
    params = {"regex": "[0-9]", "reasoning": "qwen3", "max_new_tokens": 64, "temperature": 0}
    free = smollm2.generate(prompt, {"max_new_tokens": 4, "temperature": 0})
    short, held = (smollm2.generate(prompt, {**params, "thinking_budget": budget}) for budget in (4, 12))
    message = message_parser(reasoning=reasoning_format("qwen3"), prompt=prompt).parse(held["text"])
    assert held["output_ids"][:4] == short["output_ids"][:4] == free["output_ids"]  # of the reasoning nothing changes
    assert len(held["output_ids"]) - len(short["output_ids"]) == 12 - 4
    assert message.reasoning.startswith(free["text"].strip())
    assert len(message.content) == 1
    assert message.content.isdigit()
    assert held["meta_info"]["finish_reason"]["type"] == "stop"
    assert [each["meta_info"]["reasoning_tokens"] for each in (free, short, held)] == [0, 4, 12]


def test_reasoning_is_counted_where_nothing_holds_it(smollm2: Engine) -> None:
    @sgl.function
    def think(s: sgl.ProgramState) -> None:
        s += "2 + 2?\n<think>" + sgl.separate_reasoning(sgl.gen("x", max_tokens=6, temperature=0), "qwen3")

    before = smollm2.stats()["reasoning_tokens"]
    state = think.run(backend=smollm2)
    thoughts = state["x_reasoning_content"]
    assert thoughts
    assert (state["x"], state.get_meta_info("x")["reasoning_tokens"], state.usage.reasoning_tokens) == ("", 6, 6)
    assert smollm2.stats()["reasoning_tokens"] == before + 6


def test_a_token_budget_leaves_room_for_the_answer(smollm2: Engine) -> None:
    prompt = "Question: what is 2 + 2?\n<think>\n"
    params = {"regex": "[0-9]", "reasoning": "qwen3", "max_new_tokens": 16, "temperature": 0}
    text = smollm2.generate(prompt, params)["text"]
    assert text.partition("</think>")[2].strip().isdigit()


def test_a_budget_without_reasoning_is_refused(smollm2: Engine) -> None:
    with pytest.raises(InvalidParameter, match="has no reasoning"):
        smollm2.generate("Hi", {"max_reasoning_tokens": 4})
