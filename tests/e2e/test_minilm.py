"""The known encoder on real text: vectors of MiniLM against transformers, and a search that finds what it should."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sgl.errors import DownloadFailed, PromptTooLong
from sgl.runtime.engine import Engine
from sgl.runtime.loading.sources import locate

TEXTS = [
    "A cat sat on the mat.",
    "Der Hund läuft über die Straße.",
    "The stock market fell sharply on Monday, and traders blamed interest rates.",
    "naïve café \u2014 \u732b " * 12,
    "x",
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    try:
        locate("minilm-l6")
    except DownloadFailed as error:
        pytest.skip(f"the model cannot be fetched: {error.message}")
    with Engine(model_path="minilm-l6", device="cpu") as engine:
        yield engine


def test_vectors_are_those_of_transformers(engine: Engine) -> None:
    from transformers import AutoTokenizer, BertModel

    folder = engine.server_info()["model_path"]
    given = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    with torch.inference_mode():
        states = BertModel.from_pretrained(folder)(**given).last_hidden_state
    mask = given["attention_mask"][:, :, None]
    expected = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    outputs = engine.encode(TEXTS)
    ours = torch.tensor([out["embedding"] for out in outputs])
    assert ours.shape == (len(TEXTS), 384)
    assert float((ours - expected).abs().max()) < 1e-5
    assert [out["meta_info"]["prompt_tokens"] for out in outputs] == given["attention_mask"].sum(1).tolist()


def test_calls_of_asyncio_and_what_is_too_long(engine: Engine) -> None:
    async def together() -> list[Any]:
        return await asyncio.gather(*(engine.async_encode(text) for text in TEXTS))

    for ours, alone in zip(asyncio.run(together()), engine.encode(TEXTS), strict=True):
        assert ours["embedding"] == pytest.approx(alone["embedding"], abs=1e-5)
    with pytest.raises(PromptTooLong, match="the input has 302 tokens; the model takes 256"):
        engine.encode("word " * 300)
    assert engine.encode("word " * 300, truncate=True)["meta_info"]["prompt_tokens"] == 256


def test_a_search_finds_what_it_should(engine: Engine) -> None:
    documents = ["Dogs are loyal animals.", "Inflation rose by two percent.", "How to bake bread at home."]
    query, *rows = (torch.tensor(out["embedding"]) for out in engine.encode(["economy and prices", *documents]))
    assert max(range(3), key=lambda index: float(query @ rows[index])) == 1
