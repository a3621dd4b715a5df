"""Scores over HTTP are the model's own probabilities."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from support.serving import serving

from sgl.runtime.engine import Engine


@pytest.fixture(scope="module")
def url(dummy_engine: Engine) -> Iterator[str]:
    with serving(dummy_engine) as served:
        yield served.url


@pytest.fixture
def http(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url) as client:
        yield client


def expected(engine: Engine, ids: list[int], labels: list[int]) -> list[float]:
    output = engine.generate(
        input_ids=ids,
        sampling_params={"max_new_tokens": 1, "temperature": 0},
        return_logprob=True,
        token_ids_logprob=labels,
    )
    return [entry[0] for entry in output["meta_info"]["output_token_ids_logprobs"][0]]


@pytest.mark.parametrize("item_first", [False, True])
def test_score_is_the_next_tokens_probability(http: httpx2.Client, dummy_engine: Engine, item_first: bool) -> None:
    labels = [65, 66, 300]
    body = {"query": "Is it? ", "items": ["yes", "perhaps"], "label_token_ids": labels, "item_first": item_first}
    answer = http.post("/v1/score", json={**body, "return_token_logprobs": True}).json()
    shares = http.post("/v1/score", json={**body, "apply_softmax": True, "temperature": 2.0}).json()["scores"]
    for item, scores, logprobs, share in zip(
        body["items"], answer["scores"], answer["token_logprobs"], shares, strict=True
    ):
        text = item + "Is it? " if item_first else "Is it? " + item
        want = expected(dummy_engine, list(text.encode()), labels)
        assert logprobs == pytest.approx(want, abs=1e-4)
        assert scores == pytest.approx([math.exp(each) for each in want], rel=1e-3)
        weights = [math.exp(each / 2) for each in want]
        assert share == pytest.approx([weight / sum(weights) for weight in weights], rel=1e-3)


def test_items_of_ids_with_labels_of_their_own(http: httpx2.Client, dummy_engine: Engine) -> None:
    body = {"query": [1, 2], "items": [[3], [4, 5]], "label_token_ids": [[7], [8, 9]], "return_token_logprobs": True}
    found = http.post("/v1/score", json=body).json()["token_logprobs"]
    assert found[0] == pytest.approx(expected(dummy_engine, [1, 2, 3], [7]), abs=1e-4)
    assert found[1] == pytest.approx(expected(dummy_engine, [1, 2, 4, 5], [8, 9]), abs=1e-4)


def test_decisions(http: httpx2.Client, dummy_engine: Engine) -> None:
    questions = [
        {"id": "tone", "type": "choice", "options": ["kind", "cold"], "question": "What tone?"},
        {"id": "quality", "type": "score", "levels": ["bad", "fair", "good"]},
        {"id": "spam", "type": "yes_no", "question": "Is it spam?"},
    ]
    body = {"input": {"text": "Hello"}, "questions": questions, "return_prompt_token_ids": True}
    answers = http.post("/v1/decisions", json=body).json()["answers"]
    for answer in answers.values():
        want = expected(dummy_engine, answer["prompt_token_ids"], answer["label_token_ids"])
        mass = sum(math.exp(each) for each in want)
        assert answer["label_mass"] == pytest.approx(mass, rel=1e-3)
        assert list(answer["probabilities"].values()) == pytest.approx(
            [math.exp(each) / mass for each in want], rel=1e-3
        )
    assert answers["tone"]["choice"] == max(answers["tone"]["probabilities"], key=answers["tone"]["probabilities"].get)
    quality = list(answers["quality"]["probabilities"].values())
    assert answers["quality"]["score"] == pytest.approx(quality[1] / 2 + quality[2])
    assert set(answers["spam"]["probabilities"]) == {"yes", "no"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/score", {"query": "a", "items": [], "label_token_ids": [1]}),
        ("/v1/score", {"query": "a", "items": [[1]], "label_token_ids": [1]}),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [10**6]}),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": ["x"]}),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [[1], [2]]}),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1], "temperature": 0}),
        ("/v1/score", {"query": "", "items": [""], "label_token_ids": [1]}),
        ("/v1/decisions", {"input": "a", "questions": []}),
        ("/v1/decisions", {"input": "a", "questions": [{"id": "x", "type": "choice", "options": ["one"]}]}),
        ("/v1/decisions", {"input": "a", "questions": [{"id": "x", "type": "yes_no"}] * 2}),
        ("/v1/decisions", {"input": "a", "questions": [{"id": "x", "type": "maybe"}]}),
    ],
)
def test_what_cannot_be_scored(http: httpx2.Client, path: str, body: dict[str, Any]) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"query": "a" * 2**20, "items": ["b"] * 1000, "label_token_ids": [1]}, "items"),
        ("/v1/score", {"query": "a", "items": ["b"] * 200_000, "label_token_ids": [1]}, "items"),
        ("/v1/score", {"query": "a", "items": ["b"] * 2, "label_token_ids": [1] * 200_000}, "label_token_ids"),
        (
            "/v1/decisions",
            {"input": "a" * 2**20, "questions": [{"id": str(i), "type": "yes_no"} for i in range(1000)]},
            "questions",
        ),
    ],
)
def test_what_would_multiply_a_text_is_refused_before(
    http: httpx2.Client, path: str, body: dict[str, Any], param: str
) -> None:
    tracemalloc.start()
    try:
        response = http.post(path, json=body)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert most < 200 * 2**20  # the texts would take a gigabyte
