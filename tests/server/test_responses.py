"""`/v1/responses` through the official client: the same answers as chat completions, as items and typed events."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import openai
import pydantic
import pytest
from support.serving import Served, serving
from support.thinker import write_thinker

from sgl.errors import NotFound
from sgl.runtime.engine import Engine
from sgl.server.openai.responses_store import ResponseStore
from sgl.server.openai.turns import Turns
from sgl.server.openai.types import ImagePart, ImageUrl, Message, TextPart

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


def test_of_the_tools_told_some_may_be_called(client: openai.OpenAI) -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    both = [{**TOOL, "name": "other"}, TOOL]
    answer = ask(client, tools=both, tool_choice=allowed, max_output_tokens=200, parallel_tool_calls=False)
    assert [item.name for item in answer.output] == ["weather"]
    assert answer.tool_choice.model_dump() == allowed
    with pytest.raises(openai.BadRequestError, match="'weather'"):
        ask(client, tools=both[:1], tool_choice=allowed)


def test_structured_output_is_parsed(client: openai.OpenAI) -> None:
    found = client.responses.parse(**GREEDY, input="Hi", text_format=Trip, max_output_tokens=200)
    assert isinstance(found.output_parsed, Trip)
    json_object = ask(client, text={"format": {"type": "json_object"}}, max_output_tokens=300)
    assert json_object.status == "incomplete" or isinstance(json.loads(json_object.output_text), dict)


def test_the_clients_own_stream_understands_calls_and_formats(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**GREEDY, "input": "Hi", "max_output_tokens": 200}
    calling: Any = {"tools": [{**TOOL, "strict": True}], "tool_choice": "required", "parallel_tool_calls": False}
    with client.responses.stream(**asked, **calling) as stream:
        types = [event.type for event in stream]
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    assert call.parsed_arguments["city"] in ("Oslo", "Rome")  # type: ignore[index]
    assert types[2] == "response.output_item.added"
    assert types[-3:] == [
        "response.function_call_arguments.done", "response.output_item.done", "response.completed"
    ]  # fmt: skip
    with client.responses.stream(**asked, text_format=Trip) as stream:
        types = [event.type for event in stream]
        assert isinstance(stream.get_final_response().output_parsed, Trip)
    order = [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert list(dict.fromkeys(types)) == order


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


def test_what_a_response_answers_is_listed(client: openai.OpenAI, served: Served) -> None:
    first = ask(client, "One", instructions="S")
    second = ask(client, [{"role": "user", "content": "Two"}], previous_response_id=first.id)
    listed = list(client.responses.input_items.list(second.id, order="asc", limit=2))  # it asks for both pages
    assert [item.content[0].text for item in listed] == ["One", first.output_text, "Two"]
    assert [item.id for item in listed[::-1]] == [item.id for item in client.responses.input_items.list(second.id)]
    assert len({item.id for item in listed}) == 3
    for wrong in ({"order": "up"}, {"limit": "0"}, {"after": "x"}):
        with pytest.raises(openai.BadRequestError) as failure:
            client.responses.input_items.list(second.id, extra_query=wrong)
        assert failure.value.param == next(iter(wrong))
    with reached(served, "two") as other, pytest.raises(openai.NotFoundError):
        other.responses.input_items.list(second.id)
    with pytest.raises(openai.BadRequestError, match="none in the background"):
        client.responses.cancel(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_none")


def test_system_turns_of_parts_are_one(client: openai.OpenAI) -> None:
    turns = [
        {"role": "system", "content": [{"type": "input_text", "text": "A"}]},
        {"role": "developer", "content": "B"},
        {"role": "system", "content": [{"type": "input_text", "text": "C"}]},
        {"role": "user", "content": "Hi"},
    ]
    said = chat(client, [{"role": "system", "content": "A\n\nB\n\nC"}, {"role": "user", "content": "Hi"}])
    answer = ask(client, turns)
    assert answer.output_text == said.choices[0].message.content
    assert answer.usage.input_tokens == said.usage.prompt_tokens
    image = ImagePart(ImageUrl("data:image/png;base64,"))
    merged = Turns()
    for content in ([TextPart("A"), image], "B"):
        merged.add(Message(role="system", content=content), "x")
    assert merged.messages[0].content == [TextPart("A"), image, TextPart("\n\n"), TextPart("B")]


def test_the_store_does_as_much_for_many_as_for_few() -> None:
    def work(size: int) -> int:
        store = ResponseStore(max_bytes=2**30, lease_s=10, clock=lambda: 0.0)
        for number in range(size):
            store.keep("a", {"id": str(number)}, [])
        return num_operations(lambda: (store.keep("a", {"id": "x"}, []), store.find("a", "5"), store.delete("a", "5")))

    assert work(2000) == work(20)


def num_operations(work: Callable[[], Any]) -> int:
    """Instructions that Python executes."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


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
