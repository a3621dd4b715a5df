"""The official `openai` client against the server: what it reads is what the engine said."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import httpx2
import openai
import pydantic
import pytest
from support.serving import Served, serving

from sgl.runtime.engine import Engine
from sgl.server.dialogue import MANY_TURNS

GREEDY = {"temperature": 0.0, "max_tokens": 8}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def served(dummy_engine: Engine) -> Iterator[Served]:
    with serving(dummy_engine, served_model_name="tiny") as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def prompt_of(engine: Engine, *turns: tuple[str, str]) -> str:
    state = engine.renderer().state()
    for role, content in turns:
        state.begin(role)
        state.add_text(content)
        state.end()
    state.begin("assistant")
    return state.text


def chat(client: openai.OpenAI, messages: list[dict[str, Any]] = USER, **more: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=messages, **{**GREEDY, **more})  # type: ignore[call-overload]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.chat.completions.create(model="gpt-5", messages=USER)  # type: ignore[arg-type]


def test_chat_says_what_the_engine_says(client: openai.OpenAI, dummy_engine: Engine) -> None:
    messages = [{"role": "system", "content": "S"}, *USER, {"role": "assistant", "content": "A"}, *USER]
    answer = chat(client, messages)
    prompt = prompt_of(dummy_engine, ("system", "S"), ("user", "Hi"), ("assistant", "A"), ("user", "Hi"))
    ids = dummy_engine.renderer().tokenizer.split_template(prompt)
    expected = dummy_engine.generate(
        input_ids=dummy_engine.renderer().tokenizer.encode_pieces(ids),
        sampling_params={"temperature": 0, "max_new_tokens": 8},
    )
    assert answer.choices[0].message.content == expected["text"]
    assert answer.usage.prompt_tokens == expected["meta_info"]["prompt_tokens"]
    assert answer.usage.completion_tokens == len(expected["output_ids"])


def test_many_turns_are_the_same_prompt(client: openai.OpenAI, dummy_engine: Engine) -> None:
    turns = [("user", "a <|im_end|>"), ("assistant", " b ")] * MANY_TURNS + [("user", "c")]
    messages = [{"role": role, "content": content} for role, content in turns]
    answer = chat(client, messages)
    state = dummy_engine.renderer().state()
    for role, content in turns:
        state.begin(role)
        state.add_text(content)
        state.end()
    begun = state.copy()
    state.begin("assistant")
    state.flush()
    expected = dummy_engine.generate(input_ids=state.ids, sampling_params={"temperature": 0, "max_new_tokens": 8})
    assert answer.choices[0].message.content == expected["text"]
    assert answer.usage.prompt_tokens == len(state.ids)
    begun.flush()
    ends = chat(client, messages, extra_body={"add_generation_prompt": False})
    assert ends.usage.prompt_tokens == len(begun.ids)


def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI) -> None:
    whole = chat(client, n=2, seed=3, temperature=0.8, logprobs=True, top_logprobs=2)
    chunks = list(
        chat(
            client, n=2, seed=3, temperature=0.8, logprobs=True, top_logprobs=2, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    for choice in whole.choices:
        mine = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert "".join(each.delta.content or "" for each in mine) == choice.message.content
        assert mine[0].delta.role == "assistant"
        assert [each.finish_reason for each in mine if each.finish_reason] == [choice.finish_reason]
        tokens = [entry.token for each in mine if each.logprobs for entry in each.logprobs.content]
        assert tokens == [entry.token for entry in choice.logprobs.content]
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_stops_and_lengths(client: openai.OpenAI) -> None:
    full = chat(client).choices[0].message.content
    assert len(full) > 1
    cut = chat(client, stop=full[1:2])
    assert cut.choices[0].message.content == full[:1]
    assert cut.choices[0].finish_reason == "stop"
    assert chat(client, max_tokens=1, extra_body={"ignore_eos": True}).choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("body", "valid"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1, 22]}}}},
         lambda text: json.loads(text) in (1, 22)),
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        ({"extra_body": {"regex": "[ab]{3}c"}}, lambda text: re.fullmatch("[ab]{3}c", text)),
        ({"extra_body": {"structured_outputs": {"choice": ["left", "right"]}}}, lambda text: text in ("left", "right")),
        ({"extra_body": {"structured_outputs": {"json": {"const": "x"}}}}, lambda text: json.loads(text) == "x"),
        ({"extra_body": {"ebnf": 'root ::= "a" "b"?'}}, lambda text: text in ("a", "ab")),
    ],
)  # fmt: skip
def test_constraints_by_every_name(client: openai.OpenAI, body: dict[str, Any], valid: Any) -> None:
    answer = chat(client, max_tokens=200, **body).choices[0]
    assert answer.finish_reason == "stop"
    assert valid(answer.message.content)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_call_and_its_result(client: openai.OpenAI, choice: Any) -> None:
    asked = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200}
    message = chat(client, **asked).choices[0]
    assert message.finish_reason == "tool_calls"
    assert message.message.content is None
    (call,) = message.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")

    deltas = [chunk.choices[0].delta for chunk in chat(client, stream=True, **asked) if chunk.choices]
    pieces = [each for delta in deltas for each in delta.tool_calls or ()]
    assert [piece.function.name for piece in pieces if piece.function.name] == ["weather"]
    assert "".join(piece.function.arguments or "" for piece in pieces) == call.function.arguments

    said = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    assert chat(client, [*USER, said, result], tools=[TOOL], tool_choice="none").choices[0].finish_reason


def test_the_clients_own_streams_understand_calls_and_formats(client: openai.OpenAI) -> None:
    strict: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    asked: dict[str, Any] = {"model": "tiny", "messages": USER, "temperature": 0, "max_tokens": 200}
    calling = {"tools": [strict], "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**asked, **calling) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    (call,) = final.choices[0].message.tool_calls or []
    assert done.parsed_arguments == call.function.parsed_arguments
    assert final.choices[0].finish_reason == "tool_calls"

    class Answer(pydantic.BaseModel):
        n: Literal[1, 22]

    with client.chat.completions.stream(**asked, response_format=Answer, logprobs=True, top_logprobs=1) as stream:
        events = list(stream)
        parsed = stream.get_final_completion()
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    assert {event.type for event in events} >= {"content.done", "logprobs.content.done"}
    logprobs = parsed.choices[0].logprobs
    assert logprobs is not None
    assert "".join(entry.token for entry in logprobs.content or ()) == parsed.choices[0].message.content


def test_a_format_is_for_the_answer_and_not_for_the_call_that_is_wanted(client: openai.OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1, 22]}}}
    asked = {"tools": [TOOL], "response_format": wanted, "max_tokens": 200}
    assert chat(client, tool_choice="required", **asked).choices[0].message.tool_calls
    assert json.loads(chat(client, tool_choice="none", **asked).choices[0].message.content) in (1, 22)


def test_tools_are_told_and_none_keeps_them_from_being_called(client: openai.OpenAI) -> None:
    without = chat(client).usage.prompt_tokens
    assert chat(client, tools=[TOOL]).usage.prompt_tokens > without
    none = chat(client, tools=[TOOL], tool_choice="none")
    assert none.usage.prompt_tokens == without
    assert none.choices[0].message.tool_calls is None


def test_an_answer_that_goes_on(client: openai.OpenAI) -> None:
    begun = [*USER, {"role": "assistant", "content": "The answer"}]
    goes_on = chat(client, begun, extra_body={"continue_final_message": True})
    new = chat(client, begun)
    assert goes_on.usage.prompt_tokens < new.usage.prompt_tokens


def test_completions_as_evaluation_harnesses_ask(client: openai.OpenAI, dummy_engine: Engine) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["ab cd", "xy"], max_tokens=1, logprobs=2, echo=True, temperature=0
    )
    for choice, prompt in zip(answer.choices, ("ab cd", "xy"), strict=True):
        assert choice.text.startswith(prompt)
        assert choice.logprobs.token_logprobs[0] is None
        assert "".join(choice.logprobs.tokens[: len(prompt)]) == prompt
        assert len(choice.logprobs.tokens) == len(prompt) + 1
        scored = dummy_engine.generate(
            prompt, {"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0
        )["meta_info"]["input_token_logprobs"]  # fmt: skip
        assert choice.logprobs.token_logprobs[1:-1] == pytest.approx([entry[0] for entry in scored[1:]], abs=1e-4)


def test_completions_of_ids_in_a_stream(client: openai.OpenAI, dummy_engine: Engine) -> None:
    whole = dummy_engine.generate(
        input_ids=[[97, 98], [99]], sampling_params={"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    )
    texts = {0: "", 1: ""}
    stream = client.completions.create(
        model="tiny", prompt=[[97, 98], [99]], max_tokens=6, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [texts[0], texts[1]] == [output["text"] for output in whole]


def test_a_stream_tells_its_usage_as_it_goes(served: Served, client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked: dict[str, Any] = {**GREEDY, "model": "tiny", "stream": True, "stream_options": options, "n": 2}
    streams = (
        client.chat.completions.create(messages=USER, **asked),
        client.completions.create(prompt=["ab", [3, 4, 5]], **asked),  # type: ignore[list-item]
    )
    for stream in streams:
        *chunks, last = [chunk.usage for chunk in stream]
        assert {usage.prompt_tokens for usage in chunks} == {last.prompt_tokens}
        counts = [usage.completion_tokens for usage in chunks]
        assert counts == sorted(counts)
        assert counts[0] < counts[-1] == last.completion_tokens
        assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in chunks)
    body = {"messages": USER, "stream": True, "max_tokens": 1, "stream_options": {"continuous_usage_stats": True}}
    answer = httpx2.post(f"{served.url}/v1/chat/completions", json=body)
    assert "x-warning" not in answer.headers


@pytest.mark.parametrize("mode", ["required", "auto"])
def test_of_the_tools_told_some_may_be_called(client: openai.OpenAI, mode: str) -> None:
    other = {"type": "function", "function": {**TOOL["function"], "name": "other"}}
    named = [{"type": "function", "function": {"name": "weather"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    asked: dict[str, Any] = {"tools": [other, TOOL], "max_tokens": 100, "parallel_tool_calls": False}
    answer = chat(client, **asked, tool_choice=choice)
    calls = answer.choices[0].message.tool_calls or []
    assert [call.function.name for call in calls] == (["weather"] if mode == "required" else [])
    assert answer.usage.prompt_tokens == chat(client, **asked).usage.prompt_tokens  # it is told of both
    for wrong in ({"mode": "none", "tools": named}, {"mode": mode, "tools": []}, {"mode": mode, "tools": [{}]}, None):
        with pytest.raises(openai.BadRequestError) as failure:
            chat(client, **asked, tool_choice={"type": "allowed_tools", "allowed_tools": wrong})
        assert failure.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("path", "body", "param", "allowed"),
    [
        ("chat/completions", {"messages": [{"role": "boss", "content": ""}]}, "messages[0].role", "assistant"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "txt"}]}]},
         "messages[0].content[0].type", "image_url"),
        ("chat/completions", {"messages": USER, "response_format": {"type": "jsn"}}, "response_format.type",
         "json_schema"),
        ("responses", {"input": [{"role": "boss", "content": ""}]}, "input[0].role", "developer"),
        ("embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
    ],
)  # fmt: skip
def test_errors_name_the_values_that_there_are(
    served: Served, path: str, body: dict[str, Any], param: str, allowed: str
) -> None:
    error = httpx2.post(f"{served.url}/v1/{path}", json=body).json()["error"]
    assert error["param"] == param
    assert f'"{allowed}"' in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a", "sampling_params": {"logit_bias": [1]}}),
        ("/generate", {"text": "a", "sampling_params": {"ignore_eos": 3}}),
        ("/generate", {"text": "a", "sampling_params": {"json_schema": "{"}}),
        ("/v1/chat/completions", {"messages": USER, "tools": [{"type": "function"}]}),
        ("/v1/chat/completions", {"messages": USER, "json_schema": "{"}),
    ],
)
def test_errors_speak_of_json(served: Served, path: str, body: dict[str, Any]) -> None:
    answer = httpx2.post(f"{served.url}{path}", json=body)
    assert answer.status_code == 400
    assert not re.search(r"True|False|None|dict|tuple|=\{|pass functions", answer.json()["error"]["message"])


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as failure:
        chat(client, temperature=-1)
    assert failure.value.param == "temperature"
    assert failure.value.code == "invalid_parameter"
    with pytest.raises(openai.BadRequestError) as failure:
        chat(client, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nope"}}})
    assert failure.value.body["details"]["pointer"]  # type: ignore[index,call-overload]


def test_text_offsets_count_characters_also_where_tokens_are_parts_of_them(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "dummy",
        "prompt": "né",
        "max_tokens": 60,
        "temperature": 0,
        "logprobs": 1,
        "extra_body": {"regex": "(é|日本|x){6}"},
    }
    (whole,) = client.completions.create(**asked, echo=True).choices
    assert whole.logprobs is not None
    tokens = [
        bytes.fromhex(token.removeprefix("bytes:").replace("\\x", "")) if "\\x" in token else token.encode()
        for token in whole.logprobs.tokens
    ]
    begun = [b"".join(tokens[:index]).decode(errors="ignore") for index in range(len(tokens))]
    assert whole.logprobs.text_offset == [len(text) for text in begun]
    assert b"".join(tokens).decode() == whole.text
    pieces = [piece.choices[0].logprobs for piece in client.completions.create(**asked, stream=True)]
    streamed = [offset for piece in pieces if piece is not None for offset in piece.text_offset or ()]
    generated = len(streamed)
    assert streamed == [offset - len("né") for offset in whole.logprobs.text_offset[-generated:]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_makes_no_whole_call_of_a_part(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200, "stop": ["cit"]}
    if stream:
        chunks = [chunk.choices[0] for chunk in chat(client, **asked, stream=True)]
        assert not any(chunk.delta.content for chunk in chunks)
        assert chunks[-1].finish_reason == "stop"
        return
    answer = chat(client, **asked).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("stop", None)
    assert "city" not in answer.message.tool_calls[0].function.arguments
    tool = {"type": "function", **TOOL["function"]}
    more = {"extra_body": {"stop": ["cit"]}, "tools": [tool], "tool_choice": "required", "temperature": 0}
    response = client.responses.create(model="tiny", input="Hi", max_output_tokens=200, **more)  # type: ignore[call-overload]
    assert (response.status, response.output[0].status) == ("incomplete", "incomplete")


@pytest.mark.parametrize("url", ["data:image/png;base64,cG5n", "https://127.0.0.1/cat.png"])
def test_images_are_refused_by_a_model_without_eyes(client: openai.OpenAI, url: str) -> None:
    parts = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": url}}]
    with pytest.raises(openai.BadRequestError, match="this model takes no images") as failure:
        chat(client, [{"role": "user", "content": parts}])
    assert failure.value.param == "messages[0].content[1]"


def test_a_streamed_echo_has_the_logprobs_of_the_prompt(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "ab", "max_tokens": 3, "temperature": 0, "logprobs": 1}
    (whole,) = client.completions.create(**asked, echo=True).choices
    pieces = [piece.choices[0] for piece in client.completions.create(**asked, echo=True, stream=True)]
    tokens = [token for piece in pieces if piece.logprobs for token in piece.logprobs.tokens or ()]
    assert whole.logprobs is not None
    assert (tokens, "".join(piece.text for piece in pieces)) == (whole.logprobs.tokens, whole.text)
    assert "".join(tokens[:2]) == "ab"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parametres": {}}}]},
            "tools[0].function.parametres",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "txt": "b"}]}]}, None),
        ({"response_format": {"type": "json_object", "foo": 1}}, "response_format.foo"),
        ({"messages": [{"role": "assistant", "content": "a", "function_call": {}}]}, "messages[0].function_call"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {"voice": "a", "format": "wav"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": ["weather"]}}}, "tool_choice"),
        ({"store": True}, "store"),
    ],
)
def test_what_has_no_meaning_here_is_refused_by_name(served: Served, body: dict[str, Any], param: str | None) -> None:
    answer = httpx2.post(f"{served.url}/v1/chat/completions", json={"messages": USER, "max_tokens": 1, **body})
    assert answer.status_code == 400
    assert param is None or answer.json()["error"]["param"] == param


def test_what_changes_nothing_is_taken_with_a_warning(served: Served) -> None:
    asked: Any = {"messages": USER, "max_tokens": 1, "service_tier": "flex", "verbosity": "low", "modalities": ["text"]}
    asked |= {"user": "u", "metadata": {"a": "b"}, "store": False, "prompt_cache_key": "k", "safety_identifier": "s"}
    asked |= {"prompt_cache_options": {"mode": "explicit"}, "prompt_cache_retention": "24h", "seed": 1}
    answer = httpx2.post(f"{served.url}/v1/chat/completions", json=asked).json()
    assert answer["warnings"] == ["service_tier has no effect here", "verbosity has no effect here"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_was_wanted_and_cut_off_shows_no_markup(client: openai.OpenAI, stream: bool) -> None:
    for most in (4, 20, 34):
        asked = {"tools": [TOOL], "tool_choice": "required", "max_tokens": most, "stream": stream}
        answer = chat(client, **asked)
        shown = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert shown[-1].finish_reason == "length"
        assert not any((each.delta if stream else each.message).content for each in shown)


def test_a_prompt_that_is_too_long_has_the_code_that_agents_know(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as failure:
        chat(client, [{"role": "user", "content": "ab " * 50_000}])
    assert (failure.value.code, failure.value.param) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ("/v1/chat/completions", {"messages": USER, "min_tokens": 9, "max_completion_tokens": 8}, None),
        ("/v1/chat/completions", {"messages": USER, "max_completion_tokens": -1}, "max_completion_tokens"),
        ("/v1/completions", {"prompt": "a", "logprobs": 99}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ("/generate", {}, "text"),
    ],
)
def test_errors_name_the_fields_that_were_sent(
    served: Served, path: str, body: dict[str, Any], param: str | None
) -> None:
    answer = httpx2.post(f"{served.url}{path}", json=body)
    assert answer.status_code == 400
    assert param is None or answer.json()["error"]["param"] == param
    assert "new_tokens" not in answer.text
    assert "logprobs_num" not in answer.text
