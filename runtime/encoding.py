"""What `Engine.encode`, `classify`, `score_pairs` and `rerank` were asked, and their outputs in the shapes of SGLang's
engine.

Owns the reading of texts, token ids and pairs into one `Encode` message (everything wrong with their form is raised
here, before anything is sent), and of its reply. Client half: no torch.
"""

from __future__ import annotations

import array
import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

from sgl.errors import EmptyPrompt, EngineDead, InvalidParameter, Unsupported
from sgl.limits import DEFAULT_LIMITS
from sgl.runtime.messages import CancelEncode, Encode, EncodeReply, EncoderInput, EncoderTask, ToWorker

Output = dict[str, Any]


class Asker(Protocol):
    """The client of the worker, as far as this module knows it: `WorkerClient`."""

    @property
    def info(self) -> Mapping[str, Any]:
        """What the worker said of itself."""

    def ask(self, make: Callable[[int], ToWorker]) -> Future[Any]:
        """Send the message that `make` builds for a request number; the answer's future."""

    def send(self, message: ToWorker) -> None:
        """Send a message that has no answer."""


class EncoderCall:
    """One call under way. Who waits for it and is interrupted (Ctrl-C, a task that is cancelled) cancels it.

    Args:
        task, inputs, single: what is asked; `single` says that one output is returned and no list.
        truncate: cut inputs that are too long instead of refusing them.
    """

    def __init__(
        self, client: Asker, task: EncoderTask, inputs: tuple[EncoderInput, ...], *, single: bool, truncate: bool
    ) -> None:
        self._client = client
        self._task = task
        self._single = single
        self._labels: Sequence[str] = client.info.get("encoder", {}).get("labels", ())
        self._started = time.monotonic()
        self._request = 0

        def message(request: int) -> Encode:
            self._request = request
            return Encode(request=request, task=task, inputs=inputs, truncate=truncate)

        self._reply: Future[EncodeReply] = client.ask(message)

    def result(self) -> Any:
        """The outputs, in the order of the inputs; waits for them. Raises what is wrong with one of the inputs."""
        try:
            return self._outputs(self._reply.result())
        finally:
            self.cancel()

    async def async_result(self) -> Any:
        """`result` for asyncio."""
        try:
            return self._outputs(await asyncio.wrap_future(self._reply))
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Compute no more of it, unless it is answered: who waits for it gets `Cancelled`."""
        if not self._reply.done():
            with suppress(EngineDead):  # which computes nothing any more
                self._client.send(CancelEncode(self._request))

    def _outputs(self, reply: EncodeReply) -> Any:
        latency_s = time.monotonic() - self._started
        outputs = []
        for row, num_tokens in zip(reply.rows, reply.num_tokens, strict=True):
            numbers = array.array("f")
            numbers.frombytes(row)
            meta = {"prompt_tokens": num_tokens, "e2e_latency": latency_s}
            outputs.append({**self._output(numbers.tolist()), "meta_info": meta})
        return outputs[0] if self._single else outputs

    def _output(self, numbers: list[float]) -> Output:
        if self._task == "embed":
            return {"embedding": numbers}
        if self._task == "score":
            return {"score": numbers[0]}
        best = max(range(len(numbers)), key=numbers.__getitem__)
        return {"label": self._labels[best], "probs": dict(zip(self._labels, numbers, strict=True))}


def texts_call(
    client: Asker,
    task: EncoderTask,
    prompt: str | Sequence[str] | None,
    input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    *,
    truncate: bool,
) -> EncoderCall:
    """A call on texts, or on token ids in their place.

    Raises:
        InvalidRequest: neither or both, something else than that, or more of it than `sgl.limits` allows.
    """
    if (prompt is None) == (input_ids is None):
        raise InvalidParameter("pass exactly one of prompt and input_ids", param="prompt")
    if prompt is not None:
        given = [prompt] if isinstance(prompt, str) else _listed("prompt", prompt)
        inputs = tuple(EncoderInput(text=_text("prompt", text)) for text in given)
        single = isinstance(prompt, str)
    else:
        rows = _listed("input_ids", input_ids)
        single = not any(isinstance(row, Iterable) for row in rows)
        inputs = tuple(EncoderInput(token_ids=tuple(_listed("input_ids", row))) for row in ([rows] if single else rows))
    _check_size(inputs)
    return EncoderCall(client, task, inputs, single=single, truncate=truncate)


def pairs_call(client: Asker, pairs: Sequence[Any], *, truncate: bool) -> EncoderCall:
    """A call on a pair of texts, or a list of pairs. Raises as `texts_call`."""
    given = _listed("pairs", pairs)
    single = len(given) == 2 and all(isinstance(text, str) for text in given)
    rows = [given] if single else [_listed("pairs", pair) for pair in given]
    if wrong := next((row for row in rows if len(row) != 2), None):
        raise InvalidParameter(f"pairs has {wrong!r}; expected two texts", param="pairs")
    inputs = tuple(EncoderInput(text=_text("pairs", a), pair=_text("pairs", b)) for a, b in rows)
    _check_size(inputs)
    return EncoderCall(client, "score", inputs, single=single, truncate=truncate)


def ranked(documents: Sequence[str], scores: Sequence[Output], top_n: int | None) -> list[Output]:
    """The documents by their scores, best first; of equal ones the first."""
    order = sorted(range(len(documents)), key=lambda index: -scores[index]["score"])
    return [{"index": index, "document": documents[index], **scores[index]} for index in order[:top_n]]


def check_top_n(top_n: int | None) -> None:
    """Raise `InvalidParameter` for what is no number of documents."""
    if top_n is not None and (isinstance(top_n, bool) or not isinstance(top_n, int) or top_n < 1):
        raise InvalidParameter(f"top_n is {top_n!r}; expected a number from 1, or None", param="top_n")


def _listed(name: str, value: Any) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidParameter(f"{name} is {value!r}; expected a list", param=name)
    return list(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidParameter(f"{name} has {value!r}; expected a text", param=name)
    return value


def _check_size(inputs: Sequence[EncoderInput]) -> None:
    if not inputs:
        raise EmptyPrompt("there is nothing to encode", hint="pass at least one text")
    size = sum(
        len(given.text.encode("utf-8", "surrogatepass"))
        + len((given.pair or "").encode("utf-8", "surrogatepass"))
        + len(given.token_ids or ())
        for given in inputs
    )
    for what, number, most in (
        ("inputs", len(inputs), DEFAULT_LIMITS.max_prompts),
        ("tokens or bytes", size, DEFAULT_LIMITS.max_call_tokens),
    ):
        if number > most:
            raise InvalidParameter(
                f"{number} {what} in one call; at most {most} are allowed", hint="split it into several calls"
            )


def check_encoder(client: Asker) -> None:
    """Raise `Unsupported` unless the model is one."""
    if client.info.get("kind") != "encoder":
        raise encodes_nothing(client.info.get("architecture"))


def generates_nothing(architecture: Any) -> Unsupported:
    """The error of a program, a prompt or a pin on an encoder."""
    return Unsupported(
        f"{architecture} is an encoder: it generates nothing", hint="call encode, classify or score_pairs"
    )


def encodes_nothing(architecture: Any) -> Unsupported:
    """The error of `encode` on a decoder."""
    return Unsupported(
        f"{architecture} generates text: it gives no embeddings and no labels",
        hint="use an encoder: for embeddings one as minilm-l6, for labels one that has them, for pairs a cross-encoder",
    )
