"""EBNF in the notation of GBNF: read, checked, and written out for llguidance.

Owns the parser, the syntax tree and the translation to llguidance's Lark dialect. Called by `sgl.grammars.compiler` for
the checks and by the backend for the translation. No grammar engine is imported.

The notation: rules `name ::= alternatives`, starting at `root`; literals `"..."`, classes `[a-z]` and `[^"\\n]`, `.`
for any character, groups, `|`, the repeats `* + ? {n} {n,} {n,m}`, comments from `#` to the end of the line. A rule
ends where the next one begins, so alternatives may stand on lines of their own. Escapes: `\\n \\r \\t \\\\ \\" \\'
\\[ \\] \\- \\^ \\/ \\xHH \\uHHHH \\UHHHHHHHH`.

A lexer that reads the longest word, as llguidance has, is not what EBNF means: in `"abc" | [a-z] "bd"` it would lose
`abd`. So a grammar without recursion becomes one regular expression, and one with recursion is written so that each
terminal is one character; both are exact.

Fails with `InvalidGrammar` (with line and column) and `ConstraintTooComplex`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from sgl.errors import ConstraintTooComplex, InvalidGrammar
from sgl.grammars.charsets import LAST, Range, class_text, complement, escaped, merged
from sgl.grammars.regex import LARGEST_REPEAT
from sgl.limits import DEFAULT_LIMITS, Limits

MAX_CHAIN = 256
"""Rules that may lead to one another in a row: engines follow them by recursion, on a stack of fixed size."""
_DEEPEST = 16
"""Groups within groups; llguidance reads about thirty."""
MAX_EXPANDED = 200_000
"""Terminals of one rule with its repeats written out."""


@dataclass(frozen=True, slots=True)
class Text:
    """These characters."""

    text: str


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Ref:
    """What the rule of that name matches; `at` is where it is named."""

    name: str
    at: int


@dataclass(frozen=True, slots=True)
class Sequence:
    """Items one after another."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the items."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """An item `low` to `high` times; `None` is without end."""

    item: Node
    low: int
    high: int | None


Node: TypeAlias = Text | Chars | Ref | Sequence | Choice | Repeat
Rules: TypeAlias = dict[str, Node]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_RULE = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*[ \t]*::=")
_SPACE = re.compile(r"(?:\s|#[^\n]*)*")
_REPEAT = re.compile(r"\{\s*([0-9]{1,9})?\s*(,)?\s*([0-9]{1,9})?\s*\}")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([nrt\\\"'\[\]\-\^/]))")
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}


def parse(text: str, limits: Limits = DEFAULT_LIMITS) -> Rules:
    """The rules of a grammar, checked: `root` is there, every name is defined, everything that is begun can end.

    Raises:
        InvalidGrammar: with `line` and `column` (from 1) and `position` (characters, from 0) in its details.
        ConstraintTooComplex: too large, too deep, too many repeats.

    Example:
        >>> parse('root ::= "a" | [b-c]')
        {'root': Choice(items=(Text(text='a'), Chars(ranges=((98, 99),))))}
        >>> parse('root ::= "a" nme')
        Traceback (most recent call last):
        sgl.errors.InvalidGrammar: the EBNF names a rule 'nme' that is not defined, at line 1, column 14 (define it)
    """
    if len(text.encode("utf-8", "surrogatepass")) > limits.max_schema_bytes:
        raise ConstraintTooComplex(
            f"the EBNF is larger than {limits.max_schema_bytes} bytes", hint="split the generation in two steps"
        )
    return _Parser(text, limits).grammar()


class _Parser:
    """Recursive descent over one text."""

    def __init__(self, text: str, limits: Limits) -> None:
        self.text = text
        self.limits = limits
        self.at = 0
        self.starts: dict[str, int] = {}

    # --- rules ---

    def grammar(self) -> Rules:
        rules: Rules = {}
        self.space()
        while self.at < len(self.text):
            start = self.at
            name = self.name("a rule: name ::= ...")
            self.space()
            if not self.text.startswith("::=", self.at):
                self.fail("expects ::= after the name of a rule")
            self.at += 3
            if name in rules:
                self.fail(f"defines the rule {name!r} twice", start, "rename or join them")
            self.starts[name] = start
            rules[name] = self.choice(0)
            if self.peek() == ")":
                self.fail("has a ) that nothing opened")
        if "root" not in rules:
            self.fail("has no rule 'root', where it starts", 0, "name the first rule root")
        self.check(rules)
        return rules

    def choice(self, depth: int) -> Node:
        if depth > self.limits.max_json_depth:
            raise ConstraintTooComplex(
                f"the EBNF is nested deeper than {self.limits.max_json_depth} groups", hint="name a group as a rule"
            )
        options = [self.sequence(depth)]
        while self.peek() == "|":
            self.at += 1
            options.append(self.sequence(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def sequence(self, depth: int) -> Node:
        items: list[Node] = []
        self.space()
        while self.at < len(self.text) and self.peek() not in ("|", ")") and not _RULE.match(self.text, self.at):
            items.append(self.repeated(self.item(depth)))
            self.space()
        return items[0] if len(items) == 1 else Sequence(tuple(items)) if items else Text("")

    def item(self, depth: int) -> Node:
        start, char = self.at, self.peek()
        if char == '"':
            return self.literal()
        if char == "[":
            return self.chars()
        if char == ".":
            self.at += 1
            return Chars(((0, LAST),))
        if char == "(":
            self.at += 1
            inner = self.choice(depth + 1)
            if self.peek() != ")":
                self.fail("opens a ( that is not closed", start)
            self.at += 1
            return inner
        if char in "*+?{":
            self.fail(f"repeats nothing with {char}", hint="put what is repeated before it")
        return Ref(self.name('a literal "...", a class [...], a group (...), or the name of a rule'), start)

    def repeated(self, item: Node) -> Node:
        while (char := self.peek()) and char in "*+?{":
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(char) or self.bounds()
            self.at += 1
            item = Repeat(item, low, high)
        return item

    def bounds(self) -> tuple[int, int | None]:
        start = self.at
        found = _REPEAT.match(self.text, self.at)
        if not found or (found[1] is None and found[3] is None):
            self.fail("has a repeat that cannot be read", hint="write {n}, {n,} or {n,m}")
        low = int(found[1] or 0)
        high = int(found[3]) if found[3] else None if found[2] else low
        if high is not None and high < low:
            self.fail(f"repeats {low} to {high} times", start, "put the smaller count first")
        if max(low, high or 0) > LARGEST_REPEAT:
            raise ConstraintTooComplex(
                f"the EBNF repeats something {max(low, high or 0)} times, at {self.place(start)}; at most "
                f"{LARGEST_REPEAT} are allowed",
                hint="lower the count",
            )
        self.at = found.end() - 1
        return low, high

    # --- characters ---

    def literal(self) -> Node:
        start, found = self.at, []
        self.at += 1
        while (char := self.peek()) != '"':
            if not char or char == "\n":
                self.fail('has a literal that is not closed by "', start)
            found.append(chr(self.code()))
        self.at += 1
        return Text("".join(found))

    def chars(self) -> Node:
        start = self.at
        self.at += 1
        negated = self.peek() == "^"
        self.at += negated
        ranges: list[Range] = []
        while (char := self.peek()) != "]":
            if not char or char == "\n":
                self.fail("has a class that is not closed by ]", start)
            at, low = self.at, self.code()
            high = low
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self.code()
            if high < low:
                self.fail("has a range whose end is before its start", at)
            ranges.append((low, high))
        self.at += 1
        found = complement(merged(ranges)) if negated else merged(ranges)
        if class_text(found) == "[]":
            self.fail("has a class that no character is in", start, "list the characters that may stand there")
        return Chars(found)

    def code(self) -> int:
        if self.peek() != "\\":
            self.at += 1
            return ord(self.text[self.at - 1])
        found = _ESCAPE.match(self.text, self.at)
        if not found:
            self.fail(
                f"has an unknown escape {self.text[self.at : self.at + 2]}",
                hint=r"known: \n \r \t \\ \" \[ \] \xHH \uHHHH \UHHHHHHHH",
            )
        digits = found[1] or found[2] or found[3]
        code = int(digits, 16) if digits else ord(_LETTERS.get(found[4], found[4]))
        if code > LAST or 0xD800 <= code <= 0xDFFF:
            self.fail(f"has an escape {found[0]} that is no character")
        self.at = found.end()
        return code

    # --- helpers ---

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def space(self) -> None:
        found = _SPACE.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def name(self, expected: str) -> str:
        found = _NAME.match(self.text, self.at)
        if not found:
            got = repr(self.peek()) if self.peek() else "its end"
            self.fail(f"has {got} where it expects {expected}")
        self.at = found.end()
        return found[0]

    def place(self, at: int) -> str:
        return "line {}, column {}".format(*line_and_column(self.text, at))

    def fail(self, what: str, at: int | None = None, hint: str = "mend the grammar there") -> NoReturn:
        at = self.at if at is None else at
        line, column = line_and_column(self.text, at)
        raise InvalidGrammar(
            f"the EBNF {what}, at line {line}, column {column}", hint=hint, position=at, line=line, column=column
        )

    # --- what the rules say together ---

    def check(self, rules: Rules) -> None:
        for node in rules.values():
            for ref in references(node):
                if ref.name not in rules:
                    self.fail(f"names a rule {ref.name!r} that is not defined", ref.at, "define it")
        order = _Walk(rules)
        if order.longest > MAX_CHAIN:
            raise ConstraintTooComplex(
                f"the EBNF has {order.longest} rules that lead to one another; at most {MAX_CHAIN} are allowed",
                hint="join some of them",
            )
        finite: set[str] = set()
        # Leaves come first, so that one round nearly always does.
        before = -1
        while len(finite) > before:
            before = len(finite)
            for name in order.leaves_first:
                if name not in finite and _can_end(rules[name], finite):
                    finite.add(name)
        for name in order.names:
            if name not in finite:
                self.fail(
                    f"has a rule {name!r} that can never end", self.starts[name], "give it an option without itself"
                )
        for name, node in rules.items():
            if _expanded(node) > MAX_EXPANDED:
                raise ConstraintTooComplex(
                    f"the rule {name!r} repeats more than {MAX_EXPANDED} characters, at "
                    f"{self.place(self.starts[name])}",
                    hint="lower its repeat counts",
                )


def line_and_column(text: str, at: int) -> tuple[int, int]:
    """Line and column of a position, both counted from 1.

    Example:
        >>> line_and_column("ab\\ncd", 4)
        (2, 2)
    """
    return text.count("\n", 0, at) + 1, at - (text.rfind("\n", 0, at) + 1) + 1


def references(node: Node) -> Iterator[Ref]:
    """Every name within a node."""
    if isinstance(node, Ref):
        yield node
    elif isinstance(node, Repeat):
        yield from references(node.item)
    elif isinstance(node, (Sequence, Choice)):
        for item in node.items:
            yield from references(item)


def _can_end(node: Node, finite: set[str]) -> bool:
    if isinstance(node, Ref):
        return node.name in finite
    if isinstance(node, Repeat):
        return node.low == 0 or _can_end(node.item, finite)
    if isinstance(node, Choice):
        return any(_can_end(item, finite) for item in node.items)
    return not isinstance(node, Sequence) or all(_can_end(item, finite) for item in node.items)


def _expanded(node: Node) -> int:
    if isinstance(node, Text):
        return len(node.text)
    if isinstance(node, (Sequence, Choice)):
        return sum(_expanded(item) for item in node.items)
    if isinstance(node, Repeat):
        return max(1, node.low, node.high or 0) * _expanded(node.item)
    return 1


class _Walk:
    """The rules as `root` leads to them, depth first.

    Attributes:
        names: those that are reached, `root` first.
        leaves_first: the same, each after the rules that it leads to, as far as they do not lead back.
        longest: the most rules in a row on the way.
        is_recursive: whether one of them contains itself.
    """

    def __init__(self, rules: Rules) -> None:
        self.names = ["root"]
        self.leaves_first: list[str] = []
        self.longest = 0
        self.is_recursive = False
        seen, on_the_way = {"root"}, {"root"}
        stack = [("root", references(rules["root"]))]
        while stack:
            self.longest = max(self.longest, len(stack))
            ref = next(stack[-1][1], None)
            if ref is None:
                name, _ = stack.pop()
                on_the_way.remove(name)
                self.leaves_first.append(name)
            elif ref.name not in seen:
                seen.add(ref.name)
                on_the_way.add(ref.name)
                self.names.append(ref.name)
                stack.append((ref.name, references(rules[ref.name])))
            else:
                self.is_recursive = self.is_recursive or ref.name in on_the_way


def is_recursive(rules: Rules) -> bool:
    """Whether a rule that `root` leads to contains itself."""
    return _Walk(rules).is_recursive


# --- for llguidance ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Written:
    """A grammar as lines of Lark.

    Args:
        start: what to name to match the whole.
        lines: the definitions.
        regular: whether `start` names a terminal, which is a regular expression.
    """

    start: str
    lines: tuple[str, ...]
    regular: bool


def to_lark(rules: Rules, prefix: str = "") -> Written:
    """The rules in llguidance's dialect; `prefix` (lower case) keeps their names apart from others.

    Example:
        >>> to_lark(parse('root ::= "a" b*\\nb ::= [b-c]'))
        Written(start='R0', lines=('R0: (/a/ (R1)*)', 'R1: /[b-c]/'), regular=True)
        >>> to_lark(parse('root ::= "ab" root?')).lines
        ('r0: (/a/ /b/ (r0)?)',)
    """
    writer = _LarkWriter(rules, prefix)
    return Written(writer.names["root"], writer.lines(), writer.regular)


class _LarkWriter:
    """Writes the rules of one grammar; what is nested deeper than the engine reads gets a name of its own."""

    def __init__(self, rules: Rules, prefix: str) -> None:
        self.rules = rules
        walk = _Walk(rules)
        self.regular = not walk.is_recursive
        self.stem = f"{prefix}r".upper() if self.regular else f"{prefix}r"
        self.names = {name: f"{self.stem}{index}" for index, name in enumerate(walk.names)}
        self.hoisted: list[str] = []

    def lines(self) -> tuple[str, ...]:
        own = [f"{new}: {self.write(self.rules[name], 0)}" for name, new in self.names.items()]
        return (*own, *self.hoisted)

    def write(self, node: Node, depth: int) -> str:
        if isinstance(node, Text):
            return lark_text(node.text, regular=self.regular)
        if isinstance(node, Chars):
            return f"/{class_text(node.ranges)}/"
        if isinstance(node, Ref):
            return self.names[node.name]
        if depth >= _DEEPEST:
            name = f"{self.stem}{len(self.names) + len(self.hoisted)}"
            self.hoisted.append("")  # keeps the number
            place = len(self.hoisted) - 1
            self.hoisted[place] = f"{name}: {self.write(node, 0)}"
            return name
        if isinstance(node, Repeat):
            return f"({self.write(node.item, depth + 1)}){_count(node.low, node.high)}" if node.high != 0 else '""'
        between = " " if isinstance(node, Sequence) else " | "
        return f"({between.join(self.write(item, depth + 1) for item in node.items)})"


def lark_text(text: str, *, regular: bool) -> str:
    """A literal: one terminal inside a terminal, one per character inside a rule, where the longest match would win."""
    if not text:
        return '""'
    codes = [escaped(ord(char)) for char in text]
    return f"/{''.join(codes)}/" if regular else " ".join(f"/{code}/" for code in codes)


def _count(low: int, high: int | None) -> str:
    if high is None:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    return "?" if (low, high) == (0, 1) else f"{{{low},{high}}}"
