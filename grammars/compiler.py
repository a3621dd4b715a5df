"""From a constraint to a compiled grammar: check, choose, compile, remember.

Owns the table of backends, the checks that need no engine, and the bounded cache of compiled grammars. Called by the
runtime, from any thread and off the step loop, since compiling takes milliseconds to seconds. The grammar engine is
imported at the first constraint, so that an engine without constraints never pays for it.

Fails with the errors of `sgl.errors` under `InvalidConstraint`; a failure is not cached. Two threads that ask for the
same constraint at once may both compile it; one result is kept.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias, assert_never

import msgspec

from sgl.errors import ConstraintTooComplex, InternalError, InvalidConstraint, InvalidParameter, UnsupportedSchema
from sgl.grammars import ebnf, lark, structural_tag
from sgl.grammars.choices import ChoicesGrammar, Vocabulary
from sgl.grammars.closing import Closer
from sgl.grammars.keywords import check_schema, unenforced
from sgl.grammars.lengths import Lengths, lengths_of, repeat, sequence, text
from sgl.grammars.matcher import CompiledGrammar
from sgl.grammars.numbers import BoundedNumbers
from sgl.grammars.reasoning import Reasoning, ReasoningGrammar, ReasoningTables
from sgl.grammars.regex import translate
from sgl.grammars.spec import Choices, Constraint, Ebnf, JsonSchema, Lark, Regex, StructuralTag
from sgl.grammars.validation import CheckedGrammar, Validator, loosened
from sgl.limits import DEFAULT_LIMITS, Limits


class Backend(Protocol):
    """What compiles constraints for one tokenizer."""

    vocabulary: Vocabulary

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Compile a constraint that has passed its checks."""

    def close(self) -> None:
        """Give back processes, if it has any."""


BackendFactory: TypeAlias = Callable[[str, int, Sequence[int], Limits, Callable[[], Vocabulary]], Backend]
"""From the tokenizer's text, the number of logits, ends, limits, and what gives the tokenizer's vocabulary, of which a
compiler has one."""
WHITESPACE = ("compact", "bounded")
_MAX_REASONING = 16
"""Pairs of markers whose tables are kept; a model has one."""
_MAX_LOOSENED = 16
"""Keywords of one schema that compiling may turn out not to enforce."""


def _llguidance(
    tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int], limits: Limits, _: Callable[[], Vocabulary]
) -> Backend:
    from sgl.grammars.llguidance_backend import Backend

    return Backend(tokenizer_json, vocab_size, eos_ids, limits)


def _xgrammar(
    tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int], limits: Limits, vocabulary: Callable[[], Vocabulary]
) -> Backend:
    from sgl.grammars.xgrammar_backend import Backend

    return Backend(vocabulary(), limits)


BACKENDS: dict[str, BackendFactory] = {"llguidance": _llguidance, "xgrammar": _xgrammar}
"""Name -> what makes the backend for one tokenizer; each has a keyword table in `sgl.grammars.keyword_tables`."""


def check(constraint: Constraint, backend: str = "llguidance", limits: Limits = DEFAULT_LIMITS) -> None:
    """Everything about a constraint that can be told without a grammar engine or a tokenizer.

    Raises:
        InvalidConstraint: no options, an unknown whitespace policy, text that is not Unicode.
        InvalidRegex, InvalidSchema, UnsupportedSchema, InvalidGrammar, ConstraintTooComplex: as `translate`,
            `check_schema`, and the modules of the grammars raise them.

    Example:
        >>> check(Choices(("yes", "no")))
    """
    match constraint:
        case Regex(pattern=pattern):
            _check_text(pattern, "regex")
            translate(pattern, limits=limits)
        case JsonSchema(schema=schema, whitespace=whitespace, max_number_len=max_number_len, unsupported=unsupported):
            _check_whitespace(whitespace)
            if unsupported not in ("refuse", "check"):
                raise InvalidConstraint(f"unsupported is {unsupported!r}", hint="use one of refuse, check")
            if max_number_len < 1:
                raise InvalidConstraint(f"max_number_len is {max_number_len}", hint="give at least 1")
            _check_text(schema, "JSON schema")
            if unsupported == "check":
                schema = loosened(schema, unenforced(schema, backend, limits), limits)
            check_schema(schema, backend, limits, checkable=unsupported == "refuse")
        case Choices(options=options):
            if not options:
                raise InvalidConstraint("choices is empty", hint="give at least one option")
            if len(options) > limits.max_choices:
                raise ConstraintTooComplex(
                    f"choices has {len(options)} options; at most {limits.max_choices} are allowed",
                    hint="split the choice in two steps",
                )
            for option in options:
                _check_text(option, "choice")
            size = sum(len(option.encode()) for option in options)
            if size > limits.max_schema_bytes:
                raise ConstraintTooComplex(
                    f"choices have {size} bytes together; at most {limits.max_schema_bytes} are allowed",
                    hint="shorten the options",
                )
        case Ebnf(grammar=grammar):
            _check_text(grammar, "EBNF")
            ebnf.parse(grammar, limits)
        case Lark(grammar=grammar):
            if backend != "llguidance":
                raise InvalidConstraint(
                    f"{backend} takes no Lark grammar", hint="use grammar_backend 'llguidance', or write EBNF"
                )
            _check_text(grammar, "Lark grammar")
            lark.check(grammar, backend, limits)
        case StructuralTag(tag=tag, whitespace=whitespace):
            _check_whitespace(whitespace)
            _check_text(tag, "structural tag")
            structural_tag.check(tag, backend, limits)
        case _:
            assert_never(constraint)


def _check_whitespace(whitespace: str) -> None:
    if whitespace not in WHITESPACE:
        raise InvalidConstraint(f"whitespace is {whitespace!r}", hint=f"use one of {', '.join(map(repr, WHITESPACE))}")


def _check_text(text: str, what: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidConstraint(
            f"the {what} holds a lone surrogate at {error.start}, which no output can contain", hint="remove it"
        ) from None


class GrammarCompiler:
    """Compiles constraints for one tokenizer and remembers the last `cache_size` of them.

    Args:
        tokenizer_json: text of a `tokenizer.json`, as `tokenizers` writes it.
        vocab_size: number of logits of the model; may exceed the tokenizer's vocabulary, whose rest is never allowed.
        eos_ids: ids that end a sequence, allowed where a constraint is complete.
        limits: bounds on size, depth, and on the time and memory of one compilation.
        cache_size: compiled grammars kept, the least recently used leave first.
        backend: a key of `BACKENDS`, or `auto` (llguidance, which refuses least); `compile` may name another.

    Attributes:
        hits, misses: how often `compile` found its constraint in the cache, and how often it did not.

    Raises:
        InvalidParameter: an unknown backend, or a cache size below 1.
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_ids: Iterable[int],
        *,
        limits: Limits = DEFAULT_LIMITS,
        cache_size: int = 256,
        backend: str = "auto",
    ) -> None:
        self._default = _backend_name(backend)
        if cache_size < 1:
            raise InvalidParameter(f"cache_size is {cache_size}; it must be at least 1", param="cache_size")
        self.hits = 0
        self.misses = 0
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_ids = tuple(sorted(set(eos_ids)))
        self._limits = limits
        self._cache_size = cache_size
        self._backends: dict[str, Backend] = {}
        self._backend_lock = threading.RLock()  # a backend may ask for the vocabulary, which another one reads
        self._validator = Validator(limits)
        self._closer: Closer | None = None
        self._cache: OrderedDict[tuple[str, Constraint], CompiledGrammar] = OrderedDict()
        self._reasoning: OrderedDict[tuple[str, str, tuple[str, ...]], ReasoningTables] = OrderedDict()
        self._cache_lock = threading.Lock()

    def compile(self, constraint: Constraint, backend: str | None = None) -> CompiledGrammar:
        """The compiled grammar of a constraint, from the cache or anew.

        Args:
            backend: which one compiles it, if not the compiler's own.

        Raises:
            InvalidConstraint: or one of its kinds; what is wrong and what to change.
            InvalidParameter: an unknown backend.
            ConfigError: a backend that is not installed.
        """
        name = self._default if backend is None else _backend_name(backend)
        key = (name, constraint)
        with self._cache_lock:
            known = self._cache.get(key)
            if known is not None:
                self._cache.move_to_end(key)
                self.hits += 1
                return known
            self.misses += 1
        check(constraint, name, self._limits)
        grammar = self._compile(constraint, name)
        with self._cache_lock:
            grammar = self._cache.setdefault(key, grammar)
            self._cache.move_to_end(key)
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return grammar

    def after_reasoning(self, section: Reasoning, inner: CompiledGrammar | None) -> ReasoningGrammar:
        """A compiled grammar that begins behind reasoning; without one, the reasoning alone is held to its budget."""
        vocabulary = self._backend(self._default).vocabulary
        key = (section.begin, section.end, section.excludes)
        with self._cache_lock:
            tables = self._reasoning.get(key)
        if tables is None:
            tables = ReasoningTables(section, vocabulary)
            with self._cache_lock:
                self._reasoning[key] = tables
                while len(self._reasoning) > _MAX_REASONING:
                    self._reasoning.popitem(last=False)
        grammar = ReasoningGrammar(section, tables, inner)
        if inner is not None:
            marked = repeat(text(section.begin + section.end), 0, 1)
            self.closer.know(grammar, sequence([marked, self.closer.lengths(inner)]))
        return grammar

    @property
    def closer(self) -> Closer:
        """Looks for completions of this tokenizer's texts; there once something was compiled."""
        closer = self._closer
        if closer is None:
            raise InternalError("completions are asked for before anything was compiled")
        return closer

    def close(self) -> None:
        """End what the backends have started; the cache stays."""
        with self._backend_lock:
            for backend in self._backends.values():
                backend.close()
        self._validator.close()

    def __len__(self) -> int:
        return len(self._cache)

    def _backend(self, name: str) -> Backend:
        with self._backend_lock:
            if name not in self._backends:
                self._backends[name] = BACKENDS[name](
                    self._tokenizer_json,
                    self._vocab_size,
                    self._eos_ids,
                    self._limits,
                    lambda: self._backend("llguidance").vocabulary,
                )
            if self._closer is None:
                self._closer = Closer(self._backends[name].vocabulary)
            return self._backends[name]

    def _lengths(self, constraint: Constraint) -> Lengths:
        """The lengths of a constraint; refuses what no generation could complete, before an engine begins with it."""
        lengths = lengths_of(constraint, self._limits)
        if self._limits.max_shortest_bytes < lengths.shortest < math.inf:
            raise ConstraintTooComplex(
                f"the shortest text that the constraint allows is longer than the {self._limits.max_shortest_bytes:,} "
                "bytes that are taken",
                hint="repeat less often",
            )
        return lengths

    def _compile(self, constraint: Constraint, name: str) -> CompiledGrammar:
        backend = self._backend(name)
        grammar: CompiledGrammar
        if isinstance(constraint, JsonSchema) and constraint.unsupported == "check":
            return self._compile_loosened(constraint, backend, name)
        lengths = self._lengths(constraint)
        if isinstance(constraint, Choices):
            grammar = ChoicesGrammar(constraint.options, backend.vocabulary)
        elif not isinstance(constraint, JsonSchema):
            grammar = backend.compile(constraint)
        else:
            grammar = BoundedNumbers(backend.compile(constraint), backend.vocabulary, constraint.max_number_len)
        self.closer.know(grammar, lengths)
        return grammar

    def _compile_loosened(self, constraint: JsonSchema, backend: Backend, name: str) -> CompiledGrammar:
        """What the backend can enforce of a schema, with a check of the whole; without one where it enforces all."""
        whole = constraint.schema
        schema = loosened(whole, unenforced(whole, name, self._limits), self._limits)
        for _ in range(_MAX_LOOSENED):
            check_schema(schema, name, self._limits, checkable=False)
            lengths = self._lengths(JsonSchema(schema))
            try:
                inner = backend.compile(msgspec.structs.replace(constraint, schema=schema))
            except UnsupportedSchema as error:
                if not error.details.get("pointer"):
                    raise
                schema = loosened(schema, [error.details["pointer"]], self._limits)  # what only compiling can tell
            else:
                break
        else:
            raise UnsupportedSchema(
                f"more than {_MAX_LOOSENED} combinations of keywords in the JSON schema cannot be enforced by {name}",
                hint="write them out",
                pointer="",
            )
        grammar: CompiledGrammar = BoundedNumbers(inner, backend.vocabulary, constraint.max_number_len)
        if schema != loosened(whole, (), self._limits):
            self._validator.check_schema(whole)
            grammar = CheckedGrammar(grammar, whole, self._validator)
        self.closer.know(grammar, lengths)
        return grammar


def _backend_name(name: str) -> str:
    name = "llguidance" if name == "auto" else name
    if name not in BACKENDS:
        raise InvalidParameter(
            f"grammar backend {name!r} is unknown",
            hint=f"use one of auto, {', '.join(sorted(BACKENDS))}",
            param="backend",
        )
    return name
