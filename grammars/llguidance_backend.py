"""Regexes, JSON schemas and grammars on llguidance.

Owns the two halves of the matcher protocol over `llguidance.LLMatcher`, and the form in which a constraint is handed to
it. Called by `sgl.grammars.compiler`, which has checked the constraint before.

Where the library and the protocol differ, the protocol holds:

* End of sequence is kept apart (`engine_matcher.py`) and never shown to the library, which refuses it once a match is
  final.
* The library's mask narrows a forced position to the canonical token, while its `consume` takes any split of the same
  text. Here both say the same: at a forced position only the canonical token is allowed.
* An id outside the vocabulary, or rolling back too far, puts the library's matcher into an error for good; both are
  stopped before they reach it.
* A limit that the library hits while decoding ends the matcher with `StopReason.LIMIT`, and nothing is allowed.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import llguidance
import numpy as np

from sgl.errors import (
    ConstraintTooComplex,
    InvalidConstraint,
    InvalidGrammar,
    InvalidRegex,
    InvalidSchema,
    SglError,
    UnsupportedSchema,
)
from sgl.grammars.choices import Vocabulary
from sgl.grammars.ebnf import parse as parse_ebnf
from sgl.grammars.ebnf import to_lark
from sgl.grammars.engine_matcher import EngineMatcher
from sgl.grammars.helper import Helpers
from sgl.grammars.keyword_tables import FORMATS, TABLES, Kind, Support
from sgl.grammars.keywords import CHECK_HINT, Schema, parse_schema, subschemas
from sgl.grammars.lark import map_schemas
from sgl.grammars.llguidance_tags import TagWriter
from sgl.grammars.matcher import Bitmask, StopReason, bitmask_words
from sgl.grammars.regex import Dialect, translate
from sgl.grammars.spec import Constraint, Ebnf, JsonSchema, Lark, Regex, StructuralTag
from sgl.grammars.structural_tag import parse as parse_tag
from sgl.limits import Limits

NAME = "llguidance"
MAX_FORCED = 1024
"""Forced tokens that are told at once."""

_WHITESPACE: dict[str, dict[str, Any]] = {
    "compact": {"whitespace_flexible": False},
    "bounded": {"whitespace_pattern": r"\x20"},  # at most once at each place
}
_BYTES_PER_LEXER_STATE = 2048
_FUEL_PER_S = 5_000_000
"""Lexer fuel that a second is worth; the library documents 50,000 per millisecond for regex trees alone, but compiling
costs several times as much on a slow core."""

_COMPLEX = ("too many", "too complex", "too large", "too big", "fuel", "exceed", "limit", "recursion")
_UNSATISFIABLE = ("unsatisfiable", "regex is empty")
_UNDECIDED = "unable to determine"
_UNSUPPORTED = ("not supported", "unimplemented", "only supported", "not disjoint", "unsupported", "unknown format")


class Backend:
    """llguidance for one tokenizer.

    Args:
        tokenizer_json: text of a `tokenizer.json`.
        vocab_size: number of logits; ids past the tokenizer's vocabulary are never allowed.
        eos_ids: ids that end a sequence.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int], limits: Limits) -> None:
        known = _largest_id(tokenizer_json) + 1
        self.limits = limits
        self._executors: dict[int, Any] = {}
        self.num_words = bitmask_words(max(known, vocab_size))
        self.tokenizer = llguidance.LLTokenizer(
            tokenizer_json, n_vocab=max(known, vocab_size), eos_token=list(eos_ids) or None
        )
        tokens = {
            token_id: self.tokenizer.decode_bytes([token_id])
            for token_id in range(min(known, vocab_size))
            if not self.tokenizer.is_special_token(token_id)
        }
        self.specials = {
            text: token_id
            for text, token_id in _added_tokens(tokenizer_json).items()
            if token_id < vocab_size and token_id not in eos_ids and self.tokenizer.is_special_token(token_id)
        }
        self.vocabulary = Vocabulary(tokens, vocab_size, eos_ids, self.tokenizer.tokenize_bytes, self.specials)
        eos_row = self.vocabulary.eos_row
        self._words_of_ends = [(int(word), ~eos_row[word]) for word in np.flatnonzero(eos_row)]
        parser_limits = {
            "initial_lexer_fuel": int(limits.max_compile_s * _FUEL_PER_S),
            "step_lexer_fuel": int(limits.max_compile_s * _FUEL_PER_S),
            "max_lexer_states": max(1000, limits.max_compile_bytes // _BYTES_PER_LEXER_STATE),
            "verbose_errors": False,
        }
        self.parser_limits = llguidance.LLParserLimits(**parser_limits)
        self.helpers = Helpers("sgl.grammars.llguidance_helper", {"limits": parser_limits}, limits.max_compile_bytes)

    def compile(self, constraint: Constraint) -> Grammar:
        """Compile a constraint that has passed its checks.

        Raises:
            InvalidRegex, InvalidSchema, InvalidGrammar: nothing can satisfy it, or the library cannot read it.
            UnsupportedSchema: a combination of keywords that the library cannot merge.
            ConstraintTooComplex: over a limit of the library.
        """
        if isinstance(constraint, Regex):
            text = translate(constraint.pattern, limits=self.limits)
            # Handed over as a regex of the grammar language, with no shorthand left that its dialect reads otherwise.
            source = llguidance.LLMatcher.grammar_from_regex(text)
        elif isinstance(constraint, JsonSchema):
            schema = rewritten(parse_schema(constraint.schema, self.limits), self.limits)
            schema = {} if schema is True else schema  # the library takes an object at the root
            source = llguidance.LLMatcher.grammar_from_json_schema(
                json.dumps(schema), overrides=_WHITESPACE[constraint.whitespace]
            )
        elif isinstance(constraint, (Ebnf, Lark, StructuralTag)):
            source = llguidance.LLMatcher.grammar_from_lark(self.lark(constraint))
        else:
            raise InvalidConstraint(f"llguidance compiles no {type(constraint).__name__} here")
        is_hard = _merges_patterns(source, isinstance(constraint, Lark))
        if is_hard and self.helpers.ask({"grammar": source}, self.limits.max_compile_s) is None:
            raise ConstraintTooComplex(
                f"{NAME} did not compile the constraint within {self.limits.max_compile_s:g} s and "
                f"{self.limits.max_compile_bytes} bytes",
                hint="merge fewer patterns: with allOf, beside $ref, in patternProperties, or by & and ~ in Lark",
            )
        matcher = llguidance.LLMatcher(self.tokenizer, source, log_level=0, limits=self.parser_limits)
        if matcher.is_error():
            raise self.fault(constraint, matcher.get_error())
        grammar = Grammar(self, matcher)
        first = grammar.matcher()
        row = np.zeros((1, bitmask_words(self.vocabulary.vocab_size)), dtype=np.int32)
        first.fill(row, 0)
        if first.error():
            raise self.fault(constraint, first.error())
        if not row.any() and not first.is_complete():
            raise self.fault(constraint, "unsatisfiable: nothing can be written at the start")
        return grammar

    def close(self) -> None:
        """End the threads that computed masks, and the processes that tried compilations."""
        self._executors.clear()
        self.helpers.close()

    def compute_rows(self, matchers: Sequence[tuple[Any, int]], rows: Bitmask, num_threads: int) -> None:
        """The library's masks of (its matcher, row), in `rows`, shape `[n, num_words]`."""
        if num_threads not in self._executors:
            self._executors[num_threads] = llguidance.LLExecutor(num_threads=num_threads)
        self._executors[num_threads].unsafe_compute_mask_ptr(
            list(matchers), rows.ctypes.data, rows.strides[0], len(rows)
        )

    def without_ends(self, rows: Bitmask, places: Sequence[int]) -> Bitmask:
        """Rows cut to the model's vocabulary; those at `places`, as the library computed them, are without
        end-of-sequence ids from now on."""
        rows = rows[:, : len(self.vocabulary.eos_row)]
        for word, others in self._words_of_ends:
            rows[places, word] &= others
        return rows

    def lark(self, constraint: Ebnf | Lark | StructuralTag) -> str:
        """A grammar in the library's dialect."""
        if isinstance(constraint, Ebnf):
            written = to_lark(parse_ebnf(constraint.grammar, self.limits))
            return "\n".join([f"start: {written.start}", *written.lines])
        if isinstance(constraint, Lark):
            return map_schemas(constraint.grammar, lambda text, schema: self.embedded(schema, "bounded"))
        writer = TagWriter(lambda schema: self.embedded(schema, constraint.whitespace), self.specials, self.limits)
        return writer.grammar(parse_tag(constraint.tag, self.limits))

    def embedded(self, schema: Schema, whitespace: str) -> dict[str, Any]:
        """A schema as it stands inside a grammar."""
        inner = rewritten(schema, self.limits)
        return {**({} if isinstance(inner, bool) else inner), "x-guidance": _WHITESPACE[whitespace]}

    def fault(self, constraint: Constraint, message: str) -> SglError:
        """The library's message as a typed error."""
        shown = message.strip().splitlines()[0][:300] if message.strip() else "unknown"
        low = _QUOTED.sub("", shown).lower()  # without what the caller wrote
        if isinstance(constraint, (Ebnf, Lark, StructuralTag)):
            return _grammar_fault(constraint, shown)
        what = "regex" if isinstance(constraint, Regex) else "JSON schema"
        pointer = "" if isinstance(constraint, Regex) else self.pointer(constraint, message)
        place = f" at {pointer}" if pointer else ""
        if _UNDECIDED in low:
            return ConstraintTooComplex(
                f"{NAME} cannot tell whether anything satisfies the {what}{place}: its patterns are too many together",
                hint="merge fewer of them: with allOf, beside anyOf and $ref, in patternProperties",
                pointer=pointer,
            )
        if any(word in low for word in _UNSATISFIABLE):
            kind = InvalidRegex if isinstance(constraint, Regex) else InvalidSchema
            return kind(
                f"nothing satisfies the {what}{place}: {_plain(shown)}",
                hint="loosen the conflicting part",
                pointer=pointer,
            )
        if any(word in low for word in _UNSUPPORTED) and not isinstance(constraint, Regex):
            return UnsupportedSchema(
                f"the JSON schema{place} cannot be enforced by {NAME}: {_plain(shown)}",
                hint="use anyOf, or make the branches exclusive by a const property, or write the combination out; "
                + CHECK_HINT,
                pointer=pointer,
            )
        if any(word in low for word in _COMPLEX):
            return ConstraintTooComplex(
                f"the {what}{place} is too complex: {shown}",
                hint="lower its repeat counts and lengths",
                pointer=pointer,
            )
        if isinstance(constraint, Regex):
            return InvalidRegex(f"the regex cannot be compiled: {shown}", hint="simplify it", pointer="")
        return InvalidSchema(f"the JSON schema{place} cannot be compiled: {shown}", hint="mend it", pointer=pointer)

    def pointer(self, constraint: Constraint, message: str) -> str:
        """Where the first keyword stands that the message names; the root if it names none."""
        if not isinstance(constraint, JsonSchema):
            return ""
        message = message.replace("min/maxProperties", "minProperties maxProperties").replace(
            "patternProperty", "patternProperties"
        )
        places = list(subschemas(parse_schema(constraint.schema, self.limits)))
        # The word that comes first, and the longest there: "oneOf ... approximate it with anyOf"; "minProperties".
        words = [word for word in TABLES[NAME] if len(word) > 4 and word in message]
        for word in sorted(words, key=lambda word: (message.index(word), -len(word))):
            for pointer, schema in places:
                if isinstance(schema, dict) and word in schema:
                    return f"{pointer}/{word}"
        return ""


def _plain(shown: str) -> str:
    """The library's message without its own options and its own form of a regex.

    Example:
        >>> _plain("oneOf is not supported. Enable 'coerce_one_of' option"), _plain("Regex is empty: (And (x))")
        ('oneOf is not supported', 'no text matches all its patterns, lengths and formats')
    """
    if "regex is empty" in shown.lower():
        return "no text matches all its patterns, lengths and formats"
    return re.sub(r"\.? Enable '\w+' option.*", "", shown)


_QUOTED = re.compile(r"""\"[^"]*"|'[^']*'|`[^`]*`|/[^/]*/""")
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_NAMES: dict[type, str] = {Ebnf: "EBNF", Lark: "Lark grammar", StructuralTag: "structural tag"}


def _grammar_fault(constraint: Ebnf | Lark | StructuralTag, shown: str) -> SglError:
    """The library's message about a grammar; its place means something only in a grammar of the caller's own."""
    name, low = _NAMES[type(constraint)], _QUOTED.sub("", shown).lower()
    if any(word in low for word in _COMPLEX):
        return ConstraintTooComplex(f"the {name} is too complex: {shown}", hint="lower its repeat counts")
    if any(word in low for word in _UNSATISFIABLE):
        return InvalidGrammar(f"nothing satisfies the {name}: {shown}", hint="loosen the conflicting part")
    found = _PLACE.match(shown)
    if "no start rule" in low or "empty grammar" in low:
        return InvalidGrammar(f"the {name} has no rule 'start'", hint="define it: start: ...")
    if "noextensionbias" in low:
        return InvalidGrammar(f"the {name} has a rule that only leads back to itself", hint="give it text to end in")
    if not found or not isinstance(constraint, Lark):
        return InvalidGrammar(f"the {name} cannot be compiled: {shown}", hint="simplify it")
    line, column = int(found[1]), int(found[2])
    return InvalidGrammar(
        f"the {name} cannot be read at line {line}, column {column}: {shown[found.end() :]}",
        hint="mend the grammar there",
        line=line,
        column=column,
    )


_JOINED = ('"allOf"', '"oneOf"', '"patternProperties"')
_JOINING = ('"anyOf"', '"$ref"')
_PATTERNS = ('"pattern"', '"format"', '"multipleOf"')


def _merges_patterns(source: str, is_lark: bool) -> bool:
    """Whether a grammar as it is handed over may have patterns merged or told apart, which the library's limits do not
    bound. It may say so of one that does not. In Lark anything may be written."""
    if is_lark:
        return True
    is_joining = any(word in source for word in _JOINING) and any(word in source for word in _PATTERNS)
    return is_joining or any(word in source for word in _JOINED)


def rewritten(schema: Schema, limits: Limits) -> Schema:
    """The schema as llguidance is to see it: annotations left out, patterns in its own dialect, formats exact.

    Example:
        >>> from sgl.limits import DEFAULT_LIMITS
        >>> rewritten({"title": "t", "type": "string", "pattern": "^a$"}, DEFAULT_LIMITS)
        {'type': 'string', 'pattern': '^(?:a)$'}
    """
    if isinstance(schema, bool):
        return schema
    result: dict[str, Any] = {}
    added: list[Schema] = []
    for word, value in schema.items():
        row = TABLES[NAME].get(word)
        if row is None or row.support is not Support.ENFORCED:
            continue
        if word == "pattern":
            value = _anchored(value, limits)
        elif word == "format" and FORMATS[NAME][value] is not None:
            added.append({"pattern": _anchored(str(FORMATS[NAME][value]), limits)})
            continue
        elif word == "patternProperties":
            value = {_anchored(name, limits): rewritten(child, limits) for name, child in value.items()}
        elif row.kind is Kind.SCHEMA:
            value = rewritten(value, limits)
        elif row.kind is Kind.COUNT:
            value = int(value)  # 2.0 is an integer to JSON schema, and none to the library
        elif row.kind is Kind.SCHEMAS:
            value = [rewritten(child, limits) for child in value]
        elif row.kind is Kind.SCHEMA_MAP:
            value = {name: rewritten(child, limits) for name, child in value.items()}
        result[word] = value
    if added:
        result["allOf"] = [*result.get("allOf", ()), *added]
    return result


def _anchored(pattern: str, limits: Limits) -> str:
    return f"^(?:{translate(pattern, dialect=Dialect.ECMA, limits=limits)})$"


def _largest_id(tokenizer_json: str) -> int:
    data = json.loads(tokenizer_json)
    vocab = data["model"]["vocab"]
    # Byte-pair and word-piece vocabularies map text to id; unigram ones list (text, score) in the order of ids.
    known = max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1
    return max([known, *(int(token["id"]) for token in data.get("added_tokens", ()))])


def _added_tokens(tokenizer_json: str) -> dict[str, int]:
    added = json.loads(tokenizer_json).get("added_tokens", ())
    return {token["content"]: int(token["id"]) for token in added if token["content"]}


class Grammar:
    """A constraint compiled for one tokenizer: a matcher at the start, which is only ever copied."""

    def __init__(self, backend: Backend, start: Any) -> None:
        self.backend = backend
        self._start = start
        self._lock = threading.Lock()

    def matcher(self) -> LLGuidanceMatcher:
        """A new matcher at the start."""
        with self._lock:
            return LLGuidanceMatcher(self.backend, self._start.deep_copy())


class _State(NamedTuple):
    """What the library says of a position: that nothing can follow, that this is for a limit or fault of its own, and
    that the text so far is a full match."""

    is_stopped: bool
    is_error: bool
    is_complete: bool


class _Forced(NamedTuple):
    """A run of forced tokens, and how many of them were consumed."""

    ids: list[int]
    num_taken: int = 0


class LLGuidanceMatcher(EngineMatcher):
    """Follows one sequence through `llguidance.LLMatcher`."""

    def __init__(self, backend: Backend, inner: Any, num_tokens: int = 0, num_eos: int = 0) -> None:
        super().__init__(backend.vocabulary, num_tokens, num_eos)
        self._backend = backend
        self._library = inner
        self._forced: _Forced | None = None
        self._left: _Forced | None = None  # of the forced ones, behind the token that was just consumed
        self._state: _State | None = None

    @staticmethod
    def prepare(matchers: Sequence[LLGuidanceMatcher], num_threads: int, bitmask: Bitmask, rows: Sequence[int]) -> None:
        """Compute the rows of many matchers together (see `sgl.grammars.matcher.prepare`)."""
        groups: dict[tuple[int, bool], list[tuple[LLGuidanceMatcher, int]]] = {}
        for matcher, row in zip(matchers, rows, strict=True):
            if matcher._row is None and not matcher._num_eos and not matcher._here().is_stopped:
                backend = matcher._backend
                is_direct = row >= 0 and bitmask.shape[1] == backend.num_words == len(backend.vocabulary.eos_row)
                groups.setdefault((id(backend), is_direct), []).append((matcher, row))
        for (_, is_direct), group in groups.items():
            backend = group[0][0]._backend
            if is_direct:
                places, target = [row for _, row in group], bitmask
            else:
                places = list(range(len(group)))
                target = np.zeros((len(group), backend.num_words), dtype=np.int32)
            backend.compute_rows(
                [(matcher._library, place) for (matcher, _), place in zip(group, places, strict=True)],
                target,
                num_threads,
            )
            words = backend.without_ends(target, places)
            for (matcher, row), place in zip(group, places, strict=True):
                own = words[place]
                if matcher._library.is_error():
                    own[:] = 0
                    matcher._state = None
                matcher._row = matcher._with_ends(own)
                matcher._written = (id(bitmask), row) if is_direct else None

    def clone(self) -> LLGuidanceMatcher:
        """See `Matcher.clone`."""
        return LLGuidanceMatcher(self._backend, self._library.deep_copy(), self._num_tokens, self._num_eos)

    def forced_tokens(self) -> list[int]:
        """See `Matcher.forced_tokens`."""
        if self._num_eos:
            return []
        ids, taken = self._forced_here()
        return ids[taken : taken + MAX_FORCED]

    def is_complete(self) -> bool:
        """See `Matcher.is_complete`."""
        return self._here().is_complete

    def stop_reason(self) -> StopReason:
        """See `Matcher.stop_reason`."""
        if self._num_eos:
            return StopReason.EOS
        state = self._here()
        if state.is_error:
            return StopReason.LIMIT
        complete = state.is_complete
        if not state.is_stopped:
            # Whether the vocabulary lacks a byte that must come, only the mask tells, which is computed beside the
            # forward; the draw from an empty one fails as a dead end.
            if not complete:
                return StopReason.NOT_STOPPED
            if (self._allowed() & ~self._vocabulary.eos_row).any():
                return StopReason.NOT_STOPPED
            if self._here().is_error:
                return StopReason.LIMIT
        return StopReason.COMPLETE if complete else StopReason.DEAD_END

    def error(self) -> str:
        """The library's message when a limit was hit; empty otherwise."""
        return str(self._library.get_error()) if self._library.is_error() else ""

    def _consume(self, token_id: int) -> bool:
        if not self._is_allowed(token_id) or self._library.try_consume_tokens([token_id]) != 1:
            return False
        if self._forced is not None:
            ids, taken = self._forced
            # The run is as long as the text that is forced: asking for the rest at each token would be quadratic.
            if taken + 1 < len(ids) and ids[taken] == token_id:
                self._left = _Forced(ids, taken + 1)
        return True

    def _take_back(self, num_tokens: int) -> None:
        self._library.rollback(num_tokens)

    def _moved(self) -> None:
        super()._moved()
        self._forced, self._left, self._state = self._left, None, None

    def _here(self) -> _State:
        """The library's state of this position, asked for once."""
        if self._state is None:
            library = self._library
            is_stopped = library.is_stopped()
            is_error = is_stopped and library.is_error()  # an error is a stop
            self._state = _State(is_stopped, is_error, not is_error and library.is_accepting())
        return self._state

    def _forced_here(self) -> _Forced:
        state = self._here()
        if state.is_stopped or state.is_complete:
            return _Forced([])
        if self._forced is None:
            self._forced = _Forced(list(self._library.compute_ff_tokens()))
        return self._forced

    def _is_allowed(self, token_id: int) -> bool:
        row = self._row
        if row is not None or token_id not in self._vocabulary.token_bytes:
            # Of a drawn token the mask is there. Of a special token that a grammar names, nothing but the mask tells.
            if not 0 <= token_id < self._vocabulary.vocab_size:
                return False
            row = self._allowed() if row is None else row
            return bool(row[token_id // 32] >> (token_id % 32) & 1)
        if self._here().is_error:
            return False
        ids, taken = self._forced_here()
        return not ids or ids[taken] == token_id

    def _compute_row(self) -> Bitmask:
        rows = np.zeros((1, self._backend.num_words), dtype=np.int32)
        if not self._here().is_stopped:
            self._library.unsafe_compute_mask_ptr(rows.ctypes.data, rows.nbytes)
            if self._library.is_error():
                self._state = None
                rows[:] = 0
        row: Bitmask = self._backend.without_ends(rows, [0])[0]
        return row
