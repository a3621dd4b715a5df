"""Log-probabilities in the two shapes of OpenAI's API.

Owns the texts of tokens (a token that is part of a character is shown as its bytes, `bytes:\\xNN`, as OpenAI does), and
the bound on how many there are in an answer, which is in memory as a whole.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import msgspec

from sgl.errors import InvalidParameter
from sgl.lang.graph import Sampling, TokenLogprob, ValueEvent
from sgl.runtime.rendering import ModelRenderer

MAX_LOGPROBS = 2**22
"""Log-probabilities of one request, alternatives included: each is some 300 bytes here until the answer is written."""
_LOWEST = -9999.0
"""For a token of probability zero: JSON has no infinity."""


def most_logprobs(sampling: Sampling, prompt_len: int, context_len: int) -> int:
    """How many log-probabilities the samples of one prompt may have, which is at most `prompt_len` tokens long.

    Example:
        >>> most_logprobs(Sampling(max_new_tokens=10, return_logprob=True, top_logprobs_num=4, n=2), 1000, 2048)
        100
        >>> most_logprobs(Sampling(max_new_tokens=10, return_logprob=True, logprob_start_len=0), 1000, 500)
        500
    """
    if not sampling.return_logprob:
        return 0
    num_tokens = sampling.max_new_tokens + (prompt_len if sampling.logprob_start_len >= 0 else 0)
    return sampling.n * min(num_tokens, context_len) * (1 + sampling.top_logprobs_num + len(sampling.token_ids_logprob))


def within_logprobs(sampling: Sampling) -> Sampling:
    """With as many new tokens as their log-probabilities allow, for who has not said how many.

    Example:
        >>> asked = Sampling(max_new_tokens=131072, return_logprob=True, top_logprobs_num=20, n=2)
        >>> within_logprobs(asked).max_new_tokens
        99864
    """
    most = MAX_LOGPROBS // max(1, most_logprobs(sampling, 0, 1))
    return msgspec.structs.replace(sampling, max_new_tokens=max(1, min(sampling.max_new_tokens, most)))


def check_logprobs(num: int) -> None:
    """Raise `InvalidParameter` where a request may have more than `MAX_LOGPROBS`."""
    if num > MAX_LOGPROBS:
        raise InvalidParameter(
            f"the request asks for up to {num} log-probabilities; at most {MAX_LOGPROBS} are given at a time",
            hint="lower max_tokens, n or the number of logprobs, or send fewer prompts at a time",
            param="logprobs",
        )


def num_logprobs(value: ValueEvent) -> int:
    """How many a value has, alternatives included."""
    entries = value.logprobs or value.prompt_logprobs
    width = 1 + len(entries[-1].top) + len(entries[-1].given) if entries else 0
    return width * (len(value.logprobs) + len(value.prompt_logprobs))


def token_text(renderer: ModelRenderer, token_id: int) -> tuple[str, list[int]]:
    """A token's text and its bytes."""
    data = renderer.tokenizer.token_bytes(token_id, skip_special_tokens=False)
    try:
        return data.decode(), list(data)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data)


class _Texts(dict[int, tuple[str, list[int]]]):
    """`token_text` of the tokens of an answer, each made once: alternatives come again and again."""

    def __init__(self, renderer: ModelRenderer) -> None:
        super().__init__()
        self._renderer = renderer

    def __missing__(self, token_id: int) -> tuple[str, list[int]]:
        found = self[token_id] = token_text(self._renderer, token_id)
        return found


def chat_logprobs(entries: Sequence[TokenLogprob], renderer: ModelRenderer) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    texts = _Texts(renderer)
    return {
        "content": [
            {
                **_entry(texts, each.token_id, each.logprob),
                "top_logprobs": [_entry(texts, *top) for top in each.top],
            }
            for each in entries
        ],
        "refusal": None,
    }


def _entry(texts: _Texts, token_id: int, logprob: float | None) -> dict[str, Any]:
    text, data = texts[token_id]
    return {"token": text, "logprob": _finite(logprob), "bytes": data}


class Offsets:
    """Where tokens begin in a text, one after the other; one within a character begins where the character does.

    Example:
        >>> offsets = Offsets(3)
        >>> [offsets.of(data) for data in (b"a", "é".encode()[:1], "é".encode()[1:], b"b")]
        [3, 4, 4, 5]
    """

    def __init__(self, start: int = 0) -> None:
        self._next = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, data: bytes) -> int:
        """The offset of the next token, which has these bytes."""
        at = self._next
        self._next += len(self._decoder.decode(data))
        return at


def text_logprobs(entries: Sequence[TokenLogprob], renderer: ModelRenderer, places: Offsets) -> dict[str, Any]:
    """`choices[].logprobs` of a text completion; `places` go on from one call to the next."""
    texts = _Texts(renderer)
    tokens, offsets, logprobs, tops = [], [], [], []
    for each in entries:
        text, data = texts[each.token_id]
        tokens.append(text)
        offsets.append(places.of(bytes(data)))
        logprobs.append(None if each.logprob is None else _finite(each.logprob))
        tops.append(
            None if each.logprob is None else {texts[token_id][0]: _finite(logprob) for token_id, logprob in each.top}
        )
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def _finite(logprob: float | None) -> float:
    return _LOWEST if logprob is None or logprob < _LOWEST else logprob
