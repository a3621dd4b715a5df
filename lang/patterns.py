"""Stop patterns at the door: what `stop_regex` may be.

Owns the check of one pattern before anything is compiled: it is read by the parser of `re`, which takes time and memory
in proportion to the pattern, whatever the pattern would cost to run. Who searches with it (the engine, the mock) may
rely on three things: it is a pattern of `re`, it matches no empty text, and its repeats written out are bounded.
"""

from __future__ import annotations

import re
import re._parser as sre_parser  # type: ignore[import-not-found]
import warnings
from typing import Any

from sgl.errors import ConstraintTooComplex, InvalidParameter, InvalidRegex

_MOST_ITEMS = 10_000
_FUZZY = re.compile(r"\{[\deids<=,+ ]*[eids][\deids<=,+ ]*(?::[^}]*)?\}")
"""Braces that the `regex` package, which searches, would read as approximate matching; `re` reads them as text."""


def check_stop_pattern(pattern: str) -> None:
    """Raise unless `pattern` can be a stop.

    Raises:
        InvalidRegex: a syntax error, with its position.
        InvalidParameter: it matches the empty text: the generation would end before it begins.
        ConstraintTooComplex: its repeats written out are more than 10,000 items.

    Example:
        >>> check_stop_pattern("[.!?] ")
        >>> check_stop_pattern("x*")
        Traceback (most recent call last):
        sgl.errors.InvalidParameter: stop_regex 'x*' matches the empty text (write it so that it takes a character)
    """
    shown = repr(pattern if len(pattern) <= 80 else pattern[:77] + "...")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = sre_parser.parse(pattern)
            num_items = _num_items(tree)
    except re.error as error:
        raise InvalidRegex(
            f"stop_regex {shown} is wrong: {error}", hint="mend the pattern", position=error.pos, param="stop_regex"
        ) from None
    except (RecursionError, OverflowError):
        raise _too_complex(shown) from None
    if found := _FUZZY.search(pattern):
        raise InvalidRegex(
            f"stop_regex {shown} has {found.group()!r}, which is not a repeat",
            hint="write the brace as \\{",
            param="stop_regex",
        )
    if tree.getwidth()[0] == 0:
        raise InvalidParameter(
            f"stop_regex {shown} matches the empty text",
            hint="write it so that it takes a character",
            param="stop_regex",
        )
    if num_items > _MOST_ITEMS:
        raise _too_complex(shown)


def _too_complex(shown: str) -> ConstraintTooComplex:
    return ConstraintTooComplex(
        f"stop_regex {shown} is nested or repeated too often; at most {_MOST_ITEMS} items are allowed",
        hint="lower its counts",
        param="stop_regex",
    )


def _num_items(part: Any) -> int:
    """Items of a parsed pattern, or of a part of one, with its repeats written out."""
    if isinstance(part, sre_parser.SubPattern):
        return sum(_num_items(item) for item in part)
    if not isinstance(part, (tuple, list)):
        return 0
    if len(part) == 3 and isinstance(part[0], int) and isinstance(part[2], sre_parser.SubPattern):
        # a repeat: low, high, what; three alternatives are three patterns
        low, high, inner = part
        return int(low if high == sre_parser.MAXREPEAT else high) * _num_items(inner) + 1
    return 1 + sum(_num_items(item) for item in part)
