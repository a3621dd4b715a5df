"""What a request makes of its body (prompts out of parts, numbers for each token) is bounded before it is made, and is
made on no server's loop.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from support.serving import THREAD, Served, serving

from sgl.lang.graph import Graph
from sgl.runtime.engine import Engine, EngineSession
from sgl.server import call, dialogue, embeddings, native, scoring
from sgl.server.bodies import MAX_EXPANDED
from sgl.server.openai import chat, completions
from sgl.server.openai.logprobs import MAX_LOGPROBS

WAIT_S = 30.0
QUESTION = {"type": "yes_no", "question": "Is it?"}
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def served(dummy_engine: Engine) -> Iterator[Served]:
    with serving(dummy_engine) as server:
        yield server


@pytest.fixture
def http(served: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=served.url, timeout=WAIT_S) as client:
        yield client


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("json_schema", {"enum": ["a" * 64] * 5000}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": "a" * 300_000}}}),
    ],
)
def test_constraints_are_not_read_beyond_a_bound(http: httpx2.Client, field: str, value: Any) -> None:
    response = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("constraint_too_complex", field)
    assert "at most 262144 are read" in error["message"]


LOGPROBS: dict[str, Any] = {"max_tokens": 2048, "logprobs": 20}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"query": "a" * 8192, "items": ["b"] * 512, "label_token_ids": [1]}, "items"),
        ("/v1/score", {"query": [1] * 8192, "items": [[2]] * 512, "label_token_ids": [1]}, "items"),
        ("/v1/score", {"query": "a", "items": ["b"] * 1025, "label_token_ids": [1]}, "items"),
        (
            "/v1/decisions",
            {"input": {"text": "a" * 8192}, "questions": [{**QUESTION, "id": str(i)} for i in range(512)]},
            "questions",
        ),
        ("/v1/rerank", {"query": "a" * 8192, "documents": ["b"] * 512}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
        ("/v1/embeddings", {"input": ["b"] * 2049}, "input"),
        ("/encode", {"text": ["b"] * 2049}, "text"),
        ("/classify", {"input_ids": [[1]] * 2049}, "input_ids"),
        ("/api/embed", {"input": ["b"] * 2049}, "input"),
        ("/tokenize", {"text": ["b"] * (native.MAX_TEXTS + 1)}, "text"),
        ("/detokenize", {"tokens": [[1]] * (native.MAX_TEXTS + 1)}, "tokens"),
        ("/v1/completions", {"prompt": ["b"] * 65, "n": 16, "max_tokens": 1}, "prompt"),
        ("/v1/completions", {"prompt": ["b"] * 1000, **LOGPROBS}, "logprobs"),
        ("/v1/completions", {"prompt": [[1] * 1000] * 500, "echo": True, "max_tokens": 0, "logprobs": 20}, "logprobs"),
        (
            "/generate",
            {
                "text": "a",
                "sampling_params": {"max_new_tokens": 2048, "n": 16},
                "return_logprob": True,
                "token_ids_logprob": list(range(256)),
            },
            "logprobs",
        ),
    ],
)
def test_what_a_request_multiplies_is_bounded(
    http: httpx2.Client, dummy_engine: Engine, path: str, body: dict[str, Any], param: str
) -> None:
    before = dummy_engine.stats()["programs"]
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    if path == "/api/embed":
        assert error.startswith("input has 2049 entries")
    else:
        assert (answer.status_code, error["param"]) == (400, param), answer.text
    assert dummy_engine.stats()["programs"] == before


def test_a_request_at_the_bounds_is_served(http: httpx2.Client) -> None:
    short = {"query": [1] * 8, "items": [[2], [3]], "label_token_ids": [1]}
    assert http.post("/v1/score", json=short).is_success
    assert 512 * (8192 + 1) > MAX_EXPANDED >= 511 * (8192 + 1)
    chat = {"messages": USER, "max_tokens": 3, "logprobs": True, "top_logprobs": 20, "n": 16}
    assert http.post("/v1/chat/completions", json=chat).is_success
    assert 16 * 2048 * 21 < MAX_LOGPROBS < 1000 * 2048 * 21


def test_what_is_made_of_a_small_body_is_made_apart(
    served: Served, http: httpx2.Client, dummy_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, str] = {}

    def noted(where: Any, name: str) -> None:
        work = getattr(where, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            names[name] = threading.current_thread().name
            return work(*args, **kwargs)

        monkeypatch.setattr(where, name, noting)

    for where, name in (
        (scoring, "_score_graphs"),
        (scoring, "_scores"),
        (scoring._Asked, "__init__"),
        (scoring._Asked, "prompt_ids"),
        (chat, "_whole"),
        (completions, "_whole"),
        (native._Batch, "_outputs"),
        (dialogue, "_drafted"),
        (embeddings, "inputs_of"),
    ):
        noted(where, name)
    monkeypatch.setattr(call, "LARGE", 400)
    items = {"query": "a" * 50, "items": ["b"] * 10, "label_token_ids": [1]}
    assert http.post("/v1/score", json=items).is_success
    question = {**QUESTION, "id": "x"}
    asked = {"input": "a", "questions": [question], "return_prompt_token_ids": True}
    assert http.post("/v1/decisions", json=asked).is_success
    long = {"max_tokens": 20, "ignore_eos": True, "logprobs": 20}
    assert http.post("/v1/completions", json={**long, "prompt": "a"}).is_success
    assert names["_whole"] != THREAD
    whole = {**long, "messages": USER, "logprobs": True, "top_logprobs": 20}
    assert http.post("/v1/chat/completions", json=whole).is_success
    params = {"max_new_tokens": 20, "ignore_eos": True}
    native_body = {"text": "a", "sampling_params": params, "return_logprob": True, "top_logprobs_num": 20}
    assert http.post("/generate", json=native_body).is_success
    large = {"messages": [{"role": "user", "content": "a" * 400}], "max_tokens": 1}
    assert http.post("/v1/chat/completions", json=large).is_success
    assert http.post("/v1/embeddings", json={"input": [1] * 400}).status_code == 400
    assert len(names) == 8
    assert THREAD not in names.values(), names


def test_a_large_program_that_cannot_be_sent_is_answered(
    http: httpx2.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(session: EngineSession, graph: Graph, *, finish: bool = False) -> None:
        raise RuntimeError("secret inside")

    with monkeypatch.context() as patched:
        patched.setattr(EngineSession, "submit", fails)
        answer = http.post("/v1/completions", json={"prompt": "a" * 70_000, "max_tokens": 1})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "secret inside" in caplog.text
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).is_success


def test_tokens_begin_as_a_prompt_does_where_that_is_asked_for(
    http: httpx2.Client, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert http.post("/tokenize", json={"text": "ab"}).json()["tokens"] == [97, 98]
    assert served.server._renderer is not None
    tokenizer = served.server._renderer.tokenizer
    monkeypatch.setattr(tokenizer, "bos_id", 257)
    monkeypatch.setattr(tokenizer, "add_bos", True)
    asked = {"text": ["ab", "c"], "add_special_tokens": True}
    assert http.post("/tokenize", json=asked).json()["tokens"] == [[257, 97, 98], [257, 99]]
    assert http.post("/tokenize", json={"text": "ab"}).json()["tokens"] == [97, 98]


@pytest.mark.parametrize("now", [1e18, 1e300, 2.0**37 + 1, -1])
def test_a_time_beyond_all_calendars_is_refused(http: httpx2.Client, now: float) -> None:
    text = {"type": "text", "id": 0, "segments": [{"type": "literal", "text": "a"}]}
    asked = {"graph": {"protocol": 1, "nodes": [text]}, "options": {"now": now}}
    answer = http.post("/v1/programs", json=asked)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "options")
    assert "now is" in answer.json()["error"]["message"]
    asked["options"] = {"now": 2.0**37}
    assert http.post("/v1/programs", json=asked).is_success


@pytest.mark.parametrize("branch", ["9" * 5000, "9" * 30, "-1", "x", "99"])
def test_a_branch_that_there_is_not_is_not_found(http: httpx2.Client, branch: str) -> None:
    assert http.get(f"/v1/programs/x/branches/{branch}").status_code == 404
    text = {"type": "text", "id": 0, "segments": [{"type": "literal", "text": "a"}]}
    asked = {"graph": {"protocol": 1, "nodes": [text]}, "stream": True, "finish": False}
    with http.stream("POST", "/v1/programs", json=asked) as stream:
        lines = stream.iter_lines()  # kept: one that is garbage closes the connection, and with it the program
        first = next(line for line in lines if line.startswith("data: "))
        id = json.loads(first.removeprefix("data: "))["id"]
        answer = http.get(f"/v1/programs/{id}/branches/{branch}")
        assert answer.status_code == (410 if branch == "99" else 404), answer.text
