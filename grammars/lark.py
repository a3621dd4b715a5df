"""Grammars in llguidance's dialect of Lark: what must be checked before the engine reads one.

Owns a scanner of the dialect and the checks on size, depth and embedded JSON schemas. Called by
`sgl.grammars.compiler` and by the backend. The engine itself reads the grammar; it follows rules by recursion on a
stack of fixed size, so depth and number of rules are bounded here, and it would ignore unknown keywords of a `%json`
schema, so those go through the keyword walker first.

Fails with `InvalidGrammar` (`line`, `column`), the errors of `check_schema` and `ConstraintTooComplex`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from sgl.errors import ConstraintTooComplex, InvalidGrammar, SglError
from sgl.grammars.ebnf import line_and_column
from sgl.grammars.keywords import check_schema
from sgl.limits import DEFAULT_LIMITS, Limits

MAX_RULES = 1000
"""Definitions and nested groups in one grammar."""

_TOKEN = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\\n])*")|(?P<comment>//[^\n]*|\#[^\n]*)|(?P<regex>/(?:\\.|[^/\\\n])+/)"""
    r"""|(?P<json>%json\b)|(?P<word>%[a-z]+)|(?P<rule>^[ \t]*[?!]*[A-Za-z_][^:\n"/]*+:)"""
    r"""|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<other>.|\n)""",
    re.MULTILINE,
)
_REFUSED = {"%import": "names are not loaded from files; define the terminal"}


def check(text: str, backend: str, limits: Limits = DEFAULT_LIMITS) -> None:
    """Check size, depth, directives and embedded schemas.

    Raises:
        InvalidGrammar, InvalidSchema, UnsupportedSchema, ConstraintTooComplex: see the module.

    Example:
        >>> check('start: "a" | %json {"type": "integer"}', "llguidance")
        >>> check('start: %json {"not": {}}', "llguidance")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        sgl.errors.UnsupportedSchema: 'not' at /not is not enforced by llguidance: ..., in the Lark grammar at ...
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > limits.max_schema_bytes:
        raise ConstraintTooComplex(
            f"the Lark grammar has {size} bytes; at most {limits.max_schema_bytes} are allowed",
            hint="split the generation in two steps",
        )
    depth = count = 0
    for found in _tokens(text):
        if found.lastgroup == "word" and found[0] in _REFUSED:
            raise _error(text, found.start(), f"uses {found[0]}", _REFUSED[found[0]])
        if found.lastgroup == "open":
            depth += 1
            count += depth > 1
        elif found.lastgroup == "close":
            depth = max(0, depth - 1)
        count += found.lastgroup == "rule"
        if depth > limits.max_json_depth or count > MAX_RULES:
            raise ConstraintTooComplex(
                f"the Lark grammar nests more than {limits.max_json_depth} groups, or has more than {MAX_RULES} rules",
                hint="simplify it",
            )

    def checked(schema_text: str, schema: Any) -> Any:
        check_schema(schema_text, backend, limits, checkable=False)
        return schema

    map_schemas(text, checked)


def map_schemas(text: str, change: Callable[[str, Any], Any]) -> str:
    """The grammar with each `%json` schema replaced by `change(its text, its value)`; lines keep their numbers.

    Raises:
        InvalidGrammar: what follows `%json` is not JSON.
        SglError: what `change` raises, with the place added.

    Example:
        >>> map_schemas('start: %json {"a": 1} "x"', lambda text, value: {})
        'start: %json {} "x"'
    """
    parts, at = [], 0
    for found in _tokens(text):
        if found.lastgroup != "json" or found.start() < at:
            continue
        start = found.end() + len(text[found.end() :]) - len(text[found.end() :].lstrip())
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            raise _error(text, start, f"has a %json that is not JSON ({error})", "mend it") from None
        try:
            changed = change(text[start:end], value)
        except SglError as error:
            line, column = line_and_column(text, start)
            raise type(error)(
                f"{error.message}, in the Lark grammar at line {line}, column {column}",
                hint=error.hint,
                **{**error.details, "line": line, "column": column},
            ) from None
        parts += [text[at : found.end()], " ", json.dumps(changed), "\n" * text[found.end() : end].count("\n")]
        at = end
    return "".join([*parts, text[at:]])


def _tokens(text: str) -> Iterator[re.Match[str]]:
    """The tokens of a grammar, without those inside a `%json` value."""
    at = 0
    while found := _TOKEN.match(text, at):
        yield found
        at = found.end()
        if found.lastgroup == "json":
            start = at + len(text[at:]) - len(text[at:].lstrip())
            try:
                at = json.JSONDecoder().raw_decode(text, start)[1]
            except (ValueError, RecursionError):
                at = start  # `map_schemas` says what is wrong


def _error(text: str, at: int, what: str, hint: str) -> InvalidGrammar:
    line, column = line_and_column(text, at)
    return InvalidGrammar(
        f"the Lark grammar {what}, at line {line}, column {column}", hint=hint, line=line, column=column
    )
