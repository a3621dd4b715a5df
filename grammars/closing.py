"""How a text that is not complete yet can be completed in few tokens, and the care that a token budget takes of it.

Owns `Closer`, which looks for short completions of a matcher's text, and `Steering`, which keeps one generation from
drawing tokens after which its value could no longer be completed within its budget. Called by the runtime; works on the
matcher protocol, so it serves every kind of constraint and every backend, and knows of reasoning how it ends.

A completion that was found is a fact (its tokens were accepted, and taken back); one that was not found may exist. The
search is bounded by the number of positions that it looks at. Matchers are left as they were.
"""

from __future__ import annotations

import hashlib
import heapq
import time
import weakref
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from sgl.grammars.choices import Vocabulary
from sgl.grammars.lengths import UNKNOWN, Lengths
from sgl.grammars.matcher import CompiledGrammar, Matcher, StopReason, allocate_bitmask
from sgl.grammars.reasoning import ReasoningGrammar, ReasoningMatcher

MAX_START_LEN = 4096
"""Tokens of the longest completion that is looked for at the start of a grammar."""
_MAX_WORDS = 32
"""Long words of the vocabulary that are tried where a text must get longer before it may end."""
_MAX_LOOKS = 96
"""Positions that one search looks at, besides those of the greedy walk."""
_PROBES = ("k", "Z")
"""Letters that JSON allows inside strings only."""
_IN_TEXT = ('"]}', '"}]', '"}}', '"}', '"]', '":', '"', "0", "1")
_OUTSIDE = ("]}", "}]", "}}", "]]", "}", "]", ":", ",", '""', "[]", "{}", '"', "0", "1")
"""What closes JSON soonest, or begins the shortest values, where text is free and where it is not; tried in this order,
as far as a token. What ends a number is tried before its next digit."""
_FILLING = ("0", "1")
_MAX_SAME = 2
_MAX_ZEROS = 6
"""How often a greedy walk takes a token that neither closes nor opens anything, before it has tried the others; a zero,
which multiples of powers of ten end in, more often."""
_MOST_S = 0.5
"""CPU time of a walk, and of a search behind it: a look takes microseconds, but where a constraint forces a text of a
million characters it takes a second."""
_MAX_CHOSEN = 512
_MAX_DRAWN = 64
"""Tokens of a greedy walk that are not forced, and those that nothing but the mask names: it may go in circles."""
_STRIDE = 4
"""Tokens of a completion that one drawn token may save, when it is told whether one can come within reach at all."""
_MUCH_LONGER = 4
"""Times the shortest text that a completion at the start may be long before a shorter one is looked for."""
_CLOSE = 32
"""Tokens to spare from which on each token is looked at: a completion that is found may be so much longer than the
shortest."""
_LATER = 4.0
"""What another token of the same kind costs in a search."""
_AGAIN = 0.5
"""What another position that looks like one before costs."""


class Closer:
    """Looks for completions with one tokenizer's tokens. May be shared by threads.

    Args:
        vocabulary: bytes of the tokens.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._probes, self._in_text, self._outside = (
            [ids[0] for text in texts if (ids := vocabulary.ids.get(text.encode()))]
            for texts in (_PROBES, _IN_TEXT, _OUTSIDE)
        )
        self._closing = frozenset((*self._in_text, *self._outside))
        self._structure = self._closing - {ids[0] for text in _FILLING if (ids := vocabulary.ids.get(text.encode()))}
        self._zero = frozenset(vocabulary.ids.get(b"0", ())[:1])
        single = [(text, ids[0]) for text, ids in sorted(vocabulary.ids.items()) if len(text) == 1]
        self._kinds = [(token_id, _kind(text[0])) for text, token_id in single]
        words = (text for text in vocabulary.ids if len(text) > 1 and text.isalnum() and text.isascii())
        self._words = [vocabulary.ids[text][0] for text in sorted(words, key=len, reverse=True)[:_MAX_WORDS]]
        self._starts: weakref.WeakKeyDictionary[CompiledGrammar, _Start] = weakref.WeakKeyDictionary()
        self._lengths: weakref.WeakKeyDictionary[CompiledGrammar, Lengths] = weakref.WeakKeyDictionary()

    def know(self, grammar: CompiledGrammar, lengths: Lengths) -> None:
        """How long completions of a grammar's texts get."""
        self._lengths[grammar] = lengths

    def lengths(self, grammar: CompiledGrammar) -> Lengths:
        """What is known of how long completions of a grammar's texts get."""
        return self._lengths.get(grammar, UNKNOWN)

    def steering(self, grammar: CompiledGrammar, matcher: Matcher, budget: int) -> Steering | None:
        """What keeps a generation of `budget` tokens under a grammar within reach of a completion; reasoning with no
        constraint behind it needs none."""
        if not isinstance(grammar, ReasoningGrammar):
            start, distance = self.start(grammar, budget), self.distance(grammar)
            return Steering(self, matcher, start, budget, distance, self.lengths(grammar))
        if grammar.inner is None:
            return None
        behind, distance = self.start(grammar.inner), self.distance(grammar.inner)
        start = grammar.completion(behind)
        return Steering(self, matcher, start, budget, distance, self.lengths(grammar), behind or ())

    def start(self, grammar: CompiledGrammar, most: int = MAX_START_LEN) -> tuple[int, ...] | None:
        """A completion of at most `most` tokens at the start of a grammar; `None` when none is found.

        What was looked for is kept: only the first call for a grammar, and the first for a tighter budget, takes long.
        """
        known = self._start(grammar)
        if known.path is not None and known.none_within < most < len(known.path) <= _STRIDE * most:
            found = self.find(grammar.matcher(), most)
            known = self._starts[grammar] = (
                known._replace(none_within=most) if found is None else known._replace(path=tuple(found))
            )
        return known.path if known.path is not None and len(known.path) <= most else None

    def distance(self, grammar: CompiledGrammar) -> int:
        """About how many tokens a completion at the start of a grammar takes at least; 0 where nothing is known."""
        return self._start(grammar).distance

    def _start(self, grammar: CompiledGrammar) -> _Start:
        known = self._starts.get(grammar)
        if known is None:
            matcher = grammar.matcher()
            walk = self._walk(matcher, MAX_START_LEN)
            path = walk.path if walk.completes else None
            much = _MUCH_LONGER * self.lengths(grammar).shortest + _CLOSE
            if not walk.is_forced and (path is None or len(path) > much):
                path = self._search(matcher, MAX_START_LEN if path is None else len(path) - 1) or path
            if path is None:
                known = _Start(None, 0, 0 if walk.is_stuck else len(walk.path))
            else:
                known = _Start(tuple(path), 0, len(path))
            self._starts[grammar] = known
        return known

    def find(
        self, matcher: Matcher, most: int, like: Sequence[int] = (), start: Sequence[int] = (), *, search: bool = True
    ) -> list[int] | None:
        """At most `most` tokens after which the text is complete; `None` when none are found.

        Args:
            like: a completion of another position, which is tried first.
            start: one of the constraint's start, which is tried behind a reasoning that has to end first.
            search: look further than one greedy walk goes, which takes milliseconds.
        """
        if matcher.is_complete():
            return []
        if 0 < len(like) <= most and _completes(matcher, like):
            return list(like)
        if start and (out := _way_out(matcher)):
            path = [*out, *start]
            if len(path) <= most and _completes(matcher, path):
                return path
        walk = self._walk(matcher, most)
        if walk.completes:
            return walk.path
        return self._search(matcher, most) if search and not walk.is_forced else None

    def _walk(self, matcher: Matcher, most: int) -> _Walk:
        """One walk that always takes what closes soonest."""
        path: list[int] = []
        filled: dict[int, int] = {}  # how often what was taken since the text was last closed or opened
        chosen = drawn = 0
        until = time.thread_time() + _MOST_S
        try:
            while len(path) < most and not matcher.is_complete() and time.thread_time() < until:
                forced = (matcher.forced_tokens() or _way_out(matcher))[:1]
                token_id = forced[0] if forced else self._next(matcher, filled)
                if token_id is None or not matcher.accept(token_id):
                    return _Walk(path, completes=False, is_stuck=True, is_forced=False)
                path.append(token_id)
                chosen += not forced
                drawn += not forced and token_id not in self._closing
                if drawn > _MAX_DRAWN or chosen > _MAX_CHOSEN:
                    break
            return _Walk(path, matcher.is_complete(), is_stuck=False, is_forced=not chosen)
        finally:
            matcher.rollback(len(path))

    def _next(self, matcher: Matcher, filled: dict[int, int]) -> int | None:
        """What a greedy walk takes where there is a choice; counted in `filled`, so that it does not go on with the
        same where that leads nowhere (zeros behind `9.` where the number has to be above 9)."""
        tried: list[int] = []
        for token_id, _ in self._candidates(self._row(matcher)):
            if filled.get(token_id, 0) < (_MAX_ZEROS if token_id in self._zero else _MAX_SAME):
                break
            tried.append(token_id)
        else:
            if not tried:
                return None
            token_id = min(tried, key=lambda candidate: filled[candidate])
        if token_id in self._structure:
            filled.clear()
        else:
            filled[token_id] = filled.get(token_id, 0) + 1
        return token_id

    def _search(self, matcher: Matcher, most: int) -> list[int] | None:
        """Positions in the order of what they cost: tokens so far, and how much they are like others."""
        seen: dict[bytes, int] = {}
        at_depth: set[tuple[bytes, int]] = set()
        order = count()
        heap = [_Look(0.0, next(order), matcher, -1, ())]
        until = time.thread_time() + _MOST_S
        for _ in range(_MAX_LOOKS):
            if not heap or time.thread_time() > until:
                return None
            look = heapq.heappop(heap)
            here = look.matcher.clone()
            path = look.path
            if look.token_id >= 0:
                if not here.accept(look.token_id):
                    continue
                path = (*path, look.token_id)
            if here.is_complete():
                return list(path)
            if len(path) == most or here.stop_reason() is not StopReason.NOT_STOPPED:
                continue
            row = self._row(here)
            mark = hashlib.blake2b(row, digest_size=8).digest()
            if (mark, len(path)) in at_depth:
                continue
            at_depth.add((mark, len(path)))
            cost = len(path) + 1 + _AGAIN * seen.get(mark, 0)
            seen[mark] = seen.get(mark, 0) + 1
            forced = here.forced_tokens()
            for token_id, extra in [(forced[0], 0.0)] if forced else self._candidates(row):
                heapq.heappush(heap, _Look(cost + extra, next(order), here, token_id, path))
        return None

    def _candidates(self, row: bytes) -> Iterator[tuple[int, float]]:
        """Tokens worth a look, with what they cost: those that close, the longest word, single bytes by kind."""
        is_in_text = any(_allows(row, token_id) for token_id in self._probes)
        for token_id in self._in_text if is_in_text else self._outside:
            if _allows(row, token_id):
                yield token_id, 0.0
        for token_id in self._words:
            if _allows(row, token_id):
                yield token_id, 0.0
                break
        kinds: set[str] = set()
        for token_id, kind in self._kinds:
            if _allows(row, token_id):
                yield token_id, _LATER if kind in kinds else 0.0
                kinds.add(kind)
        if not kinds:  # a vocabulary without bytes, or special tokens that a grammar names
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(row, np.uint8), bitorder="little"))
            for token_id in allowed[:_MAX_LOOKS].tolist():
                if token_id not in self._vocabulary.eos_ids:
                    yield token_id, 0.0

    def _row(self, matcher: Matcher) -> bytes:
        """The allowed tokens, one bit each."""
        bitmask = allocate_bitmask(1, self._vocabulary.vocab_size)
        matcher.fill(bitmask, 0)
        return bitmask.tobytes()


class _Walk(NamedTuple):
    """Tokens one after another; they complete the text, lead to where nothing is found to go on with, or neither.
    Where all were forced there is no other way."""

    path: list[int]
    completes: bool
    is_stuck: bool
    is_forced: bool


class _Start(NamedTuple):
    """What is known at the start of a grammar: a completion, that none was found within so many tokens, and about how
    many one takes."""

    path: tuple[int, ...] | None
    none_within: int
    distance: int


class _Look(NamedTuple):
    """A position to look at: after `token_id`, from `matcher` (which stands after `path`)."""

    cost: float
    order: int
    matcher: Matcher
    token_id: int
    path: tuple[int, ...]


class Steering:
    """Keeps a completion of one generation within reach of its budget.

    It looks at the start, and again before the tokens to spare could be used up: not while whatever is left of a text
    would fit, and else before as many tokens were drawn as could each make the completion longer by the longest detour
    (an object with many required properties is begun). So long generations cost a few looks and the last tokens one
    each; not at all where the budget is far from any completion.

    Args:
        closer: looks for completions.
        matcher: of the generation, which calls `keeps` after each token that it accepted.
        start: a completion of the empty text, if one is known (`Closer.start`).
        budget: tokens that the generation may have.
        distance: about how many tokens a completion of the empty text takes (`Closer.distance`); 0 if nobody knows.
        lengths: how long completions get (`Closer.lengths`).
        behind: a completion of the constraint's start, where it begins behind reasoning.
    """

    def __init__(
        self,
        closer: Closer,
        matcher: Matcher,
        start: Sequence[int] | None,
        budget: int,
        distance: int,
        lengths: Lengths,
        behind: Sequence[int] = (),
    ) -> None:
        self._closer = closer
        self._matcher = matcher
        self._lengths = lengths
        self._behind = behind
        # From here on the text may have come so far that what is left of a completion fits into what is left.
        self._in_reach = (_STRIDE * budget - distance) // (_STRIDE - 1)
        self._path: list[int] | None = None  # a completion of the text as it is now
        self._last: list[int] = []  # the last one that was known
        self._look_at = 0
        self._found(list(start) if start is not None and len(start) <= budget else None, budget)

    def keeps(self, token_id: int, left: int) -> bool:
        """Whether `token_id`, which was just added to the text, may stay, with `left` more tokens to come.

        False where the text could be completed before it and, for all that is known, not after it: the token is taken
        back, and `instead` says how to go on.
        """
        before, self._path = self._path, None
        if before and before[0] == token_id:
            self._path = before[1:]
            return True
        if left > self._look_at:
            return True
        # A search is worth its time where a completion was known and is lost, between two looks.
        search = before is None and bool(self._last)
        found = self._closer.find(self._matcher, left, before or self._last, self._behind, search=search)
        if found is None and before is not None:
            self._matcher.rollback(1)
            self._path = before
            return False
        self._found(found, left)
        return True

    def restart(self, left: int) -> bool:
        """The text went on, or the budget became smaller, in another way than `keeps` was told of: whether a completion
        of at most `left` tokens is found."""
        path = self._closer.find(self._matcher, left, self._path or self._last, self._behind)
        self._found(path, left)
        return path is not None

    @property
    def instead(self) -> int | None:
        """The token that goes on towards the end; `None` where the text is complete."""
        return self._path[0] if self._path else None

    def _found(self, path: list[int] | None, left: int) -> None:
        self._path = path
        if path is None:
            self._look_at = min(left // 2, self._in_reach)
        else:
            self._last = path
            _, rest, detour = self._lengths
            # What is found may be longer than the shortest.
            num_free = max((left - len(path) - _CLOSE) // (detour + 1), left - max(rest, len(path)) - _CLOSE)
            self._look_at = left - max(1, int(num_free))


def _allows(row: bytes, token_id: int) -> bool:
    return bool(row[token_id // 8] >> (token_id % 8) & 1)


def _way_out(matcher: Matcher) -> list[int]:
    """Tokens behind which a matcher's constraint begins; most begin at once."""
    return matcher.way_out() if isinstance(matcher, ReasoningMatcher) else []


def _completes(matcher: Matcher, token_ids: Sequence[int]) -> bool:
    taken = 0
    try:
        for token_id in token_ids:
            if not matcher.accept(token_id):
                return False
            taken += 1
        return matcher.is_complete()
    finally:
        matcher.rollback(taken)


def _kind(byte: int) -> str:
    char = chr(byte)
    if not char.isascii():
        return "other"
    return "digit" if char.isdigit() else "lower" if char.islower() else "upper" if char.isupper() else char
