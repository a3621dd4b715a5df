"""Ollama's routes through its own client: the same answers as chat completions, as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import ollama
import pytest
from support.serving import Served, serving
from support.tiny_bert import POOLING, saved

from sgl.lang.graph import ValueEvent
from sgl.runtime.engine import Engine
from sgl.server.dialogue import CallArguments, CallBegins, CallEnds, Said, Step
from sgl.server.ollama import _as_message, _Lines

USER = [{"role": "user", "content": "Hi"}]
OPTIONS = {"num_predict": 8, "temperature": 0, "num_ctx": 4096}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def served(dummy_engine: Engine) -> Iterator[Served]:
    with serving(dummy_engine, served_model_name="tiny") as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[ollama.Client]:
    made = ollama.Client(host=served.url)
    yield made
    made._client.close()


def post(served: Served, path: str, body: dict[str, Any]) -> httpx2.Response:
    with httpx2.Client(base_url=served.url) as http:
        return http.post(path, json=body)


def said(served: Served, messages: list[Any], **more: Any) -> Any:
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0, **more}
    return post(served, "/v1/chat/completions", body).json()


def test_chat_says_what_chat_says(client: ollama.Client, served: Served) -> None:
    expected = said(served, USER)
    whole = client.chat("tiny:latest", USER, options=OPTIONS, keep_alive="5m")
    assert whole.message.content == expected["choices"][0]["message"]["content"]
    assert (whole.prompt_eval_count, whole.eval_count) == (
        expected["usage"]["prompt_tokens"],
        expected["usage"]["completion_tokens"],
    )
    lines = list(client.chat("tiny", USER, options=OPTIONS, stream=True))
    assert len(lines) > 1
    assert "".join(line.message.content or "" for line in lines) == whole.message.content
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert (lines[-1].done_reason, lines[-1].eval_count) == (whole.done_reason, whole.eval_count)


def test_generate_takes_turns_or_a_text_as_it_is(client: ollama.Client, served: Served) -> None:
    expected = said(served, [{"role": "system", "content": "S"}, *USER])
    whole = client.generate("tiny", "Hi", system="S", options=OPTIONS)
    assert whole.response == expected["choices"][0]["message"]["content"]
    lines = client.generate("tiny", "Hi", system="S", options=OPTIONS, stream=True)
    assert "".join(line.response for line in lines) == whole.response
    raw = client.generate("tiny", "ab", raw=True, options=OPTIONS)
    body = {"prompt": "ab", "max_tokens": 8, "temperature": 0}
    assert raw.response == post(served, "/v1/completions", body).json()["choices"][0]["text"]
    assert client.generate("tiny").done_reason == "load"


def test_formats(client: ollama.Client) -> None:
    options = {**OPTIONS, "num_predict": 200}
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 22]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    found = client.chat("tiny", USER, format=schema, options=options)
    assert json.loads(found.message.content or "")["n"] in (1, 22)
    assert client.generate("tiny", "Hi", format="json", options=options).response.lstrip().startswith("{")


def test_calls_in_earlier_turns(client: ollama.Client, served: Served) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    turns = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "rain"},
    ]
    answer = client.chat("tiny", turns, tools=[TOOL], options=OPTIONS)
    function = {"name": "weather", "arguments": json.dumps({"city": "Oslo"})}
    expected = [
        *USER,
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
    ]
    assert answer.prompt_eval_count == said(served, expected, tools=[TOOL])["usage"]["prompt_tokens"]


def test_a_call_is_told_once_it_is_whole() -> None:
    value = ValueEvent(node=1, branch=0, name="answer", value="")
    lines = _Lines({"model": "tiny"}, _as_message)
    assert lines.more(Step(0, [CallBegins(0, "f"), CallArguments(0, '{"a":')])) is None
    told = lines.more(Step(0, [CallArguments(0, "1}"), CallEnds(0), CallBegins(1, "g")]))
    assert told is not None
    assert told["message"]["tool_calls"] == [{"function": {"name": "f", "arguments": {"a": 1}}}]
    rest = lines.more(Step(0, [CallArguments(1, "{}"), CallEnds(1), Said("x")], value=value))
    assert rest is not None
    assert rest["message"]["tool_calls"] == [{"function": {"name": "g", "arguments": {}}}]
    assert lines.whole(value)["message"]["content"] == "x"


def test_models(client: ollama.Client, served: Served) -> None:
    (card,) = client.list().models
    assert card.model == "tiny"
    shown = client.show("tiny")
    assert shown.capabilities == ["completion", "tools"]
    assert [each.model for each in client.ps().models] == ["tiny"]
    with httpx2.Client(base_url=served.url) as http:
        assert http.get("/api/version").json()["version"]


def test_errors_are_the_clients_own(client: ollama.Client) -> None:
    for wrong, status in (
        ({"model": "llama3"}, 404),
        ({"model": "tiny", "options": {"temperature": -1}}, 400),
        ({"model": "tiny", "options": {"mirostat": 2}}, 400),
        ({"model": "tiny", "think": True}, 400),
        ({"model": "tiny", "top_logprobs": 2}, 400),
        ({"model": "tiny", "format": "yaml"}, 400),
    ):
        with pytest.raises((ollama.ResponseError, ValueError)) as failure:
            client.chat(messages=USER, **wrong)  # type: ignore[call-overload]
        if isinstance(failure.value, ollama.ResponseError):
            assert failure.value.status_code == status
            assert failure.value.error


def test_embeddings_of_a_model_that_embeds(tmp_path: Any) -> None:
    folder = saved(tmp_path, "BertModel", POOLING)
    with Engine(model_path=str(folder), device="cpu") as engine, serving(engine) as served:
        want = [output["embedding"] for output in engine.encode(["the cat", "dog"])]
        made = ollama.Client(host=served.url)
        found = made.embed("default", ["the cat", "dog"])
        short = made.embed("default", "the cat", dimensions=4)
        older = made.embeddings("default", "dog")
        made._client.close()
    assert [list(each) for each in found.embeddings] == [pytest.approx(each, abs=1e-6) for each in want]
    assert len(short.embeddings[0]) == 4
    assert list(older.embedding) == pytest.approx(want[1], abs=1e-6)
