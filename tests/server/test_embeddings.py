"""Encoders over HTTP give what the engine gives, in OpenAI's and SGLang's shapes."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import numpy as np
import openai
import pytest
from support.serving import serving
from support.tiny_bert import POOLING, saved

from sgl.runtime.engine import Engine
from sgl.server import embeddings


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = saved(tmp_path_factory.mktemp("embedder"), "BertModel", POOLING)
    with Engine(model_path=str(folder), device="cpu") as engine:
        yield engine


def test_openais_client_gets_the_engines_embeddings(embedder: Engine) -> None:
    texts = ["the cat", "dog ran", "sat"]
    want = [output["embedding"] for output in embedder.encode(texts)]
    with serving(embedder) as served:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            found = client.embeddings.create(model="default", input=texts)  # asks for base64
            one = client.embeddings.create(model="default", input="the cat", encoding_format="float", dimensions=4)
        with httpx2.Client(base_url=served.url) as http:
            encoded = http.post("/encode", json={"text": texts}).json()
            raw = http.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64"}).json()
            for wrong in ([], [""], [[]], ["a", 1], [True], "the " * 400):
                assert http.post("/v1/embeddings", json={"input": wrong}).status_code == 400
            assert http.get("/health_generate").status_code == 200
            assert http.post("/v1/rerank", json={"query": "a", "documents": ["b"]}).status_code == 400
            assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 400
            chat = {"messages": [{"role": "user", "content": "a"}]}
            for path, body in (
                ("/v1/chat/completions", chat),
                ("/v1/responses", {"input": "a"}),
                ("/v1/messages/count_tokens", {**chat, "model": "default"}),
                ("/api/chat", {**chat, "model": "default"}),
                ("/api/generate", {"prompt": "a", "model": "default"}),
            ):
                refused = http.post(path, json=body)
                assert (refused.status_code, "is an encoder" in refused.text) == (400, True), path
            assert http.get("/get_model_info").json()["embedding"]
    for item, expected in zip(found.data, want, strict=True):
        assert item.embedding == pytest.approx(expected, abs=1e-6)
    assert found.usage.prompt_tokens == sum(output["meta_info"]["prompt_tokens"] for output in encoded)
    assert [output["embedding"] for output in encoded] == [pytest.approx(expected) for expected in want]
    assert np.frombuffer(base64.b64decode(raw["data"][1]["embedding"]), "<f4") == pytest.approx(want[1], abs=1e-6)
    assert len(one.data[0].embedding) == 4
    assert sum(value**2 for value in one.data[0].embedding) == pytest.approx(1.0)


def test_a_cross_encoder_ranks(tmp_path: Path) -> None:
    folder = saved(tmp_path / "cross", "BertForSequenceClassification", {}, num_labels=1)
    documents = ["the cat sat", "dog", "ran the dog", "cat cat"]
    with Engine(model_path=str(folder), device="cpu") as engine:
        want = engine.rerank("cat", documents)
        with serving(engine) as served, httpx2.Client(base_url=served.url) as http:
            body = {"query": "cat", "documents": documents}
            full = http.post("/v1/rerank", json=body).json()["results"]
            top = http.post("/v1/rerank", json={**body, "top_n": 2, "return_documents": False}).json()["results"]
            assert http.post("/v1/rerank", json={**body, "documents": []}).status_code == 400
    assert [(each["index"], each["document"]) for each in full] == [(each["index"], each["document"]) for each in want]
    assert [each["score"] for each in full] == pytest.approx([each["score"] for each in want])
    assert [each["index"] for each in top] == [each["index"] for each in want[:2]]
    assert "document" not in top[0]


def test_who_goes_away_and_who_aborts_ends_a_call(embedder: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker computes no more of it; what others asked is answered."""
    many = {"text": ["the cat sat"] * 40_000}
    monkeypatch.setattr(embeddings, "MAX_INPUTS", 40_000)
    before = embedder.stats()["num_inputs"]
    with serving(embedder) as served, httpx2.Client(base_url=served.url, timeout=60) as http:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(http.post, "/encode", json={**many, "rid": "mine"})
            while not http.post("/abort_request", json={"rid": "mine"}).json()["aborted"]:
                assert not answer.done()
            assert answer.result().status_code == 499
        with pytest.raises(httpx2.ReadTimeout):
            http.post("/encode", json=many, timeout=0.05)
        assert len(http.post("/encode", json={"text": ["dog"]}).json()) == 1
    stats = embedder.stats()
    assert stats["num_waiting"] == 0
    assert stats["num_inputs"] - before < 40_000


def test_metrics_count_what_is_encoded(embedder: Engine) -> None:
    def counted(http: httpx2.Client) -> dict[str, float]:
        lines = [line.rpartition(" ") for line in http.get("/metrics").text.splitlines() if line[0] != "#"]
        return {name.partition("{")[0]: float(value) for name, _, value in lines}

    with serving(embedder) as served, httpx2.Client(base_url=served.url) as http:
        before = counted(http)
        outputs = http.post("/encode", json={"text": ["the cat", "dog ran sat"]}).json()
        after = counted(http)
    num_tokens = sum(output["meta_info"]["prompt_tokens"] for output in outputs)
    assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] == num_tokens
    assert after["vllm:prefix_cache_queries_total"] == 0
    assert after["vllm:e2e_request_latency_seconds_count"] == after["sglang:num_requests_total"] == 1


def test_a_model_that_generates_says_so(dummy_engine: Engine) -> None:
    with serving(dummy_engine) as served, httpx2.Client(base_url=served.url) as http:
        response = http.post("/v1/embeddings", json={"input": "a"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported"
