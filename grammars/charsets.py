"""Sets of code points, and how they are written for a regex engine.

Owns the arithmetic on ranges of code points and their text in the syntax of Rust's `regex` crate. Called by the
translators of regexes and grammars, which leave no shorthand to an engine that may read it in another way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Range: TypeAlias = tuple[int, int]
"""First and last code point, both in the set."""

LAST = 0x10FFFF


def escaped(code: int) -> str:
    """One code point as a regex.

    Example:
        >>> escaped(ord("a")), escaped(ord("/"))
        ('a', '\\\\x{2F}')
    """
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:X}}}"


def class_text(ranges: Iterable[Range]) -> str:
    """A regex class of the ranges; `[]` when nothing is left of them.

    Surrogates are no characters in UTF-8; a range is cut around them.

    Example:
        >>> class_text([(97, 122), (0x2D, 0x2D)])
        '[a-z\\\\x{2D}]'
    """
    parts = []
    for low, high in ranges:
        for a, b in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high)):
            if a <= b:
                parts.append(escaped(a) if a == b else f"{escaped(a)}-{escaped(b)}")
    return f"[{''.join(parts)}]"


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same code points as sorted ranges with gaps between them.

    Example:
        >>> merged([(5, 9), (1, 4), (20, 21)])
        ((1, 9), (20, 21))
    """
    found: list[Range] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def complement(ranges: tuple[Range, ...]) -> tuple[Range, ...]:
    """All other code points. `ranges` are sorted and have gaps between them.

    Example:
        >>> complement(((0, 64), (91, 0x10FFFF)))
        ((65, 90),)
    """
    edges = [-1, *(edge for low, high in ranges for edge in (low, high)), LAST + 1]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return tuple((before + 1, after - 1) for before, after in pairs if before + 1 < after)
