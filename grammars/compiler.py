"""From a constraint to a compiled grammar: check, choose, compile, remember.

Owns the table of backends, the checks that need no engine, and the bounded cache of compiled grammars. Called by the
runtime, from any thread and off the step loop, since compiling takes milliseconds to seconds. The grammar engine is
imported at the first constraint, so that an engine without constraints never pays for it.

Fails with the errors of `sgl.errors` under `InvalidConstraint`; a failure is not cached. Two threads that ask for the
same constraint at once may both compile it; one result is kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias, assert_never

from sgl.errors import ConstraintTooComplex, InvalidConstraint, InvalidParameter
from sgl.grammars import ebnf, lark, structural_tag
from sgl.grammars.keywords import check_schema
from sgl.grammars.matcher import CompiledGrammar
from sgl.grammars.regex import translate
from sgl.grammars.spec import Choices, Constraint, Ebnf, JsonSchema, Lark, Regex, StructuralTag
from sgl.limits import DEFAULT_LIMITS, Limits

if TYPE_CHECKING:
    from sgl.grammars.llguidance_backend import Backend

BackendFactory: TypeAlias = "Callable[[str, int, Sequence[int], Limits], Backend]"
WHITESPACE = ("compact", "bounded")


def _llguidance(tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int], limits: Limits) -> Backend:
    from sgl.grammars.llguidance_backend import Backend

    return Backend(tokenizer_json, vocab_size, eos_ids, limits)


BACKENDS: dict[str, BackendFactory] = {"llguidance": _llguidance}
"""Name -> what makes the backend for one tokenizer. A name here has a keyword table in `sgl.grammars.keywords`."""


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
        case JsonSchema(schema=schema, whitespace=whitespace):
            _check_whitespace(whitespace)
            _check_text(schema, "JSON schema")
            check_schema(schema, backend, limits)
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
        backend: a key of `BACKENDS`.

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
        backend: str = "llguidance",
    ) -> None:
        if backend not in BACKENDS:
            raise InvalidParameter(
                f"grammar backend {backend!r} is unknown",
                hint=f"use one of {', '.join(sorted(BACKENDS))}",
                param="backend",
            )
        if cache_size < 1:
            raise InvalidParameter(f"cache_size is {cache_size}; it must be at least 1", param="cache_size")
        self.hits = 0
        self.misses = 0
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_ids = tuple(sorted(set(eos_ids)))
        self._limits = limits
        self._cache_size = cache_size
        self._backend_name = backend
        self._backend: Backend | None = None
        self._backend_lock = threading.Lock()
        self._cache: OrderedDict[Constraint, CompiledGrammar] = OrderedDict()
        self._cache_lock = threading.Lock()

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """The compiled grammar of a constraint, from the cache or anew.

        Raises:
            InvalidConstraint: or one of its kinds; what is wrong and what to change.
        """
        with self._cache_lock:
            known = self._cache.get(constraint)
            if known is not None:
                self._cache.move_to_end(constraint)
                self.hits += 1
                return known
            self.misses += 1
        check(constraint, self._backend_name, self._limits)
        grammar = self._compile(constraint)
        with self._cache_lock:
            grammar = self._cache.setdefault(constraint, grammar)
            self._cache.move_to_end(constraint)
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return grammar

    def __len__(self) -> int:
        return len(self._cache)

    def _compile(self, constraint: Constraint) -> CompiledGrammar:
        with self._backend_lock:
            if self._backend is None:
                factory = BACKENDS[self._backend_name]
                self._backend = factory(self._tokenizer_json, self._vocab_size, self._eos_ids, self._limits)
        if isinstance(constraint, Choices):
            from sgl.grammars.choices import ChoicesGrammar

            return ChoicesGrammar(constraint.options, self._backend.vocabulary)
        return self._backend.compile(constraint)
