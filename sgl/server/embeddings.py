"""Encoders over HTTP: `/v1/embeddings`, `/v1/rerank`, `/encode`, `/classify`.

Owns the bodies. What is computed, and what a model can do, is `Engine.encode`, `classify` and `rerank`; a model that
generates answers these routes with 400 and the reason.
"""

from __future__ import annotations

import base64
import struct
from typing import Any, Literal, NamedTuple

import msgspec

from sgl.errors import InvalidParameter
from sgl.server.bodies import check_count, check_expanded
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


class Inputs(NamedTuple):
    """Texts, or lists of token ids; `is_single` where neither stood in a list."""

    texts: list[str] | None
    ids: list[list[int]] | None
    is_single: bool


@routes.post("/v1/embeddings", "user", EmbeddingsRequest)
async def embeddings(call: Call, body: EmbeddingsRequest) -> Any:
    """Embeddings of texts."""
    call.server.check_model(body.model)
    inputs = await call.apart(inputs_of, "input", body.input)
    outputs = await embedded(call, inputs, truncate=body.truncate)
    vectors = await call.apart(vectors_of, outputs, body.dimensions)
    return {
        "object": "list",
        "model": call.server.model,
        "data": [
            {"object": "embedding", "index": index, "embedding": _shown(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ],
        "usage": usage_of(prompt=num_tokens(outputs), cached=0, completion=0),
    }


@routes.post("/encode", "user", EncodeRequest)
async def encode(call: Call, body: EncodeRequest) -> Any:
    """Embeddings in SGLang's shape (see `sgl.Engine.encode`)."""
    inputs = await _asked(call, body)
    outputs = await embedded(call, inputs, truncate=body.truncate)
    return outputs[0] if inputs.is_single else outputs


@routes.post("/classify", "user", EncodeRequest)
async def classify(call: Call, body: EncodeRequest) -> Any:
    """Labels of texts with their shares (see `sgl.Engine.classify`)."""
    inputs = await _asked(call, body)
    call.server.check_encodes("classify")
    outputs = await call.compute(
        call.server.engine.async_classify(inputs.texts, input_ids=inputs.ids, truncate=body.truncate)
    )
    return outputs[0] if inputs.is_single else outputs


async def _asked(call: Call, body: EncodeRequest) -> Inputs:
    call.server.check_model(body.model)
    call.name(body.rid)
    if (body.text is None) == (body.input_ids is None):
        raise InvalidParameter("pass exactly one of text and input_ids", param="text")
    if body.text is not None:
        return inputs_of("text", body.text)
    return await call.apart(inputs_of, "input_ids", body.input_ids or [])


async def embedded(call: Call, inputs: Inputs, *, truncate: bool) -> list[dict[str, Any]]:
    """The embedding of each input, as `sgl.Engine.encode` gives it."""
    call.server.check_encodes("embed")
    outputs: list[dict[str, Any]] = await call.compute(
        call.server.engine.async_encode(inputs.texts, input_ids=inputs.ids, truncate=truncate)
    )
    call.weigh(sum(len(output["embedding"]) for output in outputs))
    return outputs


def vectors_of(outputs: list[dict[str, Any]], dimensions: int | None) -> list[list[float]]:
    """The embeddings, or their first dimensions."""
    return [shortened(output["embedding"], dimensions) for output in outputs]


@routes.post("/v1/rerank", "user", RerankRequest)
async def rerank(call: Call, body: RerankRequest) -> Any:
    """Documents by their score with a query, best first."""
    call.server.check_model(body.model)
    check_count("documents", len(body.documents), MAX_INPUTS)
    check_expanded("documents", len(body.documents) * len(body.query) + sum(map(len, body.documents)))
    call.server.check_encodes("rerank")
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
    usage = usage_of(prompt=num_tokens(ranked), cached=0, completion=0)
    return {"object": "rerank", "model": call.server.model, "results": results, "usage": usage}


def inputs_of(name: str, given: str | list[Any]) -> Inputs:
    """What the field `name` has: a text, a list of texts, token ids, or a list of these.

    Raises:
        InvalidParameter: a mixture, or too many.
    """
    if isinstance(given, str):
        return Inputs([given], None, is_single=True)
    is_flat = not given or not isinstance(given[0], (str, list))
    rows = [given] if is_flat else given
    check_count(name, len(rows) if given else 0, MAX_INPUTS)
    texts = [row for row in rows if isinstance(row, str)]
    if len(texts) == len(rows):
        return Inputs(texts, None, is_single=False)
    for row in rows:
        if not isinstance(row, list) or not row or not all(type(each) is int for each in row):
            raise InvalidParameter(
                f"{name} is none of a text, a list of texts, token ids, a list of these",
                hint="give one kind, and nothing empty",
                param=name,
            )
    return Inputs(None, rows, is_single=is_flat)


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


def num_tokens(outputs: list[dict[str, Any]]) -> int:
    """Tokens of the inputs."""
    return sum(int(output["meta_info"]["prompt_tokens"]) for output in outputs)
