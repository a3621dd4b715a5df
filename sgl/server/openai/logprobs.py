"""Log-probabilities in the two shapes of OpenAI's API.

Owns the texts of tokens: a token that is part of a character is shown as its bytes, `bytes:\\xNN`, as OpenAI does.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from sgl.lang.graph import TokenLogprob
from sgl.runtime.rendering import ModelRenderer

_LOWEST = -9999.0
"""For a token of probability zero: JSON has no infinity."""


def token_text(renderer: ModelRenderer, token_id: int) -> tuple[str, list[int]]:
    """A token's text and its bytes."""
    data = renderer.tokenizer.token_bytes(token_id, skip_special_tokens=False)
    try:
        return data.decode(), list(data)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data)


def chat_logprobs(entries: Sequence[TokenLogprob], renderer: ModelRenderer) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    return {
        "content": [
            {
                **_entry(renderer, each.token_id, each.logprob),
                "top_logprobs": [_entry(renderer, *top) for top in each.top],
            }
            for each in entries
        ],
        "refusal": None,
    }


def _entry(renderer: ModelRenderer, token_id: int, logprob: float | None) -> dict[str, Any]:
    text, data = token_text(renderer, token_id)
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
    tokens, offsets, logprobs, tops = [], [], [], []
    for each in entries:
        text, data = token_text(renderer, each.token_id)
        tokens.append(text)
        offsets.append(places.of(bytes(data)))
        logprobs.append(None if each.logprob is None else _finite(each.logprob))
        tops.append(
            None
            if each.logprob is None
            else {token_text(renderer, token_id)[0]: _finite(logprob) for token_id, logprob in each.top}
        )
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def _finite(logprob: float | None) -> float:
    return _LOWEST if logprob is None or logprob < _LOWEST else logprob
