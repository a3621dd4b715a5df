"""Python regular expressions, as far as they are regular, in the dialect of the grammar engine.

Owns the translation of a pattern in the syntax of `re` (or of a JSON schema's `pattern`, which is ECMA-262) into the
syntax of Rust's `regex` crate, which llguidance reads, with the meaning unchanged. The two read alike but differ in
`\\d`, `\\w`, `\\s`, `.`, `$` and in case folding, so a pattern is parsed by Python's own parser and every character
class is written out as ranges of code points. No grammar engine is imported here.

Refused is what is not regular: look-around, back-references, conditionals, atomic groups, possessive repeats; also
anchors and word boundaries in the middle of a pattern, and a character class that nothing is in. Lazy repeats are
ordinary ones, since the whole text must match.
"""

from __future__ import annotations

import re
import re._constants as sre  # type: ignore[import-not-found]
import re._parser as sre_parser  # type: ignore[import-not-found]
import sys
import warnings
from array import array
from enum import Enum
from functools import lru_cache
from typing import Any

from sgl.errors import ConstraintTooComplex, InvalidRegex
from sgl.grammars.charsets import Range, class_text, complement, escaped, merged
from sgl.grammars.ecma import to_python
from sgl.limits import DEFAULT_LIMITS, Limits


class Dialect(Enum):
    """Whose rules a pattern follows."""

    PYTHON = "python"  # `re.fullmatch`
    ECMA = "ecma"  # `pattern` of a JSON schema: found anywhere in the text, `\\d` and `\\w` ASCII


_ECMA_SPACES: dict[Any, tuple[Range, ...]] = {
    sre.CATEGORY_SPACE: (
        (0x9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
        (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
    ),
    sre.CATEGORY_NOT_SPACE: (
        (0x0, 0x8), (0xE, 0x1F), (0x21, 0x9F), (0xA1, 0x167F), (0x1681, 0x1FFF), (0x200B, 0x2027), (0x202A, 0x202E),
        (0x2030, 0x205E), (0x2060, 0x2FFF), (0x3001, 0xFEFE), (0xFF00, 0x10FFFF),
    ),
}  # fmt: skip
"""White space and its opposite in ECMA-262, which differ from Python's."""
_CATEGORIES = {
    sre.CATEGORY_DIGIT: "\\d",
    sre.CATEGORY_NOT_DIGIT: "\\D",
    sre.CATEGORY_SPACE: "\\s",
    sre.CATEGORY_NOT_SPACE: "\\S",
    sre.CATEGORY_WORD: "\\w",
    sre.CATEGORY_NOT_WORD: "\\W",
}
_REFUSED = {
    sre.ASSERT: ("look-around", "write the condition into the pattern itself"),
    sre.ASSERT_NOT: ("negative look-around", "list what may stand there, for example with [^...]"),
    sre.GROUPREF: ("a back-reference", "repeat the group's pattern; that the texts are equal cannot be enforced"),
    sre.GROUPREF_EXISTS: ("a conditional group", "write both cases as alternatives with |"),
    sre.ATOMIC_GROUP: ("an atomic group", "use an ordinary group (?:...)"),
    sre.POSSESSIVE_REPEAT: ("a possessive repeat", "use an ordinary repeat"),
}
LARGEST_REPEAT = 65_536
_MOST_CLASS_TEXT = 4_000_000
"""Characters of all classes of a pattern, written out: some 500 times `\\w`."""
_ANY_TEXT = "(?s:.*)"
_STARTS = (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING)
_ENDS = (sre.AT_END, sre.AT_END_STRING)


def translate(pattern: str, *, dialect: Dialect = Dialect.PYTHON, limits: Limits = DEFAULT_LIMITS) -> str:
    """The pattern that matches, anchored at both ends, exactly the texts that `pattern` accepts in its dialect.

    Raises:
        InvalidRegex: a syntax error (with its position), or something that is not regular.
        ConstraintTooComplex: longer than `max_schema_bytes`, nested deeper than `max_json_depth`, or a repeat count
            over 65,536.

    Example:
        >>> translate("[0-9]{2}(am|pm)$")
        '[0-9]{2}(?:am|pm)'
        >>> translate("^ab", dialect=Dialect.ECMA)
        'ab(?s:.*)'
    """
    size = len(pattern.encode("utf-8", "surrogatepass"))
    if size > limits.max_schema_bytes:
        raise ConstraintTooComplex(
            f"the regex has {size} bytes; at most {limits.max_schema_bytes} are allowed",
            hint="shorten it",
        )
    tree = parse(pattern, dialect, limits)
    writer = _Writer(pattern, dialect, tree.state.flags, limits)
    if dialect is Dialect.ECMA:
        return writer.search(list(tree))
    return writer.sequence(list(tree), tree.state.flags, 0, at_start=True, at_end=True)


def parse(given: str, dialect: Dialect, limits: Limits) -> Any:
    """The syntax tree of a pattern, as Python's own parser gives it.

    Raises:
        InvalidRegex: a syntax error, with its position.
        ConstraintTooComplex: nested too deep, or a repeat count over 65,536.
    """
    pattern = given
    if dialect is Dialect.ECMA:
        pattern = to_python(pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return sre_parser.parse(pattern)
    except re.error as error:
        hint = "write [^\\W\\d_] for letters" if r"bad escape \p" in str(error) else "mend the pattern"
        raise InvalidRegex(f"the regex {_shown(given)} is wrong: {error}", hint=hint, position=error.pos) from None
    except RecursionError:
        raise _too_deep(limits) from None
    except OverflowError:
        raise _too_often(sys.maxsize) from None


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 80 else pattern[:77] + "...")


def _too_deep(limits: Limits) -> ConstraintTooComplex:
    return ConstraintTooComplex(
        f"the regex is nested deeper than {limits.max_json_depth} groups", hint="flatten its groups"
    )


def _too_often(count: int) -> ConstraintTooComplex:
    return ConstraintTooComplex(
        f"the regex repeats something {count} times; at most {LARGEST_REPEAT} are allowed", hint="lower the count"
    )


class _Writer:
    """Writes a parsed pattern in the other dialect; one per pattern."""

    def __init__(self, pattern: str, dialect: Dialect, flags: int, limits: Limits) -> None:
        self.pattern = pattern
        self.dialect = dialect
        self.flags = flags
        self.limits = limits
        self.classes: dict[tuple[str, int], str] = {}
        self.class_len = 0

    def refuse(self, what: str, hint: str) -> InvalidRegex:
        return InvalidRegex(f"the regex {_shown(self.pattern)} uses {what}, which cannot be enforced", hint=hint)

    def search(self, items: list[Any]) -> str:
        """A pattern that may match anywhere, as one for the whole text. Anchors count at the ends of alternatives."""
        while len(items) == 1 and items[0][0] is sre.SUBPATTERN:
            items = list(items[0][1][3])
        if len(items) == 1 and items[0][0] is sre.BRANCH:
            return "|".join(f"(?:{self.search(list(branch))})" for branch in items[0][1][1])
        start, end = 0, len(items)
        while start < end and items[start] == (sre.AT, sre.AT_BEGINNING):
            start += 1
        while end > start and items[end - 1] == (sre.AT, sre.AT_END):
            end -= 1
        inner = self.sequence(items[start:end], self.flags, 0, at_start=False, at_end=False)
        if start and end == len(items) and not items[start:end]:
            return _ANY_TEXT
        before, after = "" if start else _ANY_TEXT, "" if end < len(items) else _ANY_TEXT
        return f"{before}{inner}{after}"

    def sequence(self, items: list[Any], flags: int, depth: int, *, at_start: bool, at_end: bool) -> str:
        """Items one after another. `at_start`: nothing can stand before the first; `at_end`: nothing after the last."""
        if depth > self.limits.max_json_depth:
            raise _too_deep(self.limits)
        anchors = [op is sre.AT for op, _ in items]
        parts = []
        for index, (op, value) in enumerate(items):
            first = at_start and all(anchors[:index])
            last = at_end and all(anchors[index + 1 :])
            parts.append(self.item(op, value, flags, depth, at_start=first, at_end=last))
        return "".join(parts)

    def item(self, op: Any, value: Any, flags: int, depth: int, *, at_start: bool, at_end: bool) -> str:
        if op in _REFUSED:
            raise self.refuse(*_REFUSED[op])
        if op is sre.LITERAL:
            return self.literal(value, flags)
        if op is sre.NOT_LITERAL:
            return self.char_class([(sre.NEGATE, None), (sre.LITERAL, value)], flags)
        if op is sre.IN:
            return self.char_class(value, flags)
        if op is sre.ANY:
            if flags & re.DOTALL:
                return "(?s:.)"
            line_ends = [10] if self.dialect is Dialect.PYTHON else [10, 13, 0x2028, 0x2029]
            return class_text(complement(merged((code, code) for code in line_ends)))
        if op is sre.BRANCH:
            written = [
                self.sequence(list(branch), flags, depth + 1, at_start=at_start, at_end=at_end) for branch in value[1]
            ]
            return f"(?:{'|'.join(written)})"
        if op is sre.SUBPATTERN:
            _, added, removed, items = value
            inner = (flags | added) & ~removed
            body = self.sequence(list(items), inner, depth + 1, at_start=at_start, at_end=at_end)
            return body if len(items) == 1 and items[0][0] is sre.BRANCH else f"(?:{body})"
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            low, high, items = value
            return self.repeat(low, high, items, flags, depth, at_start=at_start, at_end=at_end)
        if op is sre.AT:
            if (value in _STARTS and at_start) or (value in _ENDS and at_end):
                return ""
            if value in _STARTS or value in _ENDS:
                raise self.refuse(
                    "an anchor in the middle", "keep ^ and $ at the ends; the whole output must match anyway"
                )
            raise self.refuse("a word boundary", "write out what stands at the boundary")
        raise self.refuse(f"{op}", "write it with classes, groups, | and repeats")

    def repeat(self, low: int, high: Any, items: Any, flags: int, depth: int, *, at_start: bool, at_end: bool) -> str:
        once = high == 1
        body = self.sequence(list(items), flags, depth + 1, at_start=at_start and once, at_end=at_end and once)
        for count in (low, 0 if high is sre.MAXREPEAT else high):
            if count > LARGEST_REPEAT:
                raise _too_often(count)
        if not body or high == 0:
            return ""
        if high is sre.MAXREPEAT:
            count_text = {0: "*", 1: "+"}.get(low, f"{{{low},}}")
        elif (low, high) == (0, 1):
            count_text = "?"
        else:
            count_text = f"{{{low}}}" if low == high else f"{{{low},{high}}}"
        return f"(?:{body}){count_text}" if len(items) != 1 or not _is_atom(items[0][0]) else f"{body}{count_text}"

    def literal(self, code: int, flags: int) -> str:
        if 0xD800 <= code <= 0xDFFF:
            raise self.refuse("a lone surrogate, which no text has", "write the character itself, or as \\U0001f600")
        if flags & re.IGNORECASE:
            return _case_variants(code, bool(flags & re.ASCII))
        return escaped(code)

    def char_class(self, items: list[Any], flags: int) -> str:
        """A class as explicit ranges of code points; the same one is written once."""
        key = (repr(items), flags)
        if key not in self.classes:
            self.classes[key] = self.written_class(items, flags)
        self.class_len += len(self.classes[key])
        if self.class_len > _MOST_CLASS_TEXT:
            raise ConstraintTooComplex(
                f"the regex {_shown(self.pattern)} has too many large character classes",
                hint="repeat a class by a count, or name the characters that are needed",
            )
        return self.classes[key]

    def written_class(self, items: list[Any], flags: int) -> str:
        """See `char_class`."""
        ascii_only = bool(flags & re.ASCII) or self.dialect is Dialect.ECMA
        ranges: list[Range] = []
        for op, value in items:
            if op is sre.LITERAL:
                ranges.append((value, value))
            elif op is sre.RANGE:
                ranges.append(value)
            elif op is sre.CATEGORY and self.dialect is Dialect.ECMA and value in _ECMA_SPACES:
                ranges += _ECMA_SPACES[value]
            elif op is sre.CATEGORY:
                ranges += _category_ranges(_CATEGORIES[value], ascii_only)
        positive = merged(ranges)
        if flags & re.IGNORECASE:
            source = "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in positive)
            folding = re.IGNORECASE | (re.ASCII if flags & re.ASCII else 0)
            found = re.findall(f"[{source}]", _cased(), folding) if source else []
            positive = merged([*positive, *((ord(char), ord(char)) for char in found)])
        # Complements are computed here: the engine's own leave in two code points beside the gap of the surrogates.
        allowed = complement(positive) if any(op is sre.NEGATE for op, _ in items) else positive
        text = class_text(allowed)
        if text == "[]":
            raise self.refuse("a class that no character is in", "remove it")
        return text


def _is_atom(op: Any) -> bool:
    """Whether what is written for `op` needs no group before a repeat."""
    return op in (sre.LITERAL, sre.NOT_LITERAL, sre.IN, sre.ANY, sre.SUBPATTERN, sre.BRANCH)


@lru_cache(maxsize=16)
def _category_ranges(category: str, ascii_only: bool) -> tuple[Range, ...]:
    """The code points of `\\d`, `\\w`, `\\s` or their opposites: exact, because `re` itself is asked about each."""
    everything = array("I", range(0x110000)).tobytes().decode(f"utf-32-{sys.byteorder[0]}e", "surrogatepass")
    runs = re.compile(f"{category}+", re.ASCII if ascii_only else 0).finditer(everything)
    return tuple((run.start(), run.end() - 1) for run in runs)


@lru_cache(maxsize=1)
def _cased() -> str:
    """Every character that has another case. Scripts with case are in the first two planes."""
    return "".join(char for char in map(chr, range(0x20000)) if not char == char.lower() == char.upper())


@lru_cache(maxsize=4096)
def _case_variants(code: int, ascii_only: bool) -> str:
    char = chr(code)
    flags = re.IGNORECASE | (re.ASCII if ascii_only else 0)
    found = {char, *re.findall(re.escape(char), _cased(), flags)}
    return class_text(tuple((ord(c), ord(c)) for c in sorted(found))) if len(found) > 1 else escaped(code)
