"""Encoders over HTTP: `/v1/embeddings`, `/v1/rerank`, `/encode`, `/classify`.

Owns the bodies. What is computed, and what a model can do, is `Engine.encode`, `classify` and `rerank`; a model that
generates answers these routes with 400 and the reason.
"""

from __future__ import annotations

import base64
import struct
from typing import Any, Literal

import msgspec

from sgl.errors import InvalidParameter
from sgl.server.call import Call
from sgl.server.openai.usage import usage_of
from sgl.server.routes import Routes

routes = Routes()

MAX_INPUTS = 2048
"""Texts of one request, as OpenAI's API has it."""


class EmbeddingsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/embeddings`; `input` is a text, a list of texts, token ids, or a list of these."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    truncate: bool = False
    user: str | None = None


class EncodeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /encode` and `/classify`; `rid` is what `/abort_request` asks for."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    model: str | None = None
    truncate: bool = False
    rid: str | None = None


class RerankRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/rerank`."""

    query: str
    documents: list[str]
    top_n: int | None = None
    return_documents: bool = True
    model: str | None = None
    truncate: bool = False


@routes.post("/v1/embeddings", "user", EmbeddingsRequest)
async def embeddings(call: Call, body: EmbeddingsRequest) -> Any:
    """Embeddings of texts."""
    call.server.check_model(body.model)
    texts, ids = await call.apart(_inputs, body.input)
    outputs = await call.compute(call.server.engine.async_encode(texts, input_ids=ids, truncate=body.truncate))
    vectors = [shortened(output["embedding"], body.dimensions) for output in outputs]
    return {
        "object": "list",
        "model": call.server.model,
        "data": [
            {"object": "embedding", "index": index, "embedding": _shown(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ],
        "usage": usage_of(prompt=_tokens(outputs), cached=0, completion=0),
    }


@routes.post("/encode", "user", EncodeRequest)
async def encode(call: Call, body: EncodeRequest) -> Any:
    """Embeddings in SGLang's shape (see `sgl.Engine.encode`)."""
    call.server.check_model(body.model)
    call.name(body.rid)
    return await call.compute(
        call.server.engine.async_encode(body.text, input_ids=body.input_ids, truncate=body.truncate)
    )


@routes.post("/classify", "user", EncodeRequest)
async def classify(call: Call, body: EncodeRequest) -> Any:
    """Labels of texts with their shares (see `sgl.Engine.classify`)."""
    call.server.check_model(body.model)
    call.name(body.rid)
    return await call.compute(
        call.server.engine.async_classify(body.text, input_ids=body.input_ids, truncate=body.truncate)
    )


@routes.post("/v1/rerank", "user", RerankRequest)
async def rerank(call: Call, body: RerankRequest) -> Any:
    """Documents by their score with a query, best first."""
    call.server.check_model(body.model)
    _check_count("documents", len(body.documents))
    ranked = await call.compute(
        call.server.engine.async_rerank(body.query, body.documents, top_n=body.top_n, truncate=body.truncate)
    )
    results = [
        {
            "index": each["index"],
            "score": each["score"],
            "relevance_score": each["score"],
            **({"document": each["document"]} if body.return_documents else {}),
        }
        for each in ranked
    ]
    usage = usage_of(prompt=_tokens(ranked), cached=0, completion=0)
    return {"object": "rerank", "model": call.server.model, "results": results, "usage": usage}


def _inputs(given: str | list[Any]) -> tuple[list[str] | None, list[list[int]] | None]:
    """Texts or lists of token ids.

    Raises:
        InvalidParameter: a mixture.
    """
    if isinstance(given, str):
        return [given], None
    if given and all(isinstance(each, str) for each in given):
        _check_count("input", len(given))
        return given, None
    rows = given if given and all(isinstance(each, list) for each in given) else [given]
    _check_count("input", len(rows))
    for row in rows:
        if not row or any(isinstance(each, bool) or not isinstance(each, int) for each in row):
            raise InvalidParameter(
                "input is none of a text, a list of texts, token ids, a list of these",
                hint="give one kind, and nothing empty",
                param="input",
            )
    return None, rows


def _check_count(name: str, num: int) -> None:
    if not 1 <= num <= MAX_INPUTS:
        raise InvalidParameter(f"{name} has {num} entries; expected 1 to {MAX_INPUTS}", param=name)


def shortened(vector: list[float], dimensions: int | None) -> list[float]:
    """The first dimensions, normalized again; for models that were trained so."""
    if dimensions is None:
        return vector
    if not 1 <= dimensions <= len(vector):
        raise InvalidParameter(f"dimensions is {dimensions}; expected 1 to {len(vector)}", param="dimensions")
    cut = vector[:dimensions]
    length = sum(value * value for value in cut) ** 0.5
    return [value / length for value in cut] if length else cut


def _shown(vector: list[float], encoding: str) -> list[float] | str:
    if encoding == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _tokens(outputs: list[dict[str, Any]]) -> int:
    return sum(int(output["meta_info"]["prompt_tokens"]) for output in outputs)
