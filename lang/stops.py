"""Where a text ends: stop strings and patterns, looked for on the client's side.

Used by what executes graphs without an engine. The stop that is complete first wins; of several that end at the same
character, the longest: what the engine does.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from sgl.lang.graph import Sampling


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
    if not sampling.stop and not sampling.stop_regex:
        return None
    patterns = [re.compile(pattern) for pattern in sampling.stop_regex]
    for end in range(floor + 1, len(text) + 1):
        found = [(end - len(stop), end) for stop in sampling.stop if text.endswith(stop, floor, end)]
        found += [match.span() for pattern in patterns if (match := pattern.search(text, floor, end)) is not None]
        if found:
            begin, end = min(found, key=lambda span: (span[0], -span[1]))
            return Cut(text[: end if sampling.no_stop_trim else begin], text[begin:end], end)
    return None
