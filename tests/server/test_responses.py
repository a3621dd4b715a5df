"""`/v1/responses` through the official client: the same answers as chat completions, as items and typed events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from support.serving import Served, serving
from support.thinker import write_thinker

from sgl.errors import NotFound
from sgl.runtime.engine import Engine
from sgl.server.openai.responses_store import ResponseStore

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0.0}
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CHAT_TOOL = {"type": "function", "function": {name: value for name, value in TOOL.items() if name != "type"}}


def reached(served: Served, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def served(dummy_engine: Engine) -> Iterator[Served]:
    with serving(dummy_engine, served_model_name="tiny", response_store_bytes=2**20, api_key=("one", "two")) as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with reached(served, "one") as made:
        yield made


def ask(client: openai.OpenAI, input: Any = "Hi", **more: Any) -> Any:
    return client.responses.create(**{**GREEDY, "input": input, "max_output_tokens": 8, **more})


def chat(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    return client.chat.completions.create(**{**GREEDY, "messages": messages, "max_tokens": 8, **more})


def test_it_says_what_chat_says(client: openai.OpenAI) -> None:
    said = chat(client, [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}])
    answer = ask(client, instructions="S", metadata={"a": "b"})
    assert answer.output_text == said.choices[0].message.content
    assert answer.usage.input_tokens == said.usage.prompt_tokens
    assert answer.usage.output_tokens == said.usage.completion_tokens
    assert answer.metadata == {"a": "b"}
    parts = [{"type": "input_text", "text": "H"}, {"type": "input_text", "text": "i"}]
    assert ask(client, [{"role": "user", "content": parts}], instructions="S").output_text == answer.output_text


def test_an_answer_that_was_cut_is_incomplete(client: openai.OpenAI) -> None:
    cut = ask(client, max_output_tokens=1, extra_body={"ignore_eos": True})
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output[0].status == "incomplete"


@pytest.mark.parametrize(
    "more", [{}, {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200}]
)
def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI, more: dict[str, Any]) -> None:
    events = list(ask(client, stream=True, **more))
    whole = ask(client, **more)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events]
    assert names[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert names[-1] == f"response.{whole.status}"
    last = events[-1].response
    assert _said(last) == _said(whole)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in last.output]
    kind = "response.function_call_arguments" if more else "response.output_text"
    deltas = "".join(event.delta for event in events if event.type == f"{kind}.delta")
    (end,) = [event for event in events if event.type == f"{kind}.done"]
    assert deltas == (end.arguments if more else end.text) == _said(whole)[0]


def _said(response: Any) -> list[str]:
    return [item.arguments if item.type == "function_call" else item.content[0].text for item in response.output]


def test_a_call_and_its_result_are_the_turns_of_a_chat(client: openai.OpenAI) -> None:
    forced = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 200}
    first = ask(client, **forced, parallel_tool_calls=False)
    (call,) = first.output
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    history = [{"role": "user", "content": "Hi"}, call.model_dump(), result]
    second = ask(client, history, tools=[TOOL], tool_choice="none")
    function = {"name": call.name, "arguments": call.arguments}
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
    ]
    said = chat(client, turns, tools=[CHAT_TOOL], tool_choice="none")
    assert second.output_text == said.choices[0].message.content
    assert second.usage.input_tokens == said.usage.prompt_tokens


class Trip(pydantic.BaseModel):
    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2]


def test_structured_output_is_parsed(client: openai.OpenAI) -> None:
    found = client.responses.parse(**GREEDY, input="Hi", text_format=Trip, max_output_tokens=200)
    assert isinstance(found.output_parsed, Trip)
    json_object = ask(client, text={"format": {"type": "json_object"}}, max_output_tokens=300)
    assert json_object.status == "incomplete" or isinstance(json.loads(json_object.output_text), dict)


def test_logprobs(client: openai.OpenAI) -> None:
    answer = ask(client, top_logprobs=2)
    entries = answer.output[0].content[0].logprobs
    assert len(entries) == answer.usage.output_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


def test_a_conversation_goes_on_from_what_is_kept(client: openai.OpenAI, served: Served) -> None:
    first = ask(client, "One")
    assert first.store
    second = ask(client, "Two", previous_response_id=first.id)
    turns = [{"role": "user", "content": "One"}, {"role": "assistant", "content": first.output_text},
             {"role": "user", "content": "Two"}]  # fmt: skip
    assert second.output_text == chat(client, turns).choices[0].message.content
    streamed = list(ask(client, "Two", previous_response_id=first.id, stream=True))[-1].response
    assert client.responses.retrieve(streamed.id).output_text == second.output_text
    assert not ask(client, store=False).store

    with reached(served, "two") as other:
        for reach in (other.responses.retrieve, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                reach(first.id)
        with pytest.raises(openai.NotFoundError) as failure:
            ask(other, previous_response_id=first.id)
        assert failure.value.param == "previous_response_id"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_nothing_is_kept_unless_the_operator_wants_it(dummy_engine: Engine) -> None:
    with serving(dummy_engine) as served, reached(served) as client:
        answer = ask(client, model="default")
        assert not answer.store
        for more in ({"store": True}, {"previous_response_id": answer.id}):
            with pytest.raises(openai.APIStatusError, match="--response-store-bytes"):
                ask(client, model="default", **more)
        with pytest.raises(openai.APIStatusError, match="--response-store-bytes"):
            client.responses.retrieve(answer.id)


def test_the_store_is_bounded_and_lets_go() -> None:
    now = [0.0]
    store = ResponseStore(max_bytes=1000, lease_s=10, clock=lambda: now[0])

    def keep(tenant: str, id: str, size: int = 200) -> bool:
        return store.keep(tenant, {"id": id}, [{"text": "x" * size}])

    assert not keep("a", "huge", 1000)
    assert keep("small", "s")
    for number in range(5):
        assert keep("large", f"l{number}")
        assert store.num_bytes <= 1000
    assert store.find("small", "s").response["id"] == "s"  # who holds the most makes room
    with pytest.raises(NotFound):
        store.find("large", "l0")
    now[0] = 11.0
    with pytest.raises(NotFound):
        store.find("small", "s")
    assert store.num_bytes == 0


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = write_thinker(Path(tmp_path_factory.mktemp("thinker")))
    options: dict[str, Any] = {"device": "cpu", "max_total_tokens": 2048, "num_threads": 1}
    with Engine(model_path=path, **options) as engine, serving(engine) as server:
        yield server


FORMAT = {"format": {"type": "json_schema", "name": "n", "schema": {"enum": [1, 22]}}}


def test_reasoning_is_an_item_of_its_own(thinker: Served) -> None:
    with reached(thinker) as client:
        asked = {"model": "default", "text": FORMAT, "max_output_tokens": 100, "input": "Hi"}
        thinks = client.responses.create(**asked, temperature=0, extra_body={"max_reasoning_tokens": 6})
        assert [item.type for item in thinks.output] == ["reasoning", "message"]
        assert thinks.usage.output_tokens_details.reasoning_tokens
        events = list(
            client.responses.create(**asked, temperature=0, stream=True, extra_body={"max_reasoning_tokens": 6})
        )
        shown = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
        assert shown == thinks.output[0].content[0].text
        assert events[-1].response.output_text == thinks.output_text
        assert json.loads(thinks.output_text) in (1, 22)

        for more in (
            {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
            {"reasoning": {"effort": "none"}},
        ):
            plain = client.responses.create(**asked, temperature=0, **more)
            assert [item.type for item in plain.output] == ["message"]
            assert json.loads(plain.output_text) in (1, 22)


def test_template_variables_of_a_chat(thinker: Served) -> None:
    with reached(thinker) as client:

        def prompt_tokens(**body: Any) -> int:
            found = client.chat.completions.create(
                model="default", messages=[{"role": "user", "content": "Hi"}], max_tokens=1, extra_body=body
            )
            return int(found.usage.prompt_tokens)  # type: ignore[union-attr]

        opened = len("<|>assistant\n<think>\n") - 2  # the special token is one
        assert prompt_tokens() - prompt_tokens(add_generation_prompt=False) == opened
        off = prompt_tokens(chat_template_kwargs={"enable_thinking": False, "unknown": [1]})
        assert off - prompt_tokens() == len("\n</think>\n\n")
        for taken in ({"messages": []}, {"tools": []}, {"eos_token": "x"}, {"a": "x" * 20_000}):
            with pytest.raises(openai.BadRequestError) as failure:
                prompt_tokens(chat_template_kwargs=taken)
            assert str(failure.value.param).startswith("chat_template_kwargs")
