"""Errors over HTTP speak of what the client has sent: its fields, its routes, and what it can change there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from support.serving import serving

import sgl
from sgl.errors import ConfigError, InvalidParameter
from sgl.runtime.engine import Engine
from sgl.server.config import server_config

TEXT = {"prompt": "a", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
BIG = 10**30
SCHEMA: Any = {"type": "array", "uniqueItems": True}  # which nothing here enforces
MESSAGES = {**CHAT, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}


@pytest.fixture(scope="module")
def http(dummy_engine: Engine) -> Iterator[httpx2.Client]:
    limits = httpx2.Limits(max_keepalive_connections=0)  # each test ends its connections
    with serving(dummy_engine) as served, httpx2.Client(base_url=served.url, limits=limits) as client:
        yield client


def refusal(http: httpx2.Client, path: str, body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {**TEXT, "ebnf": "root ::= nothing"}, "ebnf"),
        ("/v1/completions", {**TEXT, "json_schema": SCHEMA}, "json_schema"),
        ("/v1/completions", {**TEXT, "regex": r"\ba"}, "regex"),
        ("/v1/completions", {**TEXT, "structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ("/v1/completions", {**TEXT, "structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
        ("/v1/completions", {**TEXT, "response_format": {"type": "regex", "pattern": "("}}, "response_format"),
        ("/v1/completions", {**TEXT, "stream": True, "regex": r"\ba"}, "regex"),
        ("/v1/completions", {**TEXT, "unsupported": "check"}, "unsupported"),
        ("/v1/completions", {**TEXT, "priority": BIG}, "priority"),
        ("/v1/completions", {**TEXT, "regex": "ab", "min_tokens": 2, "ignore_eos": True}, "min_tokens"),
        ("/v1/chat/completions", {**CHAT, "regex": r"\ba"}, "regex"),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": {
            "name": "f", "parameters": []}}]}, "tools"),
        ("/v1/chat/completions", {**CHAT, "tool_choice": "required", "tools": [{"type": "function", "function": {
            "name": "f", "parameters": {"type": "object", "properties": {"a": SCHEMA}, "required": ["a"]}}}]}, "tools"),
        ("/v1/responses", {"input": "a", "text": {"format": {
            "type": "json_schema", "name": "a", "schema": SCHEMA}}}, "text.format"),
        ("/v1/responses", {"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": "http://127.0.0.1/"}]}]}, "input[0].content[0]"),
        ("/v1/score", {"query": "a", "items": "b", "label_token_ids": [10**6]}, "label_token_ids"),
        ("/generate", {"text": "a", "sampling_params": {"regex": r"\ba"}}, "sampling_params.regex"),
        ("/generate", {"text": "a", "priority": BIG}, "priority"),
        ("/generate", {"text": ["a", "b"], "rid": ["x"]}, "rid"),
    ],
)  # fmt: skip
def test_the_field_that_is_wrong_is_the_clients(http: httpx2.Client, path: str, body: Any, param: str) -> None:
    error = refusal(http, path, body)
    assert error["param"] == param, error
    for inner in ("min_new_tokens", "token_ids_logprob"):
        assert inner not in error["message"]
    if param == "tools":
        assert "unsupported" not in error["message"]


def test_dialects_without_a_param_say_why(http: httpx2.Client) -> None:
    assert "takes no images" in http.post("/api/chat", json={"messages": [
        {"role": "user", "content": "a", "images": ["cG5n"]}]}).json()["error"]  # fmt: skip
    assert "uniqueItems" in http.post("/v1/messages", json=MESSAGES).json()["error"]["message"]


def test_a_schema_that_is_not_enforced_may_be_checked(http: httpx2.Client) -> None:
    assert "unsupported='check'" in refusal(http, "/v1/completions", {**TEXT, "json_schema": SCHEMA})["message"]
    asked = {"json_schema": {**SCHEMA, "maxItems": 0}, "unsupported": "check"}
    text = http.post("/v1/completions", json={**TEXT, "max_tokens": 20, **asked}).json()["choices"][0]["text"]
    assert json.loads(text) == []
    format = {"type": "json_schema", "schema": asked["json_schema"]}
    body = {**MESSAGES, "max_tokens": 20, "unsupported": "check", "output_config": {"format": format}}
    assert json.loads(http.post("/v1/messages", json=body).json()["content"][0]["text"]) == []


@pytest.mark.parametrize(
    ("method", "path", "body", "said"),
    [
        ("POST", "/flush_cache?wait_s=1", None, "/flush_cache takes timeout"),
        ("POST", "/flush_cache", {"timeout": 1}, "unknown field 'timeout'"),
        ("POST", "/abort_all_requests", {"frob": 1}, "unknown field 'frob'"),
        ("POST", "/abort_all_requests?frob=1", None, "unknown query parameter 'frob'"),
        ("GET", "/v1/models?frob=1", None, "unknown query parameter 'frob'"),
        ("POST", "/v1/completions?frob=1", TEXT, "unknown query parameter 'frob'"),
    ],
)
def test_what_a_route_does_not_have_is_refused(
    http: httpx2.Client, method: str, path: str, body: Any, said: str
) -> None:
    answer = http.request(method, path, json=body)
    assert (answer.status_code, said in answer.text) == (400, True), answer.text


def test_what_a_route_does_not_have_is_a_warning_of_a_lenient_server(dummy_engine: Engine) -> None:
    with serving(dummy_engine, lenient=True) as served, httpx2.Client(base_url=served.url) as http:
        listed = http.get("/v1/models?frob=1")
        flushed = http.post("/flush_cache?timeout=10", json={"frob": 1})
    assert "unknown query parameter 'frob'" in listed.headers["x-warning"]
    assert "unknown field 'frob'" in flushed.headers["x-warning"]


@pytest.mark.parametrize(
    ("stop", "param"),
    [(r'["\ud83d"]', "stop[0]"), (r'"a\\\udc00"', "stop"), (r'["x", "\ud83d\ud83d\ude00"]', "stop[1]")],
)
def test_half_of_a_character_is_called_so(http: httpx2.Client, stop: str, param: str) -> None:
    body = f'{{"prompt": "\\ud83d\\ude00", "stop": {stop}}}'
    error = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"}).json()["error"]
    assert (error["param"], "lone surrogate" in error["message"]) == (param, True), error


def test_the_nearest_name_is_told_of_inner_fields_too(http: httpx2.Client) -> None:
    said = refusal(http, "/v1/chat/completions", {**CHAT, "stream_options": {"include_usag": True}})["message"]
    assert "did you mean 'include_usage'?" in said
    said = refusal(http, "/generate", {"text": "a", "sampling_params": {"sampling_sead": 1}})["message"]
    assert "did you mean 'sampling_seed'?" in said


def test_sglangs_seed_and_ids_of_a_batch(http: httpx2.Client) -> None:
    params = {"max_new_tokens": 4, "ignore_eos": True}
    answers = [
        http.post("/generate", json={"text": ["a", "b"], "rid": ["x", "y"], "sampling_params": {**params, seed: 7}})
        for seed in ("seed", "sampling_seed")
    ]
    first, second = ([each["text"] for each in answer.json()] for answer in answers)
    assert first == second
    assert [each["meta_info"]["id"] for each in answers[0].json()] == ["x", "y"]


def test_who_aborts_all_is_named(http: httpx2.Client) -> None:
    body = {"text": "a", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}, "stream": True}
    with http.stream("POST", "/generate", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert http.post("/abort_all_requests").json() == {"aborted": 1}
        told = [json.loads(line.removeprefix("data: ")) for line in lines if "error" in line]
    assert "/abort_all_requests" in told[-1]["error"]["message"]
    assert told[-1]["error"]["type"] == "cancelled_error"


def test_a_model_that_generates_names_what_would_encode(http: httpx2.Client) -> None:
    for path, body, said in (
        ("/v1/embeddings", {"input": "a"}, "as minilm-l6"),
        ("/classify", {"text": "a"}, "an encoder with labels"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "a cross-encoder"),
    ):
        assert said in refusal(http, path, body)["message"]


@pytest.mark.parametrize("key", ["é", "a\nb", " a", "a\x7f"])
def test_a_key_that_no_header_carries_is_refused_at_start(key: str) -> None:
    for name in ("api_key", "admin_api_key"):
        with pytest.raises(ConfigError, match="header"):
            server_config({name: key})
    if key.strip() == key:
        with pytest.raises(ConfigError, match="header"):
            sgl.RemoteEngine("http://127.0.0.1:9", api_key=key)


def test_text_that_is_none_is_refused_alike_in_process_and_over_http(http: httpx2.Client, dummy_engine: Engine) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a\ud83d" + sgl.gen("x", max_tokens=1)

    said = []
    with sgl.RemoteEngine(f"{str(http.base_url).rstrip('/')}/v1/") as remote:
        for backend in (dummy_engine, remote):
            with pytest.raises(InvalidParameter, match="lone surrogate") as failure:
                program.run(backend=backend)["x"]
            said.append((failure.value.message, failure.value.hint))
    assert said[0] == said[1]
