"""Where a text ends: stop strings and stop patterns, looked for character by character.

Owns the search of one generation. `StreamDecoder` asks it after every token: has a stop been completed, and if not,
from where on may the text be the beginning of one? The answers are those of a reader who sees one character after the
other, so they do not depend on how the text is cut into tokens: the stop that is completed first wins, and of those
completed by the same character the one that begins first.

Patterns run on the `regex` package, whose partial matches say what to hold back. A pattern may take exponential time,
so all searches of one generation share a budget of CPU time; past it, `ConstraintTooComplex` ends that generation
alone. Text in which no match can have begun costs one search per pattern and token.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import NamedTuple

import regex

from sgl.errors import ConstraintTooComplex
from sgl.limits import DEFAULT_LIMITS, Limits

_SEES_THE_END = re.compile(r"[$^]|\\[bBAZ]|\(\?")
"""In a pattern: what may match at the end of the text, and no longer when it goes on (and some harmless groups)."""


class StopMatch(NamedTuple):
    """A stop in the text: it is `text[begin:end]`."""

    begin: int
    end: int


class StopSearch:
    """The stops of one generation.

    Args:
        strings: non-empty.
        patterns: that passed `sgl.lang.patterns.check_stop_pattern`.

    Example:
        >>> stops = StopSearch(["END"], [r"\\d+ apples"])
        >>> text = "I have 12 app"
        >>> match, hold = stops.look(text, 0, 0)
        >>> match, text[hold:]
        (None, '12 app')
        >>> stops.look(text + "les", hold, len(text))
        (StopMatch(begin=7, end=16), 16)
    """

    def __init__(self, strings: Sequence[str] = (), patterns: Sequence[str] = (), limits: Limits = DEFAULT_LIMITS):
        self._strings = tuple(strings)
        self._starts = frozenset(text[0] for text in self._strings)
        self._longest = max(map(len, self._strings), default=0)
        self._patterns = [regex.compile(pattern) for pattern in patterns]
        self._budget_s = self._left_s = limits.max_stop_regex_s

    def __bool__(self) -> bool:
        return bool(self._strings or self._patterns)

    def look(self, text: str, start: int, seen: int) -> tuple[StopMatch | None, int]:
        """The stop that is completed first in `text`, and where in it a stop may have begun that is not completed yet.

        Args:
            start: no stop begins before it.
            seen: no stop is completed in `text[:seen]`.

        Returns:
            The match, or `None`; without one, the length of the text that is no part of a stop.

        Raises:
            ConstraintTooComplex: the patterns have used up their time.
        """
        found = self._first_string(text, start)
        if not self._patterns:
            return found, self._hold_string(text, start)
        began = time.thread_time()
        try:
            return self._look(text, start, seen, found)
        finally:
            self._left_s -= time.thread_time() - began

    def _look(self, text: str, start: int, seen: int, found: StopMatch | None) -> tuple[StopMatch | None, int]:
        begun = [self._search(pattern, text, start, len(text), partial=True) for pattern in self._patterns]
        live = [
            pattern
            for pattern, partial in zip(self._patterns, begun, strict=True)
            if partial is not None or _SEES_THE_END.search(pattern.pattern)
        ]
        # What a pattern finds depends on where the text ends, so it is asked at every end: `a+` stops at the first a.
        last = len(text) if found is None else found.end
        for end in range(max(seen, start) + 1, last + 1) if live else ():
            matches = [match for p in live if (match := self._search(p, text, start, end)) is not None]
            if found is not None and found.end == end:
                matches.append(found)
            if matches:
                match = min(matches, key=lambda match: (match.begin, -match.end))
                return match, match.end
        hold = min((partial.begin for partial in begun if partial is not None), default=len(text))
        return found, min(hold, self._hold_string(text, start))

    def _first_string(self, text: str, start: int) -> StopMatch | None:
        best: StopMatch | None = None
        for stop in self._strings:
            begin = text.find(stop, start)
            if begin >= 0 and (best is None or (begin + len(stop), begin) < (best.end, best.begin)):
                best = StopMatch(begin, begin + len(stop))
        return best

    def _hold_string(self, text: str, start: int) -> int:
        for begin in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[begin] in self._starts:
                tail = text[begin:]
                if any(stop.startswith(tail) for stop in self._strings):
                    return begin
        return len(text)

    def _search(
        self, pattern: regex.Pattern[str], text: str, start: int, end: int, *, partial: bool = False
    ) -> StopMatch | None:
        try:
            match = (
                pattern.search(text, start, end, partial=partial, timeout=self._left_s) if self._left_s > 0 else None
            )
        except TimeoutError:
            self._left_s = 0.0
        if self._left_s <= 0:
            raise ConstraintTooComplex(
                f"stop_regex {pattern.pattern[:80]!r} took more than {self._budget_s:g} s of CPU time on this output",
                hint="write it so that one repeat cannot match what the next one matches",
                param="stop_regex",
            )
        return StopMatch(*match.span()) if match is not None else None
