"""A closed list of options, decoded token by token, without a grammar engine.

Owns the matcher of `Choices`: a trie over the UTF-8 bytes of the options, walked by the bytes of tokens. Called by
`sgl.grammars.compiler`. The vocabulary is given as bytes per token id, so nothing here knows a tokenizer library.

Any split of an option into tokens is allowed; `forced_tokens` names the canonical one. Special tokens and padding have
no bytes and are never allowed, except end of sequence where an option is complete. A mask costs one dictionary look-up
per byte that can follow, is kept for the nodes of the trie that were looked at last, and is shared by all matchers of
one grammar.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from sgl.errors import InvalidConstraint
from sgl.grammars.matcher import Bitmask, StopReason, bitmask_words, num_acceptable

_MAX_ROWS = 1024
"""Rows of one list of options that are kept: 6 MB of them with 49,152 tokens."""


class Vocabulary:
    """The byte strings of a tokenizer's tokens, looked up both ways.

    Args:
        token_bytes: bytes of each ordinary token id. Special tokens, padding and empty tokens are left out.
        vocab_size: number of logits of the model; may be larger than the tokenizer's vocabulary.
        eos_ids: ids that end a sequence.
        encode: canonical tokenization of bytes.
        specials: special tokens but those that end a sequence: text -> id. They are in no text that is constrained.

    Attributes:
        covers_bytes: whether every byte that occurs in UTF-8 is a token of its own; then no text is unreachable.

    Example:
        >>> vocabulary = Vocabulary({0: b"a", 1: b"b"}, 3, [2], lambda text: [byte - 97 for byte in text])
        >>> vocabulary.ids[b"b"], vocabulary.covers_bytes
        ([1], False)
    """

    def __init__(
        self,
        token_bytes: Mapping[int, bytes],
        vocab_size: int,
        eos_ids: Iterable[int],
        encode: Callable[[bytes], list[int]],
        specials: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.vocab_size = vocab_size
        self.specials = dict(specials)
        self.eos_ids = frozenset(eos_ids)
        self.encode = encode
        self.token_bytes = {
            token_id: text
            for token_id, text in token_bytes.items()
            if text and 0 <= token_id < vocab_size and token_id not in self.eos_ids
        }
        self.ids: dict[bytes, list[int]] = {}
        for token_id, text in self.token_bytes.items():
            self.ids.setdefault(text, []).append(token_id)
        self.max_token_bytes = max((len(text) for text in self.ids), default=0)
        utf8 = [byte for byte in range(0xF5) if byte not in (0xC0, 0xC1)]
        self.covers_bytes = all(bytes([byte]) in self.ids for byte in utf8)
        self.eos_row = row_of(self.eos_ids, vocab_size)
        self.token_row = row_of(self.token_bytes, vocab_size)
        self._rows_of_first: dict[frozenset[int], Bitmask] = {}

    def row_of_first(self, first: frozenset[int]) -> Bitmask:
        """The bitmask row of the tokens whose first byte is one of `first`, made once; not to be changed."""
        if first not in self._rows_of_first:
            ids = (token_id for token_id, text in self.token_bytes.items() if text[0] in first)
            self._rows_of_first[first] = row_of(ids, self.vocab_size)
        return self._rows_of_first[first]


def row_of(token_ids: Iterable[int], vocab_size: int) -> Bitmask:
    """One bitmask row, shape `[bitmask_words(vocab_size)]`, that allows exactly `token_ids`.

    Example:
        >>> row_of([0, 33], 40).tolist()
        [1, 2]
    """
    bits = np.zeros(bitmask_words(vocab_size) * 32, dtype=np.uint8)
    bits[[token_id for token_id in token_ids if 0 <= token_id < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def write_row(bitmask: Bitmask, row: int, words: Bitmask) -> None:
    """Write `words` into a row that may be wider; what lies beyond the vocabulary is not allowed."""
    bitmask[row, : len(words)] = words
    bitmask[row, len(words) :] = 0


class ChoicesGrammar:
    """The options compiled for one vocabulary.

    Raises:
        InvalidConstraint: no options.
    """

    def __init__(self, options: Sequence[str], vocabulary: Vocabulary) -> None:
        if not options:
            raise InvalidConstraint("choices is empty", hint="give at least one option")
        self.vocabulary = vocabulary
        self.options = sorted({option.encode("utf-8") for option in options})
        # A node of the trie is a prefix: the index of the first option that begins with it, and its length.
        self._rows: dict[tuple[int, int], Bitmask] = {}  # the last ones that were made

    def matcher(self) -> ChoicesMatcher:
        """A new matcher at the start."""
        return ChoicesMatcher(self, (b"",), ended=0)

    def follow(self, prefix: bytes) -> list[bytes]:
        """The options that begin with `prefix`."""
        # 0xFF occurs in no UTF-8 text, so it sorts behind every continuation of the prefix.
        return self.options[bisect_left(self.options, prefix) : bisect_left(self.options, prefix + b"\xff")]

    def row(self, prefix: bytes) -> Bitmask:
        """Bitmask row after `prefix`, which begins an option."""
        options = self.follow(prefix)
        key = (bisect_left(self.options, prefix), len(prefix))
        known = self._rows.get(key)
        if known is None:
            allowed: set[int] = set()
            for option in options:
                rest = option[len(prefix) :][: self.vocabulary.max_token_bytes]
                for end in range(1, len(rest) + 1):
                    allowed.update(self.vocabulary.ids.get(rest[:end], ()))
            if options[0] == prefix:
                allowed |= self.vocabulary.eos_ids
            known = row_of(allowed, self.vocabulary.vocab_size)
            while len(self._rows) >= _MAX_ROWS:
                self._rows.pop(next(iter(self._rows)), None)  # another thread may have
            self._rows[key] = known
        return known


class ChoicesMatcher:
    """Follows one sequence through the options. Keeps the prefix after each accepted token, for `rollback`."""

    def __init__(self, grammar: ChoicesGrammar, prefixes: Sequence[bytes], ended: int) -> None:
        self._grammar = grammar
        self._prefixes = list(prefixes)
        self._ended = ended

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """See `Matcher.fill`."""
        vocabulary = self._grammar.vocabulary
        write_row(bitmask, row, vocabulary.eos_row if self._ended else self._grammar.row(self._prefixes[-1]))

    def accept(self, token_id: int) -> bool:
        """See `Matcher.accept`."""
        if token_id in self._grammar.vocabulary.eos_ids:
            if not self.is_complete():
                return False
            self._ended += 1
            self._prefixes.append(self._prefixes[-1])
            return True
        text = self._grammar.vocabulary.token_bytes.get(token_id)
        if text is None or self._ended or not self._grammar.follow(self._prefixes[-1] + text):
            return False
        self._prefixes.append(self._prefixes[-1] + text)
        return True

    def validate_tokens(self, token_ids: Sequence[int]) -> int:
        """See `Matcher.validate_tokens`."""
        return num_acceptable(self, token_ids)

    def rollback(self, num_tokens: int) -> None:
        """See `Matcher.rollback`.

        Raises:
            ValueError: more tokens than were accepted.
        """
        if not 0 <= num_tokens < len(self._prefixes):
            raise ValueError(f"rollback of {num_tokens} tokens; {len(self._prefixes) - 1} were accepted")
        del self._prefixes[len(self._prefixes) - num_tokens :]
        self._ended = max(0, self._ended - num_tokens)

    def clone(self) -> ChoicesMatcher:
        """See `Matcher.clone`."""
        return ChoicesMatcher(self._grammar, self._prefixes, self._ended)

    def forced_tokens(self) -> list[int]:
        """See `Matcher.forced_tokens`: the tokens in which all options that can follow agree."""
        prefix = self._prefixes[-1]
        if self._ended or self.is_complete():
            return []
        vocabulary = self._grammar.vocabulary
        forced: list[int] | None = None
        for option in self._grammar.follow(prefix):
            tokens = vocabulary.encode(option[len(prefix) :])
            if forced is None:
                forced = tokens
            same = [a == b for a, b in zip(forced, tokens, strict=False)]
            forced = forced[: same.index(False) if False in same else len(same)]
            if not forced:
                break
        forced = forced or []
        return forced[: self.validate_tokens(forced)]

    def is_complete(self) -> bool:
        """See `Matcher.is_complete`."""
        return self._grammar.follow(self._prefixes[-1])[0] == self._prefixes[-1]

    def stop_reason(self) -> StopReason:
        """See `Matcher.stop_reason`."""
        if self._ended:
            return StopReason.EOS
        options = self._grammar.follow(self._prefixes[-1])
        if self.is_complete():
            if len(options) == 1:
                return StopReason.COMPLETE
            if self._grammar.vocabulary.covers_bytes:
                return StopReason.NOT_STOPPED
        row = self._grammar.row(self._prefixes[-1])
        if (row & ~self._grammar.vocabulary.eos_row).any():
            return StopReason.NOT_STOPPED
        return StopReason.COMPLETE if self.is_complete() else StopReason.DEAD_END
