"""Tokens to text, one at a time: what may be shown now, where a stop string ended it, and which tokens to keep.

Owns the text side of one running generation. The worker makes one `StreamDecoder` per generation, pushes every
generated token and rewinds the state with `tokens_for_text` when a stop ends inside a token. Works on token bytes;
what a stop is, `stops.py` says.

Invariants:

* The pushes and `finish` put together are exactly `text`; nothing shown is ever taken back.
* A character is shown only when all its bytes are there; text that may be the beginning of a stop is held.
* The result does not depend on how the text is cut into tokens.

Bytes that are not UTF-8 become one U+FFFD for each malformed sequence; nothing here raises on a model's output, except
`ConstraintTooComplex` from a stop pattern that takes too long.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

from sgl.limits import DEFAULT_LIMITS, Limits
from sgl.runtime.text.stops import StopMatch, StopSearch


class TokenBytes(Protocol):
    """What the decoder needs of a tokenizer."""

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        """Bytes of a token; empty for special tokens that are skipped."""
        ...


class StreamDecoder:
    """Incremental decoder of one generation.

    The stop that is completed first wins; of several that end at the same character, the longest. This is what a
    reader of the characters would do, so it does not depend on token boundaries.

    Args:
        tokenizer: source of token bytes.
        skip_special_tokens: special tokens have no text (they have their name otherwise).
        stop, stop_regex: non-empty stop strings, and checked patterns.
        keep_stop: the matched stop belongs to the text (it is trimmed otherwise).
        min_tokens: stops are not looked for in the text of the tokens before so many exist.
        limits: bounds the time of patterns.
        skip_bytes: that the first tokens have before the text begins.

    Attributes:
        finished_by: the text of the stop that ended it, or `None`. Tokens pushed afterwards are ignored.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        stop: Sequence[str] = (),
        stop_regex: Sequence[str] = (),
        *,
        keep_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        limits: Limits = DEFAULT_LIMITS,
        skip_bytes: int = 0,
    ) -> None:
        self._skip_bytes = skip_bytes
        self.finished_by: str | None = None
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stops = StopSearch(stop, stop_regex, limits)
        self._keep_stop = keep_stop
        self._min_tokens = min_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""  # all characters so far
        self._num_shown = 0
        self._match: StopMatch | None = None
        self._done = False
        self._num_tokens = 0
        # Token boundaries that are also character boundaries: tokens and characters before each, both ascending.
        self._boundary_tokens = [0]
        self._boundary_chars = [0]

    @property
    def has_stops(self) -> bool:
        """Whether anything but the end of the tokens may end the text."""
        return bool(self._stops)

    @property
    def num_tokens(self) -> int:
        """Tokens pushed until the text was finished."""
        return self._num_tokens

    @property
    def text(self) -> str:
        """The text shown so far; once finished, the whole text."""
        return self._text[: self._num_shown]

    def push(self, token_id: int) -> str:
        """Add a token; the text that became final with it (often empty)."""
        if self._done:
            return ""
        self._num_tokens += 1
        data = self._bytes(token_id)
        new = self._utf8.decode(data[self._skip_bytes :])
        self._skip_bytes -= min(len(data), self._skip_bytes)
        seen = len(self._text)
        self._text += new
        if not self._utf8.getstate()[0]:
            self._boundary_tokens.append(self._num_tokens)
            self._boundary_chars.append(len(self._text))
        return self._release(seen) if new else ""

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Add tokens one after another; the text that became final with them."""
        if self._stops or self._skip_bytes:
            return "".join(map(self.push, token_ids))
        if self._done:
            return ""
        utf8, length = self._utf8, len(self._text)
        pieces: list[str] = []
        for number, token_id in enumerate(token_ids, start=self._num_tokens + 1):
            piece = utf8.decode(self._bytes(token_id))
            pieces.append(piece)
            length += len(piece)
            if not utf8.getstate()[0]:
                self._boundary_tokens.append(number)
                self._boundary_chars.append(length)
        self._num_tokens += len(token_ids)
        self._text += "".join(pieces)
        return self._show(length)

    def finish(self) -> str:
        """End the text; what was held back. Incomplete bytes become one U+FFFD. A second call returns nothing."""
        if self._done:
            return ""
        rest = self._utf8.decode(b"", final=True)
        seen = len(self._text)
        self._text += rest
        shown = self._release(seen) if rest else ""
        if not self._done:
            self._done = True
            shown += self._show(len(self._text))
        return shown

    def trim(self, keep_stop: bool) -> str:
        """The text with or without the stop that ended it, whatever `keep_stop` was at construction."""
        if self._match is None:
            return self.text
        return self._text[: self._match.end if keep_stop else self._match.begin]

    def tokens_for_text(self, length: int) -> tuple[int, str]:
        """How to keep the first `length` characters: (leading tokens, text left over).

        The tokens are the most that lie wholly inside these characters and end at a character boundary; the text left
        over is what they lack, to be encoded anew. Both halves together are `trim(True)[:length]`.
        """
        index = bisect_right(self._boundary_chars, length) - 1
        return self._boundary_tokens[index], self.trim(True)[self._boundary_chars[index] : length]

    def _bytes(self, token_id: int) -> bytes:
        if self._skip_special_tokens:
            return self._tokenizer.token_bytes(token_id)
        return self._tokenizer.token_bytes(token_id, skip_special_tokens=False)

    def _release(self, seen: int) -> str:
        """Show what can be shown; `seen` characters were there before."""
        if not self._stops or self._num_tokens < self._min_tokens:
            return self._show(len(self._text))
        # Shown text cannot be part of a match: it was shown because no stop could begin in it.
        match, hold = self._stops.look(self._text, self._num_shown, seen)
        if match is None:
            return self._show(hold)
        self._match, self._done = match, True
        self.finished_by = self._text[match.begin : match.end]
        return self._show(match.end if self._keep_stop else match.begin)

    def _show(self, end: int) -> str:
        new = self._text[self._num_shown : end]
        self._num_shown = end
        return new
