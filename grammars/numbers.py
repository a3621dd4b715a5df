"""A bound on the length of numbers in JSON, which no schema keyword sets.

Owns a matcher around another one. Called by `sgl.grammars.compiler` for JSON schemas: a model that falls into a loop of
digits would else write them until its budget ends. A number that has reached `max_len` characters (its last token may
step over), or two digits of its exponent (three of a negative one), does not go on, unless nothing else can follow: a
longer constant, an exponent that has only begun, a number that is no multiple yet (`multipleOf`). So values are finite
as floats of 64 bits. Everything else is the inner matcher's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from sgl.grammars.choices import Vocabulary, row_of, write_row
from sgl.grammars.matcher import Bitmask, CompiledGrammar, Matcher, StopReason, num_acceptable

_DIGITS = frozenset(b"0123456789")
_EXPONENT_DIGITS = 2
"""A float of 64 bits has three, of which the largest are infinite. Negative ones may have all three."""
_FULL = 2 + _EXPONENT_DIGITS
_NUMBER = frozenset(b"0123456789+-.eE")


class Place(NamedTuple):
    """Where in JSON the text ends."""

    in_string: bool = False
    escaped: bool = False
    number_len: int = 0
    after_digit: bool = False
    exponent_len: int = 0  # 0 before its `e`; from there 2 and the number of digits, less 1 for a minus

    def after(self, text: bytes) -> Place:
        """The place behind more text.

        Example:
            >>> Place().after(b'{"1":-12').number_len
            3
        """
        in_string, escaped, length, digit, exponent = self
        if in_string and not escaped and b'"' not in text and b"\\" not in text:
            return self
        for byte in text:
            if in_string:
                in_string = escaped or byte != 0x22
                escaped = not escaped and byte == 0x5C
                continue
            digit = byte in _DIGITS
            length = length + 1 if digit or (byte in _NUMBER and (length or byte == 0x2D)) else 0
            if exponent and length:
                exponent += digit - (byte == 0x2D)
            else:
                exponent = 2 if length and byte in b"eE" else 0
            in_string = byte == 0x22
        return Place(in_string, escaped, length, digit, exponent)


class BoundedNumbers:
    """A compiled grammar whose matchers end numbers of `max_len` characters."""

    def __init__(self, inner: CompiledGrammar, vocabulary: Vocabulary, max_len: int) -> None:
        self.inner = inner
        self.vocabulary = vocabulary
        self.max_len = max_len
        self.going_on = vocabulary.row_of_first(_NUMBER)
        self._too_long: dict[int, Bitmask] = {}

    def too_long(self, exponent_len: int) -> Bitmask:
        """The tokens by which an exponent gets more digits than it may; see `Place.exponent_len`."""
        if exponent_len not in self._too_long:
            lead = b"" if exponent_len else rb"[0-9.]*[eE]"
            over = _FULL + 1 - (exponent_len or 2)
            more = re.compile(lead + rb"(?:\+?[0-9]{%d,}|-[0-9]{%d,})" % (over, over + 1))
            self._too_long[exponent_len] = row_of(
                (token_id for token_id, text in self.vocabulary.token_bytes.items() if more.match(text)),
                self.vocabulary.vocab_size,
            )
        return self._too_long[exponent_len]

    def matcher(self) -> BoundedMatcher:
        """A new matcher at the start."""
        return BoundedMatcher(self, self.inner.matcher(), [Place()])


class BoundedMatcher:
    """Follows one sequence; `places` holds where it was after each token, for `rollback`."""

    def __init__(self, grammar: BoundedNumbers, inner: Matcher, places: list[Place]) -> None:
        self._grammar = grammar
        self.inner = inner
        self._places = places

    @property
    def has_row_of_inner(self) -> bool:
        """Whether nothing is excluded here."""
        return self._excluded() is None

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """See `Matcher.fill`."""
        self.inner.fill(bitmask, row)
        excluded = self._excluded()
        if excluded is not None:
            shorter = bitmask[row, : len(excluded)] & ~excluded
            if shorter.any():
                write_row(bitmask, row, shorter)

    def accept(self, token_id: int) -> bool:
        """See `Matcher.accept`."""
        excluded = self._excluded()
        if excluded is not None and _holds(excluded, token_id) and not self._allows(token_id):
            return False
        if not self.inner.accept(token_id):
            return False
        text = self._grammar.vocabulary.token_bytes.get(token_id, b"")
        self._places.append(self._places[-1].after(text))
        return True

    def validate_tokens(self, token_ids: Sequence[int]) -> int:
        """See `Matcher.validate_tokens`."""
        return num_acceptable(self, token_ids)

    def rollback(self, num_tokens: int) -> None:
        """See `Matcher.rollback`.

        Raises:
            ValueError: more tokens than were accepted.
        """
        self.inner.rollback(num_tokens)
        del self._places[len(self._places) - num_tokens :]

    def clone(self) -> BoundedMatcher:
        """See `Matcher.clone`."""
        return BoundedMatcher(self._grammar, self.inner.clone(), list(self._places))

    def forced_tokens(self) -> list[int]:
        """See `Matcher.forced_tokens`."""
        return self.inner.forced_tokens()

    def is_complete(self) -> bool:
        """See `Matcher.is_complete`."""
        return self.inner.is_complete()

    def stop_reason(self) -> StopReason:
        """See `Matcher.stop_reason`."""
        stop = self.inner.stop_reason()
        if stop is StopReason.NOT_STOPPED and self._is_full():
            onward = self._row() & ~self._grammar.vocabulary.eos_row
            return StopReason.NOT_STOPPED if onward.any() else StopReason.COMPLETE
        return stop

    def _excluded(self) -> Bitmask | None:
        """What may not follow here unless nothing else can."""
        place = self._places[-1]
        if place.in_string or not place.number_len:
            return None
        return self._grammar.going_on if self._is_full() else self._grammar.too_long(place.exponent_len)

    def _is_full(self) -> bool:
        place = self._places[-1]
        is_long = place.number_len >= self._grammar.max_len or place.exponent_len >= _FULL
        return is_long and place.after_digit

    def _row(self) -> Bitmask:
        bitmask = self._grammar.going_on[None].copy()
        self.fill(bitmask, 0)
        row: Bitmask = bitmask[0]
        return row

    def _allows(self, token_id: int) -> bool:
        inside = 0 <= token_id < self._grammar.vocabulary.vocab_size
        return inside and _holds(self._row(), token_id)


def _holds(row: Bitmask, token_id: int) -> bool:
    return 0 <= token_id // 32 < len(row) and bool(row[token_id // 32] >> (token_id % 32) & 1)
