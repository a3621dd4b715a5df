"""Where a text ends: stop strings and patterns, looked for on the client's side.

Used by what executes graphs without an engine. The stop that is complete first wins; of several that end at the same
character, the longest: what the engine does.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

from sgl.lang.graph import Sampling

if TYPE_CHECKING:
    import regex

_SEES_THE_END = re.compile(r"[$^]|\\[bBAZ]|\(\?")
"""In a pattern: what may match at the end of a text, and no longer when it goes on (and some harmless groups)."""


class Cut(NamedTuple):
    """A text up to its stop: `matched` is what ended it, `end` where the text goes on behind that."""

    text: str
    matched: str
    end: int


def first_stop(text: str, sampling: Sampling, floor: int = 0) -> Cut | None:
    """The first stop in a text, or `None`.

    Args:
        floor: characters at its beginning in which none is looked for.

    Example:
        >>> first_stop("one! two.", Sampling(stop=(".", "!")))
        Cut(text='one', matched='!', end=4)
    """
    spans = [span for stop in sampling.stop if (span := _first_string(text, stop, floor)) is not None]
    last = min((end for _, end in spans), default=len(text))
    patterns = [re.compile(pattern) for pattern in sampling.stop_regex]
    ends = [end for pattern in patterns if (end := _first_end(pattern, text, floor, last)) is not None]
    if not spans and not ends:
        return None
    end = min(last, *ends) if ends else last
    spans = [span for span in spans if span[1] == end]
    spans += [match.span() for pattern in patterns if (match := pattern.search(text, floor, end)) is not None]
    begin, end = min(spans, key=lambda span: (span[0], -span[1]))
    return Cut(text[: end if sampling.no_stop_trim else begin], text[begin:end], end)


def _first_string(text: str, stop: str, floor: int) -> tuple[int, int] | None:
    begin = text.find(stop, floor)
    return (begin, begin + len(stop)) if begin >= 0 else None


def _first_end(pattern: re.Pattern[str], text: str, floor: int, last: int) -> int | None:
    """Where the text first contains a match, read character by character, up to `last`."""
    if _SEES_THE_END.search(pattern.pattern):
        return _first_end_looking(pattern, text, floor, last)
    if pattern.search(text, floor, last) is None:
        return None
    # A longer text still contains what a shorter one did, so the first end can be found by halving.
    return bisect_left(
        range(last + 1), True, lo=floor + 1, key=lambda end: pattern.search(text, floor, end) is not None
    )


def _first_end_looking(pattern: re.Pattern[str], text: str, floor: int, last: int) -> int | None:
    """`_first_end` for a pattern that is asked at every end, from where a match can still begin."""
    live = _begins(pattern.pattern)
    for end in range(floor + 1, last + 1):
        if pattern.search(text, floor, end) is not None:
            return end
        while live is not None and floor < end and live.match(text, floor, end, partial=True) is None:
            floor += 1  # no longer text has a match from here
    return None


def _begins(pattern: str) -> regex.Pattern[str] | None:
    """What matches, in part or in full, wherever a match of `pattern` may begin; `None` where that is not known.

    A partial match does not allow for a word boundary that only the next character makes, so those are left out; where
    that would forbid more (in what must not follow) or be something else (in brackets), nothing is known.
    """
    import regex  # here: `import sgl` stays light

    if re.search(r"\\[bB]", pattern):
        if re.search(r"\(\?<?!|\[[^\]]*\\[bB]|\[\^?\]|\\\]", pattern):
            return None
        pattern = re.sub(r"\\(.)", lambda found: "(?:)" if found[1] in "bB" else found[0], pattern, flags=re.DOTALL)
    return regex.compile(pattern)
