"""`/v1/messages` through the official client: the same answers as chat completions, as blocks and their events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest
from support.serving import Served, serving
from support.thinker import write_thinker

from sgl.runtime.engine import Engine

USER: list[Any] = [{"role": "user", "content": "Hi"}]
TOOL: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def served(dummy_engine: Engine) -> Iterator[Served]:
    with serving(dummy_engine, served_model_name="tiny", api_key=("secret",)) as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="secret", max_retries=0) as made:
        yield made


def ask(client: anthropic.Anthropic, messages: Any = USER, **more: Any) -> Any:
    body = {"temperature": 0, **more.pop("extra_body", {})}  # which the client has no name for any more
    return client.messages.create(**{"model": "tiny", "max_tokens": 8, "messages": messages, **more}, extra_body=body)


def chat(served: Served, messages: Any, **more: Any) -> Any:
    body = {"model": "tiny", "max_tokens": 8, "temperature": 0, "messages": messages, **more}
    with httpx2.Client(base_url=served.url, headers={"x-api-key": "secret"}) as http:
        return http.post("/v1/chat/completions", json=body).json()


def test_it_says_what_chat_says(client: anthropic.Anthropic, served: Served) -> None:
    system = {"role": "system", "content": "S"}
    said = chat(served, [system, *USER])
    blocks = [{"type": "text", "text": "H"}, {"type": "text", "text": "i", "cache_control": {"type": "ephemeral"}}]
    for answer in (
        ask(client, system="S"),
        ask(client, [{"role": "user", "content": blocks}], system=[{"type": "text", "text": "S"}]),
    ):
        assert answer.content[0].text == said["choices"][0]["message"]["content"]
        assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == said["usage"]["prompt_tokens"]
        assert answer.usage.output_tokens == said["usage"]["completion_tokens"]
    count = client.messages.count_tokens(model="tiny", messages=USER, system="S")
    assert count.input_tokens == said["usage"]["prompt_tokens"]
    begun = [*USER, {"role": "assistant", "content": "The"}]
    goes_on = chat(served, begun, continue_final_message=True)
    assert ask(client, begun).content[0].text == goes_on["choices"][0]["message"]["content"]


def test_a_stop_sequence_makes_no_whole_call_of_a_part(client: anthropic.Anthropic) -> None:
    answer = ask(client, tools=[TOOL], tool_choice={"type": "any"}, max_tokens=200, stop_sequences=["cit"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "cit")


def test_why_it_stopped(client: anthropic.Anthropic) -> None:
    full = ask(client)
    assert full.stop_reason in ("max_tokens", "end_turn")
    stop = full.content[0].text[1:2]
    cut = ask(client, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == full.content[0].text[:1]
    assert ask(client, max_tokens=1, extra_body={"ignore_eos": True}).stop_reason == "max_tokens"


@pytest.mark.parametrize("tools", [False, True])
def test_a_stream_adds_up_to_the_whole(client: anthropic.Anthropic, tools: bool) -> None:
    more: dict[str, Any] = {}
    if tools:
        choice = {"type": "any", "disable_parallel_tool_use": True}
        more = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 200}
    whole = ask(client, **more)
    with client.messages.stream(
        model="tiny", messages=USER, **{"max_tokens": 8, **more}, extra_body={"temperature": 0}
    ) as stream:
        names = [event.type for event in stream]
        last = stream.get_final_message()
    assert [block.model_dump(exclude={"id"}) for block in last.content] == [
        block.model_dump(exclude={"id"}) for block in whole.content
    ]
    assert (last.stop_reason, last.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert names[0] == "message_start"
    assert names[-1] == "message_stop"
    raw = [event.type for event in ask(client, stream=True, **more)]
    assert [name for name in raw if name not in ("content_block_delta", "ping")] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


def test_the_stream_begins_with_the_prompts_tokens(client: anthropic.Anthropic) -> None:
    first = next(iter(ask(client, stream=True)))
    assert first.message.usage.input_tokens == client.messages.count_tokens(model="tiny", messages=USER).input_tokens


def test_a_call_and_its_result_are_the_turns_of_a_chat(client: anthropic.Anthropic, served: Served) -> None:
    first = ask(client, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}, max_tokens=200)
    assert first.stop_reason == "tool_use"
    call = first.content[0]
    assert call.input["city"] in ("Oslo", "Rome")
    result = [{"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}]
    said = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]}
    second = ask(client, [*USER, said, {"role": "user", "content": result}], tools=[TOOL], tool_choice={"type": "none"})
    calls = [
        {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": json.dumps(each.input)}}
        for each in first.content
    ]
    turns = [
        *USER,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    function = {"name": TOOL["name"], "description": TOOL["description"], "parameters": TOOL["input_schema"]}
    expected = chat(served, turns, tools=[{"type": "function", "function": function}], tool_choice="none")
    assert second.content[0].text == expected["choices"][0]["message"]["content"]


def test_structured_output(client: anthropic.Anthropic) -> None:
    wanted = {"format": {"type": "json_schema", "schema": {"enum": ["left", "right"]}}}
    answer = ask(client, max_tokens=50, extra_body={"output_config": wanted})
    assert json.loads(answer.content[0].text) in ("left", "right")


def test_errors_are_the_clients_own(client: anthropic.Anthropic, served: Served) -> None:
    with pytest.raises(anthropic.BadRequestError) as failure:
        ask(client, extra_body={"temperature": -1})
    assert failure.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index,call-overload]
    with pytest.raises(anthropic.NotFoundError):
        ask(client, model="claude")
    wrong = anthropic.Anthropic(base_url=served.url, api_key="wrong", max_retries=0)
    with wrong, pytest.raises(anthropic.AuthenticationError):
        ask(wrong)


def test_thinking_is_a_block_of_its_own(tmp_path: Path) -> None:
    path = write_thinker(tmp_path)
    with (
        Engine(model_path=path, device="cpu", max_total_tokens=2048, num_threads=1) as engine,
        serving(engine) as served,
        anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client,
    ):
        wanted = {"format": {"type": "json_schema", "schema": {"enum": [1, 22]}}}
        asked = {"model": "default", "max_tokens": 100, "extra_body": {"output_config": wanted}}
        budget = {"type": "enabled", "budget_tokens": 6}
        thinks = ask(client, **asked, thinking=budget)
        events = list(ask(client, **asked, thinking=budget, stream=True))
        plain = ask(client, **asked, thinking={"type": "disabled"})
    assert [block.type for block in thinks.content] == ["thinking", "text"]
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    thoughts = "".join(delta.thinking for delta in deltas if delta.type == "thinking_delta")
    assert thoughts == thinks.content[0].thinking
    assert [block.type for block in plain.content] == ["text"]
    assert json.loads(plain.content[0].text) in (1, 22)
