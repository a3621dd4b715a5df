"""Tokens to text, one at a time: what may be shown now, where a stop string ended it, and which tokens to keep.

Owns the text side of one running generation. The worker makes one `StreamDecoder` per generation, pushes every
generated token and rewinds the state with `tokens_for_text` when a stop string ends inside a token. Works on token
bytes, so the cost of a push does not grow with the output.

Invariants:

* The pushes and `finish` put together are exactly `text`; nothing shown is ever taken back.
* A character is shown only when all its bytes are there; text that may be the beginning of a stop string is held.
* The result does not depend on how the text is cut into tokens.

Bytes that are not UTF-8 become one U+FFFD for each malformed sequence; nothing here raises on a model's output.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """What the decoder needs of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token; empty for special tokens."""
        ...


class StreamDecoder:
    """Incremental decoder of one generation.

    The stop string that is completed first wins; of several that end at the same character, the longest. This is
    what a reader of the characters would do, so it does not depend on token boundaries.

    Args:
        tokenizer: source of token bytes.
        stop: non-empty stop strings.
        keep_stop: the matched stop string belongs to the text (it is trimmed otherwise).
        min_tokens: stop strings are not looked for in the text of the tokens before so many exist.

    Attributes:
        finished_by: the stop string that ended the text, or `None`. Tokens pushed afterwards are ignored.
    """

    def __init__(
        self, tokenizer: TokenBytes, stop: Sequence[str] = (), *, keep_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self.finished_by: str | None = None
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._stop_starts = frozenset(text[0] for text in self._stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._keep_stop = keep_stop
        self._min_tokens = min_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._shown: list[str] = []
        self._held = ""
        self._done = False
        self._num_tokens = 0
        self._num_chars = 0
        # Token boundaries that are also character boundaries: tokens and characters before each, both ascending.
        self._boundary_tokens = [0]
        self._boundary_chars = [0]

    @property
    def num_tokens(self) -> int:
        """Tokens pushed until the text was finished."""
        return self._num_tokens

    @property
    def text(self) -> str:
        """The text shown so far; once finished, the whole text."""
        return "".join(self._shown)

    def push(self, token_id: int) -> str:
        """Add a token; the text that became final with it (often empty)."""
        if self._done:
            return ""
        self._num_tokens += 1
        new = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._num_chars += len(new)
        if not self._utf8.getstate()[0]:
            self._boundary_tokens.append(self._num_tokens)
            self._boundary_chars.append(self._num_chars)
        return self._release(new) if new else ""

    def finish(self) -> str:
        """End the text; what was held back. Incomplete bytes become one U+FFFD. A second call returns nothing."""
        if self._done:
            return ""
        rest = self._utf8.decode(b"", final=True)
        self._num_chars += len(rest)
        shown = self._release(rest) if rest else ""
        if not self._done:
            self._done = True
            shown += self._held
            self._show(self._held)
            self._held = ""
        return shown

    def trim(self, keep_stop: bool) -> str:
        """The text with or without the stop string that ended it, whatever `keep_stop` was at construction."""
        text = self.text
        if self.finished_by is None or keep_stop == self._keep_stop:
            return text
        return text + self.finished_by if keep_stop else text[: -len(self.finished_by)]

    def tokens_for_text(self, length: int) -> tuple[int, str]:
        """How to keep the first `length` characters: (leading tokens, text left over).

        The tokens are the most that lie wholly inside these characters and end at a character boundary; the text left
        over is what they lack, to be encoded anew. Both halves together are `trim(True)[:length]`.
        """
        index = bisect_right(self._boundary_chars, length) - 1
        return self._boundary_tokens[index], self.trim(True)[self._boundary_chars[index] : length]

    def _release(self, new: str) -> str:
        text = self._held + new
        if not self._stop or self._num_tokens < self._min_tokens:
            return self._show(text)
        match = self._first_stop(text)
        if match is not None:
            end, self.finished_by = match
            self._done = True
            self._held = ""
            return self._show(text[:end] if self._keep_stop else text[: end - len(self.finished_by)])
        hold = self._hold_from(text)
        self._held = text[hold:]
        return self._show(text[:hold])

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        # Shown text cannot be part of a match: it was shown because no stop string could begin in it.
        best: tuple[int, str] | None = None
        for stop in self._stop:
            start = text.find(stop)
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or end < best[0] or (end == best[0] and len(stop) > len(best[1])):
                best = (end, stop)
        return best

    def _hold_from(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest_stop + 1), len(text)):
            if text[start] in self._stop_starts:
                tail = text[start:]
                if any(stop.startswith(tail) for stop in self._stop):
                    return start
        return len(text)
