"""Requests in the dialects of OpenAI's responses, Anthropic and Ollama that nobody should send: each is refused in its
dialect's shape, and the server goes on. Rows of the table of faults: 2, 3, 5, 10, 13, 17 to 19, 39, 41, 68, 70.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from support.serving import Served, serving

from sgl.runtime.engine import Engine

WAIT_S = 30.0
USER = [{"role": "user", "content": "Hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": USER, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": USER},
    "/api/chat": {"messages": USER, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "Hi", "options": {"num_predict": 2}},
}
LONG: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1500, "ignore_eos": True},
    "/v1/messages": {"messages": USER, "max_tokens": 1500, "ignore_eos": True},
    "/api/chat": {"messages": USER, "options": {"num_predict": 1500}, "format": {"type": "string", "minLength": 1400}},
}


@pytest.fixture(scope="module")
def served(dummy_engine: Engine) -> Iterator[Served]:
    with serving(dummy_engine, max_body_bytes=2**17, response_store_bytes=2**16) as server:
        yield server


@pytest.fixture
def http(served: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=served.url, trust_env=False, timeout=WAIT_S) as client:
        yield client


def message_of(path: str, response: httpx2.Response) -> str:
    """The text of an error, which is in the shape of the path's dialect."""
    body = response.json()
    if path.startswith("/api/"):
        assert set(body) == {"error"}
        return str(body["error"])
    if path.startswith("/v1/messages"):
        assert set(body) == {"type", "error"}
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body["error"]) >= {"message", "type", "param", "code"}
    return str(body["error"]["message"])


def items(*given: Any) -> dict[str, Any]:
    return {"input": list(given)}


def blocks(*given: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(given)}], "max_tokens": 2}


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/responses", {}, "input is empty"),
    ("/v1/responses", {"input": []}, "input is empty"),
    ("/v1/responses", {"input": ""}, "input is empty"),
    ("/v1/responses", {"input": "x", "max_output_tokens": -1}, "max_output_tokens is -1"),
    ("/v1/responses", {"input": "x", "reasoning": {"effort": "huge"}}, "reasoning.effort is 'huge'"),
    ("/v1/responses", {"input": ["Hi"]}, "input"),
    ("/v1/responses", items({"role": "user"}), "input[0]"),
    ("/v1/responses", items({"role": "wizard", "content": "x"}), "input[0]"),
    ("/v1/responses", items({"role": "user", "content": "x", "contnt": "y"}), "input[0]: unknown field 'contnt'"),
    ("/v1/responses", items({"type": "item_reference", "id": "x"}), "item_reference"),
    ("/v1/responses", items({"type": ["message"]}), "input[0]"),
    ("/v1/responses", items({"type": "function_call", "call_id": "a", "name": "f"}), "arguments"),
    (
        "/v1/responses",
        items({"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}),
        "input[0].tool_calls",
    ),
    (
        "/v1/responses",
        items({"role": "user", "content": [{"type": "input_image", "image_url": "http://169.254.169.254/"}]}),
        "takes no images",
    ),
    ("/v1/responses", {"input": "x", "background": True}, "background"),
    ("/v1/responses", {"input": "x", "conversation": "c"}, "conversation"),
    ("/v1/responses", {"input": "x", "include": ["file_search_call.results"]}, "include"),
    ("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]}, "web_search"),
    ("/v1/responses", {"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "a b"),
    ("/v1/responses", {"input": "x", "tool_choice": "required"}, "no tools"),
    ("/v1/responses", {"input": "x", "tool_choice": {"type": "allowed_tools"}}, "allowed_tools"),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "a"}}}, "schema"),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": "no"}}}}, "no"),
    ("/v1/responses", {"input": "x", "previous_response_id": "resp-none"}, "resp-none"),
    ("/v1/responses", {"input": "x", "temperature": -1}, "temperature"),
    ("/v1/responses", {"input": "x", "max_output_tokens": -1}, "max"),
    ("/v1/responses", {"input": "x", "reasoning": {"effort": "heroic"}}, "heroic"),
    ("/v1/responses", {"input": "x", "temprature": 1}, "did you mean 'temperature'?"),
    ("/v1/responses", {"input": "x", "chat_template_kwargs": {"tools": []}}, "tools"),
    ("/v1/messages", {"messages": USER}, "max_tokens"),
    ("/v1/messages", {"messages": [], "max_tokens": 2}, "messages is empty"),
    ("/v1/messages", blocks(), "messages[0].content is empty"),
    ("/v1/messages", blocks({"type": "video"}), "messages[0].content[0]"),
    ("/v1/messages", blocks({"type": "tool_use", "id": "a", "name": "f", "input": {}}), "messages[0].content[0]"),
    ("/v1/messages", blocks({"type": "tool_result", "tool_use_id": "a"}, role="assistant"), "messages[0].content[0]"),
    ("/v1/messages", blocks({"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/"}}), "no images"),
    ("/v1/messages", {**GOOD["/v1/messages"], "temperature": -1}, "temperature"),
    ("/v1/messages", {**GOOD["/v1/messages"], "max_tokens": -1}, "max"),
    ("/v1/messages", {**GOOD["/v1/messages"], "stop_sequences": ["x"] * 10_000}, "stop_sequences has 10000"),
    ("/v1/messages", {**GOOD["/v1/messages"], "tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
    ("/v1/messages", {**GOOD["/v1/messages"], "tools": [{"name": "f"}]}, "input_schema"),
    ("/v1/messages", {**GOOD["/v1/messages"], "tool_choice": {"type": "tool", "name": "f"}}, "'f'"),
    ("/v1/messages", {**GOOD["/v1/messages"], "thinking": {"type": "enabled", "budget_tokens": 9}}, "does not think"),
    ("/v1/messages", {**GOOD["/v1/messages"], "mcp_servers": [{}]}, "mcp_servers"),
    ("/v1/messages", {**GOOD["/v1/messages"], "max_token": 2}, "did you mean 'max_tokens'?"),
    ("/v1/messages/count_tokens", {"messages": []}, "messages is empty"),
    ("/v1/messages/count_tokens", {"messages": USER, "max_tokens": 2}, "max_tokens"),
    ("/api/chat", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ("/api/chat", {"messages": [{"role": "user", "content": "x", "tool_calls": [
        {"function": {"name": "f"}}]}]}, "tool_calls"),
    ("/api/chat", {"messages": USER, "options": {"num_predict": -9}}, "options.num_predict is -9"),
    ("/api/chat", {"messages": USER, "options": {"temprature": 1}}, "temprature"),
    ("/api/chat", {"messages": USER, "options": {"mirostat": 2}}, "mirostat"),
    ("/api/chat", {"messages": USER, "format": "yaml"}, "yaml"),
    ("/api/chat", {"messages": USER, "think": True}, "does not think"),
    ("/api/chat", {"messages": USER, "model": "llama3"}, "llama3"),
    ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix"),
    ("/api/generate", {"prompt": "x", "template": "{{ 1 }}"}, "template"),
    ("/api/generate", {"prompt": "x", "images": ["%%%"]}, "takes no images"),
    ("/api/embed", {"input": "x"}, "embed"),
    ("/api/embeddings", {"prompt": "x"}, "embed"),
    ("/api/show", {"model": "llama3"}, "llama3"),
]  # fmt: skip


def test_bad_values_are_the_callers_to_mend(http: httpx2.Client) -> None:
    for path, body, words in BAD:
        for stream in (False, True):
            if stream and path not in LONG:
                continue
            response = http.post(path, json={**body, "stream": True} if stream else body)
            assert response.status_code in (400, 404), (path, body, response.text)
            assert words in message_of(path, response), (path, body)
    for path, body in GOOD.items():
        assert http.post(path, json=body).status_code == 200


def test_bodies_are_bounded_in_every_dialect(http: httpx2.Client) -> None:
    for path, body in GOOD.items():
        huge = http.post(path, content=b'{"x": "' + b"a" * 2**18 + b'"}')
        assert huge.status_code == 413
        assert message_of(path, huge)
        deep: Any = 1
        for _ in range(100):
            deep = [deep]
        nested = http.post(path, content=json.dumps({**body, "metadata": deep}))
        assert nested.status_code == 400
        assert "deeper" in message_of(path, nested)
        for content in (b"", b"[]", b"nothing", b'{"model": NaN}', b'"\\ud83d"'):
            response = http.post(path, content=content)
            assert response.status_code == 400, (path, content)
            assert message_of(path, response)


def test_many_items_and_long_texts_are_refused_or_answered(http: httpx2.Client, served: Served) -> None:
    long = "a " * (served.server.context_len + 8)
    for path, body in (
        ("/v1/responses", {**GOOD["/v1/responses"], "input": long}),
        ("/v1/messages", {**GOOD["/v1/messages"], "messages": [{"role": "user", "content": long}]}),
        ("/api/generate", {**GOOD["/api/generate"], "prompt": long}),
    ):
        for stream in (True, False):
            response = http.post(path, json={**body, "stream": stream})
            assert response.status_code == 400, response.text
            assert str(served.server.context_len) in message_of(path, response)
    many = [{"role": "user", "content": ""}] * 2000  # rendered once, and not once for each
    response = http.post("/v1/responses", json={"input": many, "max_output_tokens": 1})
    assert response.status_code == 400
    assert str(served.server.context_len) in message_of("/v1/responses", response)


def test_what_is_too_large_to_keep_is_not(http: httpx2.Client, served: Served) -> None:
    assert served.server.responses is not None
    for _ in range(40):
        answer = http.post("/v1/responses", json={"input": "Hi " * 500, "max_output_tokens": 1}).json()
        assert answer["store"]
        assert served.server.responses.num_bytes <= 2**16
    large = http.post("/v1/responses", json={"input": "Hi", "metadata": {"a": "x" * 2**16}, "max_output_tokens": 1})
    assert not large.json()["store"]
    assert http.get(f"/v1/responses/{large.json()['id']}").status_code == 404
    assert http.get(f"/v1/responses/{answer['id']}").status_code == 200
    assert http.delete("/v1/responses/resp-none").status_code == 404


def test_keys_are_asked_for_in_every_dialect(dummy_engine: Engine) -> None:
    with serving(dummy_engine, api_key=("secret",)) as served, httpx2.Client(base_url=served.url) as http:
        for path, body in GOOD.items():
            response = http.post(path, json=body)
            assert response.status_code == 401
            assert "secret" not in message_of(path, response)
            assert http.post(path, json=body, headers={"x-api-key": "secret"}).status_code == 200


def idle(engine: Engine) -> None:
    """Wait until nothing of any program is left."""
    end = time.monotonic() + WAIT_S
    while any(engine.stats()[name] for name in ("num_programs", "num_running", "num_waiting", "pages_held")):
        assert time.monotonic() < end, engine.stats()
        time.sleep(0.02)
    engine.check()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", LONG)
def test_a_client_that_goes_away_ends_its_request(dummy_engine: Engine, path: str, stream: bool) -> None:
    before = dummy_engine.stats()
    with serving(dummy_engine, response_store_bytes=2**16) as served:
        data = json.dumps({**LONG[path], "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", served.port), timeout=WAIT_S) as line:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
            line.sendall(head.encode() + data)
            end = time.monotonic() + WAIT_S
            while dummy_engine.stats()["forwards"] < before["forwards"] + 2:
                assert time.monotonic() < end, dummy_engine.stats()
                time.sleep(0.005)
        idle(dummy_engine)
        assert dummy_engine.stats()["decode_tokens"] - before["decode_tokens"] < 1400
        assert served.server.num_running == 0
        assert served.server.responses is not None
        assert served.server.responses.num_bytes == 0


def test_a_stream_that_fails_ends_with_an_event_of_its_dialect(dummy_engine: Engine) -> None:
    endings = {
        "/v1/responses": lambda event: (event["type"], event["response"]["status"]) == ("response.failed", "failed"),
        "/v1/messages": lambda event: (event["type"], event["error"]["type"]) == ("error", "invalid_request_error"),
    }
    with (
        serving(dummy_engine) as served,
        httpx2.Client(base_url=served.url, timeout=WAIT_S) as http,
        httpx2.Client(base_url=served.url) as other,
    ):
        for path in (*endings, "/v1/messages/count_tokens"):  # what is made at first use is there, and connections are
            assert other.post(path, json=GOOD[path]).is_success
        for path, is_failure in endings.items():
            with http.stream("POST", path, json={**LONG[path], "stream": True, "rid": "mine"}) as answer:
                lines = answer.iter_lines()
                next(lines)
                assert other.post("/abort_request", json={"rid": "mine"}).json() == {"aborted": 1}
                data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
            assert is_failure(json.loads(data[-1])), data[-1]
