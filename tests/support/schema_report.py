"""Many schemas and regexes decoded with random logits, and the report of what became of them.

Owns the decoding (uniform draws under the mask, ended by the token budget as the engine ends it), the oracles
(jsonschema-rs, `re.fullmatch`) and the table by keyword. Used by the small sample in the suite and the long run beside.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import jsonschema_rs
import numpy as np

from sgl.errors import ConstraintTooComplex, InvalidConstraint, InvalidRegex, InvalidSchema, UnsupportedSchema
from sgl.grammars.compiler import GrammarCompiler
from sgl.grammars.keyword_tables import TABLES, Support
from sgl.grammars.matcher import StopReason, allocate_bitmask, bitmask_to_bool
from sgl.grammars.spec import Constraint, JsonSchema, Regex, canonical_schema

BUDGET = 160
PARTLY = {
    "oneOf",
    "allOf",
    "anyOf",
    "patternProperties",
    "minProperties",
    "maxProperties",
    "pattern",
    "format",
    "items",
    "exclusiveMinimum",
    "exclusiveMaximum",
}
"""Enforced words some of whose uses only the backend, or their value, shows to be out of reach (see their `reason`)."""


_SCALARS = [
    *[None, True, False, 0, 1, -1, 2, 3, 6, 7, 12, 42, 90, -30, 0.5, -2.25, 1e3, 2**40],
    *["", "a", "ab", "abc", "é", "1", "x", "bb", 'q"\n', "2024-02-29", "127.0.0.1", "a@b.example", "10:00:00Z"],
    "123e4567-e89b-42d3-a456-426614174000",
]  # fmt: skip
POOL: list[Any] = [
    *_SCALARS,
    *([value] * count for value in _SCALARS for count in (1, 2, 3)),
    *({name: value} for value in _SCALARS for name in ("a", "b", "name", "x y", "é", "x1")),
    *({"a": value, "b": value, "name": value} for value in _SCALARS),
    *[[], {}, [0, 1], ["a", 1, None], {"a": 1, "b": "x"}, {"a": {}, "b": []}, {"k": []}],
]
"""Values that many small schemas allow."""


class Report:
    """What became of schemas, by keyword.

    Args:
        compiler: of the vocabulary; `decode_bytes` gives the text of its ids.
    """

    def __init__(
        self, compiler: GrammarCompiler, token_bytes: dict[int, bytes], eos_ids: Iterable[int], vocab_size: int
    ) -> None:
        self.compiler = compiler
        self.outcomes: Counter[str] = Counter()
        self.by_keyword: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.refused_for: Counter[str] = Counter()
        self.unconfirmed: list[str] = []
        self._decoded: deque[Any] = deque(maxlen=300)  # values of other schemas
        self._token_bytes = token_bytes
        self._eos_ids = frozenset(eos_ids)
        self._vocab_size = vocab_size

    def add(self, schema: Any, seed: int) -> None:
        """Compile, decode and judge one schema."""
        outcome = self._outcome(schema, seed)
        self.outcomes[outcome] += 1
        for word in words_of(schema):
            self.by_keyword[word][outcome] += 1

    def _outcome(self, schema: Any, seed: int) -> str:
        try:
            text = self.decode(JsonSchema(canonical_schema(schema), unsupported="refuse"), random.Random(seed))
        except InvalidConstraint as error:
            return self._refusal(schema, error)
        if text is None:
            return "unfinished"
        try:
            value = json.loads(text, parse_float=Decimal)
        except ValueError:
            return "invalid"
        self._decoded.append(value)
        try:
            oracle = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
        except (ValueError, jsonschema_rs.ReferencingError, jsonschema_rs.ValidationError):
            return "no schema"  # of draft 2020-12
        return "valid" if oracle.is_valid(value) else "invalid"

    def _refusal(self, schema: Any, error: InvalidConstraint) -> str:
        """`refused`, where the keyword table says so, `unsatisfiable`, where nothing can satisfy the schema."""
        pointer = str(error.details.get("pointer"))
        word = pointer.rsplit("/", 1)[-1]
        if isinstance(error, InvalidSchema):
            return self._unsatisfiable(schema, error)
        row = TABLES["llguidance"].get(word)
        is_unknown = row is None and "is no known JSON schema keyword" in error.message  # a word in no row is refused
        named = is_unknown or (
            row is not None and (row.support is Support.REFUSED or (word in PARTLY and bool(row.reason)))
        )
        inside_pattern = "/patternProperties/" in pointer
        if isinstance(error, UnsupportedSchema) and (named or inside_pattern or not pointer):
            self.refused_for[word or "a combination"] += 1
        elif isinstance(error, ConstraintTooComplex):
            self.refused_for["limits"] += 1
        else:
            self.unconfirmed.append(f"{error} {json.dumps(schema)[:200]}")
        return "refused"

    def _unsatisfiable(self, schema: Any, error: InvalidSchema) -> str:
        """What is told to be unsatisfiable must not be satisfied by any value that is at hand."""
        try:
            oracle = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
        except (ValueError, jsonschema_rs.ReferencingError, jsonschema_rs.ValidationError):
            return "no schema"  # of draft 2020-12
        if any(oracle.is_valid(value) for value in [*POOL, *self._decoded]):
            self.unconfirmed.append(f"{error} {json.dumps(schema)[:200]}")
        return "unsatisfiable"

    def decode(self, constraint: Constraint, rng: random.Random) -> str | None:
        """The text of one generation with random logits; `None` when the budget did not complete it."""
        grammar = self.compiler.compile(constraint)
        matcher = grammar.matcher()
        steering = self.compiler.closer.steering(grammar, matcher, BUDGET)
        assert steering is not None
        bitmask = allocate_bitmask(1, self._vocab_size)
        written: list[int] = []
        while len(written) < BUDGET and matcher.stop_reason() is StopReason.NOT_STOPPED:
            matcher.fill(bitmask, 0)
            allowed = np.flatnonzero(bitmask_to_bool(bitmask, self._vocab_size)[0])
            token_id = int(allowed[rng.randrange(len(allowed))])
            if token_id in self._eos_ids or (matcher.is_complete() and rng.random() < 0.1):
                break
            assert matcher.accept(token_id)
            if not steering.keeps(token_id, BUDGET - len(written) - 1):
                if steering.instead is None:
                    break
                token_id = steering.instead
                assert matcher.accept(token_id)
                assert steering.keeps(token_id, BUDGET - len(written) - 1)
            written.append(token_id)
        if not matcher.is_complete():
            return None
        return b"".join(self._token_bytes[token_id] for token_id in written).decode()

    def add_regex(self, pattern: str, seed: int) -> None:
        """Compile, decode and judge one pattern."""
        try:
            text = self.decode(Regex(pattern), random.Random(seed))
        except (InvalidRegex, ConstraintTooComplex):
            self.outcomes["refused"] += 1
            return
        if text is None:
            self.outcomes["unfinished"] += 1
        else:
            self.outcomes["valid" if re.fullmatch(pattern, text) else "invalid"] += 1

    def table(self) -> str:
        """The report as text."""
        kinds = ("valid", "refused", "unsatisfiable", "no schema", "unfinished", "invalid")
        lines = [f"{'keyword':24}" + "".join(f"{kind:>15}" for kind in kinds)]
        rows = [("all", self.outcomes), *sorted(self.by_keyword.items())]
        lines += [f"{word:24}" + "".join(f"{counts[kind]:15}" for kind in kinds) for word, counts in rows]
        return "\n".join([*lines, f"refused for: {dict(self.refused_for.most_common())}"])


def words_of(schema: Any) -> set[str]:
    """The keywords that stand in a schema, at any depth; names of properties are none."""
    found: set[str] = set()
    if not isinstance(schema, dict):
        return found
    for word, value in schema.items():
        found.add(word)
        if word in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"):
            held = list(value.values()) if isinstance(value, dict) else []
        elif word in ("enum", "const", "default", "examples", "required", "$vocabulary"):
            held = []
        else:
            held = value if isinstance(value, list) else [value]
        for child in held:
            found |= words_of(child)
    return found


_ATOMS = [
    *["a", "é", r"\d", r"\w", r"\s", r"\S", ".", "[a-f0-9]", r"[^\W\d]", "[^a-z]", r"\.", "日", r"\x41", "-", "(?i:k)"],
    *["yes|no", r"\D", "[\\]\\-]", r"\t", " "],
]  # fmt: skip


def random_regex(rng: random.Random, depth: int = 3) -> str:
    """A pattern of the syntax of `re`, regular parts for the most."""
    if depth == 0 or rng.random() < 0.35:
        return rng.choice(_ATOMS)
    inner = random_regex(rng, depth - 1)
    kind = rng.randrange(5)
    if kind == 0:
        return f"(?:{inner}|{random_regex(rng, depth - 1)})"
    if kind == 1:
        return f"(?:{inner})" + rng.choice(["*", "+", "?", "{2}", "{1,3}", "{,2}", "*?", "{2,}"])
    if kind == 2:
        return f"({inner}){random_regex(rng, depth - 1)}"
    if kind == 3 and rng.random() < 0.1:
        return rng.choice([f"(?={inner}){inner}", f"(x){inner}\\1", f"{inner}\\b"])
    return inner + random_regex(rng, depth - 1)
