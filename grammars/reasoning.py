"""A constraint that begins after the model's reasoning, and the budget of that reasoning.

Owns a matcher around another one (or around none, for a budget alone). Called by the runtime through
`GrammarCompiler.after_reasoning`; which models reason how is told by `sgl.grammars.formats`.

The text is free until it begins with the marker that opens reasoning, or from its beginning on when the prompt has
opened it; text that begins otherwise has no reasoning, and the constraint holds from its beginning on. Inside, end of
sequence and excluded tokens do not come, so the constraint is never lost. At the budget only the marker that ends the
reasoning can come, so the cap is exact to the token. Behind it up to two line ends are free, as models write them; then
the inner matcher begins. Markers are found in the bytes of the text, however they are split into tokens; a token that
would end the reasoning and go on with anything but line ends is not allowed, for it would get past the constraint.

Without an inner matcher everything is free behind the reasoning, end-of-sequence tokens included.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import msgspec
import numpy as np

from sgl.grammars.choices import Vocabulary, row_of, write_row
from sgl.grammars.matcher import Bitmask, CompiledGrammar, Matcher, StopReason, num_acceptable

_MAX_GAP = 2
"""Line ends between reasoning and answer."""


class Reasoning(msgspec.Struct, frozen=True):
    """How the reasoning of one generation is held.

    Args:
        begin, end: the markers.
        is_open: the prompt has opened it.
        max_tokens: of the reasoning, its markers not counted; `None` is unlimited.
        excludes: texts of tokens that must not come inside.
    """

    begin: str
    end: str
    is_open: bool = False
    max_tokens: int | None = None
    excludes: tuple[str, ...] = ()


class _Phase(Enum):
    BEFORE = 0  # it may still begin
    INSIDE = 1
    GAP = 2  # behind it, with nothing but line ends yet
    AFTER = 3


class _Place(NamedTuple):
    """Where a text is.

    Attributes:
        matched: bytes of the marker looked for that the text ends with.
        num_tokens: of the reasoning, those of an end marker that the model wrote included.
        num_ends: line ends behind it.
        num_inner: tokens that the inner matcher has taken.
        has_reasoned: reasoning has come; else the inner matcher's tokens are those from the beginning on.
        inner_lives: the inner matcher has taken every token so far.
    """

    phase: _Phase
    matched: int = 0
    num_tokens: int = 0
    num_ends: int = 0
    num_inner: int = 0
    has_reasoned: bool = False
    inner_lives: bool = True


class _End:
    """The marker that ends reasoning, looked for byte by byte."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.borders = [0]  # of each beginning: the longest that it ends with
        for size in range(1, len(text)):
            border = self.borders[-1]
            while border and text[border] != text[size]:
                border = self.borders[border - 1]
            self.borders.append(border + (text[border] == text[size]))

    def follow(self, matched: int, text: bytes) -> tuple[int, bytes | None]:
        """Bytes matched after more text, and what comes behind the marker if it is complete."""
        for index, byte in enumerate(text):
            while matched and self.text[matched] != byte:
                matched = self.borders[matched - 1]
            matched += self.text[matched] == byte
            if matched == len(self.text):
                return matched, text[index + 1 :]
        return matched, None

    def completing(self, matched: int) -> list[bytes]:
        """Beginnings of texts that complete the marker first thing."""
        rests = [self.text[matched:]]
        while matched:
            matched = self.borders[matched - 1]
            rests.append(self.text[matched:])
        return rests


class ReasoningTables:
    """What one vocabulary has for one pair of markers; shared by generations, filled as it is needed."""

    def __init__(self, section: Reasoning, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.begin, self.end = section.begin.encode(), _End(section.end.encode())
        self.specials = {text.encode(): token_id for text, token_id in vocabulary.specials.items()}
        self.texts = {token_id: text for text, token_id in self.specials.items()}
        self.texts.update(vocabulary.token_bytes)
        size = vocabulary.vocab_size
        excluded = {i for text in section.excludes for i in self._ids(text.encode())} | vocabulary.eos_ids
        every = row_of(self.texts, size)
        self.everything = every | vocabulary.eos_row
        self.inside = every & ~row_of(excluded, size)
        self.line_ends = [
            row_of((i for i, text in self.texts.items() if _num_line_ends(text) in range(1, most + 1)), size)
            for most in range(_MAX_GAP + 1)
        ]
        self._overruns: dict[int, Bitmask] = {}
        self._beginnings: dict[int, Bitmask] = {}

    def _ids(self, text: bytes) -> list[int]:
        special = self.specials.get(text)  # what is left of a marker may begin within a character
        return [*self.vocabulary.ids.get(text, ()), *([special] if special is not None else [])]

    def begin_ids(self, matched: int) -> list[int]:
        """The tokens that complete the begin marker: one of its own, if there is one."""
        return self._completing(self.begin[matched:])

    def end_ids(self, matched: int) -> list[int]:
        """The tokens that complete the end marker: one of its own, if there is one."""
        return self._completing(self.end.text[matched:])

    def _completing(self, rest: bytes) -> list[int]:
        return self._ids(rest)[:1] or self.vocabulary.encode(rest)

    def without_overruns(self, matched: int) -> Bitmask:
        """The row inside, without tokens that end the reasoning and go on with something else than line ends."""
        if matched not in self._overruns:
            rests = tuple(self.end.completing(matched))
            marker = self.end.text
            bad = []
            for token_id, text in self.texts.items():
                if text.startswith(rests) or marker in text:
                    behind = self.end.follow(matched, text)[1]
                    if behind and not 0 < _num_line_ends(behind) <= _MAX_GAP:
                        bad.append(token_id)
            self._overruns[matched] = self.inside & ~row_of(bad, self.vocabulary.vocab_size)
        return self._overruns[matched]

    def beginning(self, matched: int) -> Bitmask:
        """The row of tokens that go on with the begin marker, or complete it."""
        if matched not in self._beginnings:
            rest = self.begin[matched:]
            ids = (i for i, text in self.texts.items() if text and (rest.startswith(text) or text.startswith(rest)))
            self._beginnings[matched] = row_of(ids, self.vocabulary.vocab_size)
        return self._beginnings[matched]


class ReasoningGrammar:
    """A compiled grammar that begins after reasoning; without one (`inner`) the reasoning alone is held."""

    def __init__(self, section: Reasoning, tables: ReasoningTables, inner: CompiledGrammar | None) -> None:
        self.section = section
        self.tables = tables
        self.inner = inner

    def matcher(self) -> ReasoningMatcher:
        """A new matcher at the start."""
        inner = self.inner.matcher() if self.inner is not None else None
        return ReasoningMatcher(self, inner, [_Place(_Phase.INSIDE if self.section.is_open else _Phase.BEFORE)], [])

    def completion(self, inner: Sequence[int] | None) -> tuple[int, ...] | None:
        """Tokens that complete a text from within its reasoning, from a completion of the inner grammar."""
        if inner is None:
            return None
        return (*(self.tables.end_ids(0) if self.section.is_open else ()), *inner)

    def answer(self, text: str) -> str:
        """What stands behind the reasoning of a text that was generated under this grammar."""
        # As the matcher sees it: before a marker white space is free only where no constraint is.
        start = text if self.inner is not None else text.lstrip()
        if not self.section.is_open and not start.startswith(self.section.begin):
            return text
        return text.partition(self.section.end)[2].lstrip("\n")


class ReasoningMatcher:
    """Follows one sequence. `places` has where it was after each of `token_ids`, and at the start."""

    def __init__(
        self, grammar: ReasoningGrammar, inner: Matcher | None, places: list[_Place], token_ids: list[int]
    ) -> None:
        self._grammar = grammar
        self._inner = inner
        self._places = places
        self._token_ids = token_ids
        self._row: Bitmask | None = None

    @property
    def place(self) -> _Place:
        """Where the text is now."""
        return self._places[-1]

    @property
    def inner(self) -> Matcher | None:
        """The matcher that the next row is taken from, if it is."""
        return None if self.place.phase is _Phase.INSIDE or not self.place.inner_lives else self._inner

    @property
    def has_row_of_inner(self) -> bool:
        """Whether the next row is that of `inner`, and nothing else."""
        return self.place.phase is _Phase.AFTER

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far."""
        return self.place.num_tokens

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """See `Matcher.fill`."""
        if self.place.phase is _Phase.AFTER and self._inner is not None:
            self._inner.fill(bitmask, row)
        else:
            write_row(bitmask, row, self._allowed())

    def accept(self, token_id: int) -> bool:
        """See `Matcher.accept`."""
        if self.place.phase is _Phase.AFTER and self._inner is not None:
            if not self._inner.accept(token_id):
                return False
            self._go(token_id, self.place._replace(num_inner=self.place.num_inner + 1))
            return True
        size = self._grammar.tables.vocabulary.vocab_size
        if not 0 <= token_id < size or not self._allowed()[token_id // 32] >> (token_id % 32) & 1:
            return False
        self._go(token_id, self._after(token_id))
        return True

    def validate_tokens(self, token_ids: Sequence[int]) -> int:
        """See `Matcher.validate_tokens`."""
        return num_acceptable(self, token_ids)

    def rollback(self, num_tokens: int) -> None:
        """See `Matcher.rollback`.

        Raises:
            ValueError: more tokens than were accepted.
        """
        if not 0 <= num_tokens <= len(self._token_ids):
            raise ValueError(f"rollback of {num_tokens} tokens; {len(self._token_ids)} were accepted")
        if num_tokens == 0:
            return
        old = self.place
        del self._places[len(self._places) - num_tokens :]
        del self._token_ids[len(self._token_ids) - num_tokens :]
        self._row = None
        new = self.place
        if self._inner is None:
            return
        if old.has_reasoned == new.has_reasoned:
            self._inner.rollback(max(0, old.num_inner - new.num_inner))
        else:  # back to where reasoning had not begun: what the inner matcher took there is gone
            self._inner.rollback(old.num_inner)
            old = _Place(_Phase.BEFORE)
        for token_id in self._token_ids[old.num_inner : new.num_inner]:
            self._inner.accept(token_id)

    def clone(self) -> ReasoningMatcher:
        """See `Matcher.clone`."""
        inner = self._inner.clone() if self._inner is not None else None
        return ReasoningMatcher(self._grammar, inner, list(self._places), list(self._token_ids))

    def forced_tokens(self) -> list[int]:
        """See `Matcher.forced_tokens`."""
        if self._is_spent():
            return self._grammar.tables.end_ids(self.place.matched)
        if self.place.phase is _Phase.AFTER and self._inner is not None:
            return self._inner.forced_tokens()
        return []

    def way_out(self) -> list[int]:
        """Tokens that end the reasoning, or what has begun to be its marker and can be nothing else; the constraint
        begins behind them. Empty where it has begun, or may begin as it is."""
        tables, place = self._grammar.tables, self.place
        if place.phase is _Phase.INSIDE:
            return tables.end_ids(place.matched)
        if place.phase is _Phase.BEFORE and not place.inner_lives:
            return [*tables.begin_ids(place.matched), *tables.end_ids(0)]
        return []

    def is_complete(self) -> bool:
        """See `Matcher.is_complete`."""
        if self.place.phase is _Phase.INSIDE or not self.place.inner_lives:
            return False
        return self._inner is None or self._inner.is_complete()

    def stop_reason(self) -> StopReason:
        """See `Matcher.stop_reason`."""
        if self.place.phase is _Phase.AFTER and self._inner is not None:
            return self._inner.stop_reason()
        return StopReason.NOT_STOPPED

    # --- parts ---

    def _go(self, token_id: int, place: _Place) -> None:
        self._places.append(place)
        self._token_ids.append(token_id)
        self._row = None

    def _is_spent(self) -> bool:
        most = self._grammar.section.max_tokens
        return self.place.phase is _Phase.INSIDE and most is not None and self.place.num_tokens >= most

    def _allowed(self) -> Bitmask:
        """The row of this position; shape `[bitmask_words(vocab_size)]`."""
        if self._row is None:
            self._row = self._computed_row()
        return self._row

    def _computed_row(self) -> Bitmask:
        tables, place = self._grammar.tables, self.place
        if place.phase is _Phase.INSIDE:
            if self._is_spent():
                return row_of(tables.end_ids(place.matched)[:1], tables.vocabulary.vocab_size)
            return tables.inside if self._inner is None else tables.without_overruns(place.matched)
        if self._inner is None:
            return tables.everything
        rows: Bitmask = np.zeros((1, len(tables.inside)), dtype=np.int32)
        if place.inner_lives:
            self._inner.fill(rows, 0)
        is_before = place.phase is _Phase.BEFORE
        also = tables.beginning(place.matched) if is_before else tables.line_ends[_MAX_GAP - place.num_ends]
        row: Bitmask = rows[0] | also
        return row

    def _after(self, token_id: int) -> _Place:
        """The place after an allowed token, which the inner matcher takes along if it can."""
        place = self.place
        text = self._grammar.tables.texts.get(token_id, b"")
        if place.phase is _Phase.INSIDE:
            return self._inside(place, text)
        if place.phase is _Phase.BEFORE:
            return self._before(place, token_id, text)
        if self._inner is not None and place.phase is _Phase.GAP:
            if self._inner.accept(token_id):
                return place._replace(phase=_Phase.AFTER, num_inner=1)
            return place._replace(num_ends=place.num_ends + len(text))
        return place

    def _inside(self, place: _Place, text: bytes) -> _Place:
        matched, behind = self._grammar.tables.end.follow(place.matched, text)
        if behind is not None:
            phase = _Phase.GAP if self._inner is not None else _Phase.AFTER
            return _Place(phase, num_tokens=place.num_tokens, num_ends=len(behind), has_reasoned=True)
        if self._is_spent():
            return place._replace(matched=matched)
        return place._replace(matched=matched, num_tokens=place.num_tokens + 1, num_inner=0, has_reasoned=True)

    def _before(self, place: _Place, token_id: int, text: bytes) -> _Place:
        begin = self._grammar.tables.begin
        if place.matched == 0 and self._inner is None:
            text = text.lstrip()
            if not text and token_id not in self._grammar.tables.vocabulary.eos_ids:
                return place
        rest = begin[place.matched :]
        if text.startswith(rest):
            if self._inner is not None:
                self._inner.rollback(place.num_inner)
            opened = _Place(_Phase.INSIDE, has_reasoned=True)
            return self._inside(opened, text[len(rest) :])._replace(num_tokens=0) if text[len(rest) :] else opened
        goes_on = bool(text) and rest.startswith(text)
        lives = self._inner is not None and place.inner_lives and self._inner.accept(token_id)
        if not goes_on:
            return place._replace(phase=_Phase.AFTER, matched=0, num_inner=place.num_inner + lives)
        if lives or self._inner is None:
            return place._replace(matched=place.matched + len(text), num_inner=place.num_inner + lives)
        if place.inner_lives:
            self._inner.rollback(place.num_inner)
        return place._replace(matched=place.matched + len(text), num_inner=0, inner_lives=False)


def _num_line_ends(text: bytes) -> int:
    """Bytes of a text that is line ends and nothing else; 0 for others."""
    return len(text) if not text.strip(b"\n") else 0
