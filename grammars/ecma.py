"""Spellings of ECMA-262 patterns that Python's parser does not know, in its own.

Owns `to_python`: one pass over a pattern of a JSON schema, read as with the flag `u`. Called by `sgl.grammars.regex`,
which parses what comes out. General categories (`\\p{L}`, `\\P{Nd}`) are written out as ranges of code points, by the
Unicode version of this Python; code points that it has not assigned belong to none of them and to no opposite.

Fails with `InvalidRegex`: without `position` for what is right and not supported (scripts and other properties), as for
everything that cannot be enforced.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from itertools import groupby

from sgl.errors import ConstraintTooComplex, InvalidRegex
from sgl.grammars.charsets import LAST, Range, merged

_LONG_NAMES = {
    "Letter": "L", "Cased_Letter": "LC", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Titlecase_Letter": "Lt",
    "Modifier_Letter": "Lm", "Other_Letter": "Lo", "Mark": "M", "Nonspacing_Mark": "Mn", "Spacing_Mark": "Mc",
    "Enclosing_Mark": "Me", "Number": "N", "Decimal_Number": "Nd", "Letter_Number": "Nl", "Other_Number": "No",
    "Punctuation": "P", "Connector_Punctuation": "Pc", "Dash_Punctuation": "Pd", "Open_Punctuation": "Ps",
    "Close_Punctuation": "Pe", "Initial_Punctuation": "Pi", "Final_Punctuation": "Pf", "Other_Punctuation": "Po",
    "Symbol": "S", "Math_Symbol": "Sm", "Currency_Symbol": "Sc", "Modifier_Symbol": "Sk", "Other_Symbol": "So",
    "Separator": "Z", "Space_Separator": "Zs", "Line_Separator": "Zl", "Paragraph_Separator": "Zp", "Control": "Cc",
}  # fmt: skip
_MOST_TEXT = 1_000_000
"""Characters of all categories of a pattern, written out: some 80 letters."""
_ESCAPE = re.compile(
    r"\\(?:(?P<negated>[pP])\{(?P<category>[^}]*)\}|u\{(?P<code>[0-9A-Fa-f]{1,6})\}|c(?P<control>[A-Za-z])"
    r"|(?P<group>k<))|(?P<any>\[\^\])|(?P<named>\(\?<(?![=!]))|(?P<other>\\.|\[|\])",
    re.DOTALL,
)


def to_python(pattern: str) -> str:
    r"""The pattern with the spellings that `re` has.

    Raises:
        InvalidRegex: a property that is not a general category, or a named back-reference.

    Example:
        >>> to_python(r"\cA\u{41}(?<n>b)\p{Zl}[\P{Zl}]")[:39]
        '\\U00000001\\U00000041(?P<n>b)[\\U00002028'
    """
    in_class = False
    written_len = 0

    def written(found: re.Match[str]) -> str:
        nonlocal in_class, written_len
        if found["category"] is not None:
            text = _category_text(_category(found["category"]), found["negated"] == "P")
            written_len += len(text)
            if written_len > _MOST_TEXT:
                raise ConstraintTooComplex(
                    f"the regex {pattern[:80]!r} names too many categories of characters",
                    hint="repeat a class by a count",
                )
            return text if in_class else f"[{text}]"
        if found["code"] and int(found["code"], 16) <= LAST:
            return _code(int(found["code"], 16))
        if found["control"]:
            return _code(ord(found["control"]) % 32)
        if found["group"]:
            raise InvalidRegex(
                f"the regex {pattern[:80]!r} uses a back-reference, which cannot be enforced",
                hint="repeat the group's pattern; that the texts are equal cannot be enforced",
            )
        if found["any"] and not in_class:
            return r"[\s\S]"
        if found["named"]:
            return found[0] if in_class else "(?P<"
        in_class = {"[": True, "]": False}.get(found[0], in_class)
        return found[0]

    return _ESCAPE.sub(written, pattern)


def _code(code: int) -> str:
    return f"\\U{code:08x}"


def _category(name: str) -> str:
    short = name.removeprefix("General_Category=").removeprefix("gc=")
    short = _LONG_NAMES.get(short, short)
    if short not in _LONG_NAMES.values():
        raise InvalidRegex(
            f"\\p{{{name}}} is no general category, and no other property of characters can be enforced",
            hint="use one such as \\p{L}, \\p{Lu} or \\p{Nd}, or list the characters",
        )
    return short


@lru_cache(maxsize=64)
def _category_text(category: str, negated: bool) -> str:
    """The assigned code points of a general category, or those outside of it, as they stand in a class."""
    wanted = ("Lu", "Ll", "Lt") if category == "LC" else (category,)
    found = merged(span for kind, span in _runs() if kind.startswith(wanted) is not negated)
    return "".join(f"{_code(low)}-{_code(high)}" if low < high else _code(low) for low, high in found)


@lru_cache(maxsize=1)
def _runs() -> tuple[tuple[str, Range], ...]:
    """(general category, code points) of all that are assigned, in order."""
    runs = []
    for kind, group in groupby(range(LAST + 1), lambda code: unicodedata.category(chr(code))):
        codes = list(group)
        if kind not in ("Cn", "Cs"):
            runs.append((kind, (codes[0], codes[-1])))
    return tuple(runs)
