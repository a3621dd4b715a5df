"""Regexes, JSON schemas, EBNF and structural tags on xgrammar.

Owns the matcher protocol over `xgrammar.GrammarMatcher` and the form in which a constraint is handed to it. Called by
`sgl.grammars.compiler`, which has checked the constraint before. xgrammar is optional; it is imported when this backend
is first used, and compiles in a process of its own (`helper.py`).

What differs from llguidance: white space `bounded` is at most one white-space character, which may be a line break; the
text of special tokens in structural tags is ordinary text; there is no Lark.

* End of sequence is kept apart (`engine_matcher.py`) and never shown to the library.
* A compilation has `max_compile_s` and `max_compile_bytes`; over them the helper is ended and the constraint refused.
* Forced text is tokenized canonically, without its last token, which more text might change.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sgl.errors import (
    ConfigError,
    ConstraintTooComplex,
    InvalidConstraint,
    InvalidGrammar,
    InvalidRegex,
    InvalidSchema,
    SglError,
    UnsupportedSchema,
)
from sgl.grammars import ebnf, structural_tag
from sgl.grammars.charsets import Range, complement, merged
from sgl.grammars.choices import Vocabulary
from sgl.grammars.engine_matcher import EngineMatcher
from sgl.grammars.helper import Helpers
from sgl.grammars.keyword_tables import FORMATS, TABLES, Kind, Support
from sgl.grammars.keywords import Schema, parse_schema
from sgl.grammars.matcher import Bitmask, StopReason, bitmask_words
from sgl.grammars.regex import Dialect, translate
from sgl.grammars.spec import Constraint, Ebnf, JsonSchema, Regex, StructuralTag
from sgl.limits import Limits

NAME = "xgrammar"

_WHITESPACE: dict[str, dict[str, Any]] = {
    "compact": {"any_whitespace": False, "separators": [",", ":"]},
    "bounded": {"any_whitespace": True, "max_whitespace_cnt": 1},
}


_OTHER = "use grammar_backend='llguidance', which takes far less for most constraints"


def is_installed() -> bool:
    """Whether xgrammar can be imported; it is not imported to find out."""
    return importlib.util.find_spec(NAME) is not None


class Backend:
    """xgrammar for one tokenizer.

    Args:
        vocabulary: bytes of tokens, end-of-sequence ids and canonical tokenization.

    Raises:
        ConfigError: xgrammar is not installed.
    """

    def __init__(self, vocabulary: Vocabulary, limits: Limits) -> None:
        if not is_installed():
            raise ConfigError(
                "grammar_backend is 'xgrammar', which is not installed",
                hint="pip install sgl[xgrammar]",
                param="grammar_backend",
            )
        import xgrammar

        self.limits = limits
        self.vocabulary = vocabulary
        texts = [vocabulary.token_bytes.get(token_id, b"") for token_id in range(vocabulary.vocab_size)]
        # Tokens without bytes are special to the library, and never allowed.
        self.tokenizer = xgrammar.TokenizerInfo(
            texts,
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.vocab_size,
            stop_token_ids=sorted(vocabulary.eos_ids),
        )
        first = {"tokenizer": self.tokenizer.serialize_json()}
        self.helper = Helpers("sgl.grammars.xgrammar_helper", first, limits.max_compile_bytes)

    def compile(self, constraint: Constraint) -> Grammar:
        """Compile a constraint that has passed its checks.

        Raises:
            InvalidRegex, InvalidSchema, InvalidGrammar: the library cannot read it.
            ConstraintTooComplex: over the time or memory of one compilation.
        """
        import xgrammar

        answer = self.helper.ask(self.request(constraint), self.limits.max_compile_s)
        if answer is None:
            raise ConstraintTooComplex(
                f"{NAME} did not compile the constraint within {self.limits.max_compile_s:g} s and "
                f"{self.limits.max_compile_bytes} bytes",
                hint=_OTHER,
            )
        if "error" in answer:
            raise _fault(constraint, answer["error"])
        return Grammar(self, xgrammar.CompiledGrammar.deserialize_json(answer["grammar"], self.tokenizer))

    def close(self) -> None:
        """End the helper process; the next compilation would start another."""
        self.helper.close()

    def request(self, constraint: Constraint) -> dict[str, Any]:
        """The message that asks the helper for it."""
        if isinstance(constraint, Regex):
            return {"kind": "regex", "pattern": regex_text(translate(constraint.pattern, limits=self.limits))}
        if isinstance(constraint, JsonSchema):
            schema = rewritten(parse_schema(constraint.schema, self.limits), self.limits)
            return {"kind": "schema", "schema": json.dumps(schema), **_WHITESPACE[constraint.whitespace]}
        if isinstance(constraint, Ebnf):
            return {"kind": "ebnf", "grammar": ebnf_text(ebnf.parse(constraint.grammar, self.limits))}
        if isinstance(constraint, StructuralTag):
            return {"kind": "tag", "tag": json.dumps(self.tag(constraint))}
        raise InvalidConstraint(
            f"{NAME} compiles no {type(constraint).__name__}", hint="use grammar_backend 'llguidance', or EBNF"
        )

    def tag(self, constraint: StructuralTag) -> dict[str, Any]:
        """A structural tag in the library's form, which is the current one with the contents rewritten."""
        import msgspec

        spaces = {"max_whitespace_cnt": 0 if constraint.whitespace == "compact" else 1}

        def mapped(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [mapped(item) for item in value]
            if not isinstance(value, dict):
                return value
            if value.get("type") == "json_schema":
                return {**value, "json_schema": rewritten(value["json_schema"], self.limits), **spaces}
            if value.get("type") == "regex":
                if value.get("excludes"):
                    raise InvalidConstraint(
                        f"{NAME} cannot keep texts out of the regex {value['pattern']!r} of a structural tag",
                        hint="use grammar_backend 'llguidance', or leave 'excludes' out",
                    )
                return {"type": "regex", "pattern": regex_text(translate(value["pattern"], limits=self.limits))}
            if value.get("type") == "grammar":
                return {**value, "grammar": ebnf_text(ebnf.parse(value["grammar"], self.limits))}
            return {key: mapped(item) for key, item in value.items()}

        tree = msgspec.to_builtins(structural_tag.parse(constraint.tag, self.limits))
        return {"type": "structural_tag", "format": mapped(tree)}


def _fault(constraint: Constraint, message: str) -> SglError:
    lines = [line for line in message.strip().splitlines() if line]
    shown = re.sub(r"^\[[^\]]*\] \S+: ", "", lines[0] if lines else "unknown")[:300]
    if "memory" in shown.lower() or "bad_alloc" in shown:
        return ConstraintTooComplex(f"{NAME} had not enough memory to compile the constraint", hint=_OTHER)
    kind = {Regex: InvalidRegex, JsonSchema: InvalidSchema}.get(type(constraint), InvalidGrammar)
    if "invalid range" in shown.lower():
        message = "nothing satisfies the JSON schema: bounds of a number contradict each other"
        return kind(message, hint="loosen them", pointer="")
    return kind(f"{NAME} cannot compile the constraint: {shown}", hint=f"simplify it, or {_OTHER}", pointer="")


# --- constraints in the library's own form ----------------------------------------------------------------------------


def regex_text(pattern: str) -> str:
    r"""A translated pattern (see `sgl.grammars.regex`) in the library's dialect.

    Example:
        >>> print(regex_text(r"[a-z\x{2D}](?s:.*)"))
        [a-z\u002d][\u0000-\U0010ffff]*
    """
    pattern = re.sub(r"\(\?s:\.(\*?)\)", r"[\\x{0}-\\x{10FFFF}]\1", pattern)
    return re.sub(r"\\x\{([0-9A-Fa-f]+)\}", lambda found: _escape(int(found[1], 16)), pattern)


_UNSAFE = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
"""What a JSON string writes only as an escape."""
_ITEM = r"(?:\\x\{[0-9A-F]+\}|[A-Za-z0-9])"


def string_regex(pattern: str) -> str:
    r"""A translated pattern as a pattern of what stands between the quotes, which is what the library matches.

    Quotes, backslashes and control characters are written as escapes where the pattern names them, and left out of
    classes, which allows less but nothing wrong. Characters past ASCII are written as they are.

    Raises:
        UnsupportedSchema: a class of nothing else.

    Example:
        >>> print(string_regex(r"\x{22}[\x{21}-\x{23}\x{1F600}]"))
        \u005c\u0022[\u0021\u0023😀]
    """

    def item(found: re.Match[str]) -> str:
        if not found[0].startswith("["):
            return "".join(_in_string(ord(char)) for char in json.dumps(chr(_code(found[0])), ensure_ascii=False)[1:-1])
        ranges = [(_code(low), _code(high or low)) for low, high in re.findall(f"({_ITEM})(?:-({_ITEM}))?", found[0])]
        kept = complement(merged([*complement(merged(ranges)), *_UNSAFE]))
        if not kept:
            raise UnsupportedSchema(
                f"{NAME} cannot write a pattern of escapes only", hint="use grammar_backend='llguidance'", pointer=""
            )
        return _class(kept, _in_string)

    pattern = re.sub(r"\(\?s:\.(\*?)\)", r"[\\x{0}-\\x{10FFFF}]\1", pattern)
    return re.sub(rf"\[(?:{_ITEM}|-)*\]|\\x\{{[0-9A-F]+\}}", item, pattern)


def _code(text: str) -> int:
    return int(text[3:-1], 16) if text.startswith("\\") else ord(text)


def _escape(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _in_string(code: int) -> str:
    """A code point in the `pattern` of a schema, whose reader takes no escape of eight digits."""
    return f"\\u{code:04x}" if code < 0x80 else chr(code)


def _class(ranges: Sequence[Range], written: Callable[[int], str] = _escape) -> str:
    # A range of characters never holds surrogates, which no text has.
    halves = [half for low, high in ranges for half in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high))]
    parts = [f"{written(a)}-{written(b)}" if a < b else written(a) for a, b in halves if a <= b]
    return f"[{''.join(parts)}]"


_CHARACTER = rf"(?:{_class(complement(merged(_UNSAFE)), _in_string)}|\u005c[\u0022\u005cbfnrt])"
"""One character between the quotes, as it is or as an escape."""
_NOTHING = "(?:é){0}"
"""In a pattern, keeps it from the library's automaton of ASCII patterns, in which an optional repeat is also what
follows it (`(a[0-9]+)?` matches "1"); its other reader is exact, and reads any pattern that has such a character."""


def _whole(pattern: str) -> str:
    return f"^(?:{pattern}){_NOTHING}$"


def ebnf_text(rules: ebnf.Rules) -> str:
    r"""Rules in the library's notation of EBNF.

    Example:
        >>> print(ebnf_text(ebnf.parse('root ::= "a"{2} [^b]')))
        root ::= ("\u0061"{2,2} [\u0000-\u0061\u0063-\ud7ff\ue000-\U0010ffff])
    """
    return "\n".join(f"{name} ::= {_ebnf_node(node)}" for name, node in rules.items())


def _ebnf_node(node: ebnf.Node) -> str:
    if isinstance(node, ebnf.Text):
        return '"' + "".join(_escape(ord(char)) for char in node.text) + '"'
    if isinstance(node, ebnf.Chars):
        return _class(node.ranges)
    if isinstance(node, ebnf.Ref):
        return node.name
    if isinstance(node, ebnf.Repeat):
        if node.high == 0:
            return '""'
        count = f"{{{node.low},{'' if node.high is None else node.high}}}"
        return (
            f"({_ebnf_node(node.item)}){count}"
            if not isinstance(node.item, ebnf.Text)
            else f"{_ebnf_node(node.item)}{count}"
        )
    between = " " if isinstance(node, ebnf.Sequence) else " | "
    return f"({between.join(_ebnf_node(item) for item in node.items)})"


_WHOLE: dict[str, Callable[[float], int]] = {
    "minimum": math.ceil,
    "exclusiveMinimum": math.floor,
    "maximum": math.floor,
    "exclusiveMaximum": math.ceil,
}
"""Bounds of integers as whole numbers, which is all that the library takes."""


def rewritten(schema: Schema, limits: Limits) -> Schema:
    """The schema as xgrammar is to see it: annotations left out, patterns in its dialect, formats as patterns.

    Example:
        >>> from sgl.limits import DEFAULT_LIMITS
        >>> rewritten({"title": "t", "type": "string", "pattern": "^a$"}, DEFAULT_LIMITS)
        {'type': 'string', 'pattern': '^(?:a)(?:é){0}$'}
    """
    if isinstance(schema, bool):
        return schema
    result: dict[str, Any] = {}
    for word, value in schema.items():
        row = TABLES[NAME].get(word)
        if row is None or row.support is not Support.ENFORCED:
            continue
        if word in ("pattern", "format"):
            text = str(FORMATS[NAME][value]) if word == "format" else value
            word, value = "pattern", _whole(string_regex(translate(text, dialect=Dialect.ECMA, limits=limits)))
        elif word in ("minLength", "maxLength"):
            # The library's own counting lets control characters through.
            least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
            word, value = "pattern", _whole(f"{_CHARACTER}{{{least},{'' if most is None else int(most)}}}")
        elif row.kind is Kind.SCHEMA:
            value = rewritten(value, limits)
        elif word in _WHOLE and schema.get("type") == "integer":
            value = _WHOLE[word](value)
        elif row.kind is Kind.COUNT:
            value = int(value)  # 2.0 is an integer to JSON schema, and none to the library
        elif row.kind is Kind.SCHEMAS:
            value = [rewritten(child, limits) for child in value]
        elif row.kind is Kind.SCHEMA_MAP:
            value = {name: rewritten(child, limits) for name, child in value.items()}
        result[word] = value
    # A required name is written only where it stands among the properties.
    rest = result.get("additionalProperties", {})
    missing = [name for name in result.get("required", ()) if name not in result.get("properties", {})]
    if missing:
        result["properties"] = {**result.get("properties", {}), **dict.fromkeys(missing, rest)}
    return result


# --- matching ---------------------------------------------------------------------------------------------------------


class Grammar:
    """A constraint compiled for one tokenizer."""

    def __init__(self, backend: Backend, compiled: Any) -> None:
        self.backend = backend
        self._compiled = compiled

    def matcher(self) -> XGrammarMatcher:
        """A new matcher at the start."""
        import xgrammar

        return XGrammarMatcher(self.backend, xgrammar.GrammarMatcher(self._compiled))


class XGrammarMatcher(EngineMatcher):
    """Follows one sequence through `xgrammar.GrammarMatcher`."""

    def __init__(self, backend: Backend, inner: Any, num_tokens: int = 0, num_eos: int = 0) -> None:
        super().__init__(backend.vocabulary, num_tokens, num_eos)
        self._backend = backend
        self._library = inner

    def clone(self) -> XGrammarMatcher:
        """See `Matcher.clone`."""
        return XGrammarMatcher(self._backend, self._library.fork(), self._num_tokens, self._num_eos)

    def forced_tokens(self) -> list[int]:
        """See `Matcher.forced_tokens`."""
        if self._num_eos or self.is_complete():
            return []
        forced = self._vocabulary.encode(self._library.find_jump_forward_string().encode())[:-1]
        return forced[: self.validate_tokens(forced)]

    def is_complete(self) -> bool:
        """See `Matcher.is_complete`."""
        return bool(self._library.is_completed())

    def stop_reason(self) -> StopReason:
        """See `Matcher.stop_reason`."""
        if self._num_eos:
            return StopReason.EOS
        if (self._allowed() & ~self._vocabulary.eos_row).any():
            return StopReason.NOT_STOPPED
        return StopReason.COMPLETE if self.is_complete() else StopReason.DEAD_END

    def _consume(self, token_id: int) -> bool:
        return token_id in self._vocabulary.token_bytes and bool(self._library.accept_token(token_id))

    def _take_back(self, num_tokens: int) -> None:
        self._library.rollback(num_tokens)

    def _compute_row(self) -> Bitmask:
        rows = np.full((1, bitmask_words(self._vocabulary.vocab_size)), -1, dtype=np.int32)
        self._library.fill_next_token_bitmask(rows, 0)
        # Also where nothing is masked, ids past the vocabulary are not allowed; nor are ends, which have no bytes.
        row: Bitmask = rows[0] & self._vocabulary.token_row
        return row
