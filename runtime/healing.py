"""Token healing: where text written by a program meets a generation, the last token of the text may be drawn anew.

Owns the look for such a seam and what may be drawn there. A prompt that ends with `http:` has the token `:` at its end,
after which a model hardly ever writes `//`: in its training text the token was `://`. So the last token is taken out of
the state, and the first token that is drawn must begin with its text; it may be the same token again. Called by a
program run, off the step loop. Text that the chat template wrote and generated text are left alone.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from sgl.grammars.choices import row_of, write_row
from sgl.grammars.matcher import Bitmask, CompiledGrammar, Matcher, bitmask_to_bool, bitmask_words
from sgl.runtime.text.tokenizer import Tokenizer


class Seam:
    """What may be drawn at a seam.

    Args:
        text: of the token that is drawn anew (`token_id`), which the drawn token begins with.
        rests: token that may be drawn -> the token of what it has after `text`, which the constraint sees; `None` when
            that is nothing, or when there is no constraint.
        vocab_size: of the tokenizer.
    """

    def __init__(self, text: str, token_id: int, rests: Mapping[int, int | None], vocab_size: int) -> None:
        self.text = text
        self.token_id = token_id
        self.rests = rests
        self._row: Bitmask = row_of(rests, vocab_size)

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """See `MaskSource.fill`."""
        write_row(bitmask, row, self._row)

    def accepts(self, token_id: int, matcher: Matcher | None) -> bool:
        """Whether a token may be drawn here; the constraint goes on with what it has after the seam."""
        if token_id not in self.rests:
            return False
        rest = self.rests[token_id]
        return rest is None or matcher is None or matcher.accept(rest)


def find_seam(tokenizer: Tokenizer, token_ids: Sequence[int], grammar: CompiledGrammar | None) -> Seam | None:
    """The seam after text that was encoded as `token_ids`; `None` where no longer token begins with the last one.

    Under a constraint, a token is allowed when what it has after the seam is a token that may come first.

    Example:
        >>> find_seam(Tokenizer.toy(), [97], None) is None  # a vocabulary of single bytes
        True
    """
    if not token_ids:
        return None
    prefix = tokenizer.token_bytes(token_ids[-1])
    try:
        text = prefix.decode()
    except UnicodeDecodeError:
        return None  # it begins inside a character
    if not text:
        return None  # a special token
    index = _index(tokenizer)
    longer = [(token_id, rest) for token_id, rest in index.beginning_with(prefix) if rest]
    rests: dict[int, int | None]
    if grammar is None:
        rests = {token_id: None for token_id, _ in longer}
    else:
        row = np.zeros((1, bitmask_words(tokenizer.vocab_size)), dtype=np.int32)
        grammar.matcher().fill(row, 0)
        allowed = bitmask_to_bool(row, tokenizer.vocab_size)[0]
        found = ((token_id, index.ids.get(rest)) for token_id, rest in longer)
        rests = {token_id: rest for token_id, rest in found if rest is not None and allowed[rest]}
    return Seam(text, token_ids[-1], {token_ids[-1]: None, **rests}, tokenizer.vocab_size) if rests else None


class _Index:
    """The ordinary tokens of a tokenizer in the order of their bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = ((tokenizer.token_bytes(token_id), token_id) for token_id in range(tokenizer.vocab_size))
        self._sorted = sorted(entry for entry in texts if entry[0])
        self.ids = dict(reversed(self._sorted))

    def beginning_with(self, prefix: bytes) -> Iterator[tuple[int, bytes]]:
        """Tokens that begin with `prefix`, and what they have after it."""
        for index in range(bisect_left(self._sorted, (prefix, -1)), len(self._sorted)):
            text, token_id = self._sorted[index]
            if not text.startswith(prefix):
                return
            yield token_id, text[len(prefix) :]


_INDEXES: weakref.WeakKeyDictionary[Tokenizer, _Index] = weakref.WeakKeyDictionary()


def _index(tokenizer: Tokenizer) -> _Index:
    if tokenizer not in _INDEXES:
        _INDEXES[tokenizer] = _Index(tokenizer)
    return _INDEXES[tokenizer]
