"""`sgl bench grammar`: what constraints cost, and what forced tokens save.

Owns the schemas and the four measurements. All run on one engine core in this process, so that nothing but the
constraint differs; pairs, the watch over the cores and the statistics are those of `sgl.bench.harness`.

* Masks and compilation: microseconds of one mask along random walks, and of a batch of rows together; milliseconds of
  compiling schemas that were not seen before; by backend.
* Throughput: a batch of JSON generations against the same without a constraint. The schema cannot be completed in the
  budget, no token is forced and none ends the output, so that both sides compute the same number of forwards.
* Neighbours: the time between tokens of unconstrained rows while new schemas arrive, against the same schema arriving
  over and over, which is compiled once.
* Forced tokens: a form that a regex lays down, with and without them; the values must be identical.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np

from sgl.bench.harness import PairPlan, measure_pairs
from sgl.bench.load import ProcSampler, Sampler, least_busy
from sgl.bench.pairs import Pair, Result, summarise
from sgl.bench.provenance import Provenance, provenance, side_variables
from sgl.bench.workloads.documents import CHARACTER_PATTERN
from sgl.errors import BenchError, Cancelled, ConfigError
from sgl.grammars.compiler import BACKENDS, GrammarCompiler
from sgl.grammars.matcher import Matcher, allocate_bitmask, bitmask_to_bool, prepare
from sgl.grammars.spec import Constraint, JsonSchema, Regex, canonical_schema
from sgl.lang.graph import Event, FailedEvent, Gen, Graph, LiteralText, ProgramOptions, Sampling, Text, ValueEvent
from sgl.runtime.config import config_from_mapping
from sgl.runtime.core import EngineCore
from sgl.runtime.engine_start import build_core
from sgl.runtime.loading.facts import cpu_count
from sgl.runtime.program_jobs import job_threads
from sgl.runtime.text.tokenizer import Tokenizer

BATCH = 64
_WALK_LEN = 24
_NUM_COMPILED = 60
_ARRIVALS_PER_S = 20.0
_NUM_NEIGHBOURS = 8
_ADDRESS = {
    "type": "object",
    "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
    "required": ["street", "zip"],
    "additionalProperties": False,
}
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "address": _ADDRESS,
        "kind": {"enum": ["student", "teacher", "guest"]},
        "score": {"type": ["number", "null"]},
    },
    "required": ["name", "age", "tags", "address", "kind", "score"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": _PERSON,
    "people": {"type": "array", "items": _PERSON, "minItems": 1, "maxItems": 8},
    "map": {"type": "object", "additionalProperties": {"type": "string"}},
    "any": {"type": "object"},
    "dates": {"type": "array", "items": {"type": "string", "format": "date-time"}, "maxItems": 20},
    "choice": {
        "anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 9}, {"type": "array", "items": {"const": 0}}],
    },
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "number"},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["value", "kids"],
                "additionalProperties": False,
            }
        },
        "type": "array",
        "items": {"$ref": "#/$defs/node"},
    },
}  # fmt: skip
ENDLESS = {"type": "array", "items": _PERSON, "minItems": 1000}
"""What no budget of a bench completes."""


def _records(string: dict[str, Any]) -> dict[str, Any]:
    """Records of text, without end; `string` is the schema of each text."""
    properties = dict.fromkeys(("name", "city", "comment"), string)
    fields = {**properties, "age": {"type": "integer", "minimum": 0, "maximum": 120}}
    record = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    return {"type": "array", "items": record, "minItems": 1000}


RECORDS = {
    "plain strings": _records({"type": "string"}),
    "strings of maxLength": _records({"type": "string", "maxLength": 40}),
}
"""One schema with easy masks, and with hard ones: how much of a string is left decides what may come."""


class MaskFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One backend: masks and compilations, 50th and 99th percentiles over all schemas; `together_us` is one batch."""

    backend: str
    fills: int
    fill_p50_us: float
    fill_p99_us: float
    batch: int
    together_us: float
    compiled: int
    compile_p50_ms: float
    compile_p99_ms: float


class PairFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison; the ratio is the time without over the time with what is named."""

    what: str
    result: Result
    pairs: tuple[Pair, ...]
    counts: dict[str, float] = {}


class NeighbourFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds between tokens of unconstrained rows, 99th percentile of each round, while schemas arrive: new ones,
    and one that is known; `ratio` is of the medians over the rounds."""

    arrivals_per_s: float
    new_p99_ms: tuple[float, ...]
    known_p99_ms: tuple[float, ...]
    ratio: float
    compiled: int


class GrammarReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `sgl bench grammar` found."""

    model: str
    vocab_size: int
    provenance: Provenance
    plan: PairPlan
    masks: tuple[MaskFigures, ...]
    comparisons: tuple[PairFigure, ...]
    neighbours: NeighbourFigures | None


def run(
    fields: Mapping[str, Any],
    *,
    plan: PairPlan,
    parts: Sequence[str] = (),
    new_tokens: int = 32,
    rounds: int = 3,
    round_s: float = 10.0,
    sampler: Sampler | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> GrammarReport:
    """Measure.

    Args:
        fields: of `EngineConfig`.
        parts: some of `PARTS`; all by default.
        new_tokens: of each generation of the throughput.
        rounds, round_s: of the neighbours, in seconds.

    Raises:
        ConfigError: an unknown part.
        BenchError: forced tokens change a value, or a generation fails.
    """
    for part in parts:
        if part not in PARTS:
            raise ConfigError(f"part {part!r} is unknown", hint=f"use one of {', '.join(PARTS)}", param="part")
    wanted = set(parts or PARTS)
    config = config_from_mapping(fields)
    threads = config.num_threads or (1 if config.model_path == "dummy" else cpu_count())
    cores = least_busy(os.sched_getaffinity(0), threads)
    sampler = ProcSampler(cores) if sampler is None else sampler
    with job_threads(2) as jobs:
        bench = _Bench(dict(fields) | {"num_threads": threads}, jobs)
        masks: list[MaskFigures] = []
        comparisons: list[PairFigure] = []
        neighbours = None
        try:
            if "masks" in wanted:
                for backend in BACKENDS:
                    progress(f"masks and compilation: {backend}")
                    masks += measure_masks(bench.core.tokenizer, backend)
            if "throughput" in wanted:
                progress("throughput: constrained against free")
                comparisons.append(bench.throughput(new_tokens, sampler, plan, progress))
            if "forced" in wanted:
                progress("forced tokens: on against off")
                comparisons.append(bench.forced(sampler, plan, progress))
            if "neighbours" in wanted:
                progress("neighbours: new schemas against a known one")
                neighbours = bench.neighbours(rounds, round_s)
        finally:
            bench.core.compiler.close()
        return GrammarReport(
            model=config.model_path,
            vocab_size=bench.core.tokenizer.vocab_size,
            provenance=provenance(cores, side_variables(threads), ()),
            plan=plan,
            masks=tuple(masks),
            comparisons=tuple(comparisons),
            neighbours=neighbours,
        )


PARTS = ("masks", "throughput", "forced", "neighbours")


# --- masks and compilation --------------------------------------------------------------------------------------------


def measure_masks(tokenizer: Tokenizer, backend: str, num_compiled: int = _NUM_COMPILED) -> list[MaskFigures]:
    """The figures of one backend; none when it is not installed."""
    compiler = GrammarCompiler(
        tokenizer.to_json(), tokenizer.vocab_size, tokenizer.eos_ids, backend=backend, cache_size=4 * num_compiled
    )
    try:
        compiler.compile(Regex("a"))  # what the backend does once
    except ConfigError:
        return []
    rng = random.Random(0)
    compile_s, fill_s = [], []
    for schema in SCHEMAS.values():
        for number in range(-(-num_compiled // len(SCHEMAS))):
            constraint = _unseen(schema, number)
            start = time.perf_counter()
            compiler.compile(constraint)
            compile_s.append(time.perf_counter() - start)
        grammar = compiler.compile(_unseen(schema, 0))
        for _ in range(8):
            fill_s += _walk(grammar.matcher(), tokenizer, rng, _WALK_LEN)
    together_s = []
    for _ in range(5):
        matchers: list[Matcher] = []
        for index in range(BATCH):
            matchers.append(compiler.compile(_unseen(SCHEMAS["person"], index % 4)).matcher())
            _walk(matchers[-1], tokenizer, rng, rng.randrange(_WALK_LEN))
        bitmask = allocate_bitmask(BATCH, tokenizer.vocab_size)
        start = time.perf_counter()
        prepare(matchers, cpu_count(), bitmask, range(BATCH))
        for row, matcher in enumerate(matchers):
            matcher.fill(bitmask, row)
        together_s.append(time.perf_counter() - start)
    compiler.close()
    return [
        MaskFigures(
            backend=backend,
            fills=len(fill_s),
            fill_p50_us=_percentile(fill_s, 50) * 1e6,
            fill_p99_us=_percentile(fill_s, 99) * 1e6,
            batch=BATCH,
            together_us=statistics.median(together_s) * 1e6,
            compiled=len(compile_s),
            compile_p50_ms=_percentile(compile_s, 50) * 1e3,
            compile_p99_ms=_percentile(compile_s, 99) * 1e3,
        )
    ]


def _unseen(schema: dict[str, Any], number: int) -> JsonSchema:
    """The schema beside a property that no other one has."""
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    inner = {word: value for word, value in schema.items() if word != "$defs"}
    properties = {f"number_{number}": {"type": "integer", "maximum": number}, "value": inner}
    wrapped = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return JsonSchema(canonical_schema({**wrapped, **definitions}))


def _walk(matcher: Matcher, tokenizer: Tokenizer, rng: random.Random, steps: int) -> list[float]:
    """Random tokens under the mask; seconds of each fill."""
    bitmask = allocate_bitmask(1, tokenizer.vocab_size)
    seconds: list[float] = []
    for _ in range(steps):
        start = time.perf_counter()
        matcher.fill(bitmask, 0)
        seconds.append(time.perf_counter() - start)
        allowed = np.flatnonzero(bitmask_to_bool(bitmask, tokenizer.vocab_size)[0])
        token_id = int(rng.choice(allowed))
        if token_id in tokenizer.eos_ids or not matcher.accept(token_id):
            break
    return seconds


# --- the engine -------------------------------------------------------------------------------------------------------


class _Bench:
    """One engine core, and what is run on it."""

    def __init__(self, fields: dict[str, Any], jobs: ThreadPoolExecutor) -> None:
        self.values: dict[int, ValueEvent] = {}
        self._next = 0
        self.core: EngineCore
        self.core, _ = build_core(config_from_mapping(fields), emit=self._emit, executor=jobs)

    def _emit(self, program: int, event: Event) -> None:
        if isinstance(event, FailedEvent) and event.error.code != Cancelled.code:
            raise BenchError(f"a generation of the bench failed: {event.error.message}")
        if isinstance(event, ValueEvent):
            self.values[program] = event

    def start(self, prompt: str, constraint: Constraint | None, **sampling: Any) -> int:
        """Queue one generation; its number."""
        number, self._next = self._next, self._next + 1
        gen = Gen(id=1, name="x", constraint=constraint, sampling=Sampling(**{"temperature": 0.0, **sampling}))
        self.core.open(number, ProgramOptions(name="bench"))
        self.core.submit(number, Graph(nodes=(Text(id=0, segments=(LiteralText(prompt),)), gen)), finish=True)
        return number

    def finish(self, numbers: Sequence[int]) -> list[ValueEvent]:
        """Step until all of them have their value."""
        while any(number not in self.values for number in numbers):
            if not self.core.step():
                time.sleep(0.0005)  # jobs are under way
        return [self.values.pop(number) for number in numbers]

    def batch(self, constraint: Constraint | None, new_tokens: int) -> dict[str, float]:
        """Seconds of a whole batch, prompts included, on an empty cache."""
        self.core.flush_cache()
        start = time.perf_counter()
        numbers = [
            self.start(f"{row}: A list of people as JSON:", constraint, max_new_tokens=new_tokens, ignore_eos=True)
            for row in range(BATCH)
        ]
        if any(len(event.token_ids) != new_tokens for event in self.finish(numbers)):
            raise BenchError("a generation of the bench has another length than asked for")
        return {"wall": time.perf_counter() - start}

    def throughput(
        self, new_tokens: int, sampler: Sampler, plan: PairPlan, progress: Callable[[str], None]
    ) -> PairFigure:
        """Constrained (a) and free (b) batches of equal lengths."""
        self._force(False)
        constraint = JsonSchema(canonical_schema(ENDLESS))
        run = measure_pairs(
            lambda _: self.batch(constraint, new_tokens),
            lambda _: self.batch(None, new_tokens),
            sampler,
            plan,
            progress=progress,
        )
        self._force(True)
        counts = {"batch": float(BATCH), "new_tokens": float(new_tokens)}
        result = summarise(run.pairs, "wall", plan.pairs)
        return PairFigure(what="constrained / free throughput", result=result, pairs=run.pairs, counts=counts)

    def forced(self, sampler: Sampler, plan: PairPlan, progress: Callable[[str], None]) -> PairFigure:
        """The form of `json_jump_forward` with forced tokens (a) and without (b)."""
        texts: dict[bool, list[str]] = {}
        counts: dict[str, float] = {}

        def forms(force: bool) -> dict[str, float]:
            self._force(force)
            self.core.flush_cache()
            before = self.core.snapshot().as_dict()
            start = time.perf_counter()
            prompts = [f"{name} is a character in Harry Potter. Fill in about this character.\n" for name in _NAMES]
            events = self.finish(
                [self.start(prompt, Regex(CHARACTER_PATTERN), max_new_tokens=256) for prompt in prompts]
            )
            seconds = time.perf_counter() - start
            after = self.core.snapshot().as_dict()
            texts[force] = [event.value for event in events]
            counts["forwards with" if force else "forwards without"] = after["forwards"] - before["forwards"]
            if force:
                tokens = sum(len(event.token_ids) for event in events)
                counts["forced share"] = (after["forced_tokens"] - before["forced_tokens"]) / tokens
            return {"wall": seconds}

        run = measure_pairs(lambda _: forms(True), lambda _: forms(False), sampler, plan, progress=progress)
        self._force(True)
        if texts[True] != texts[False]:
            raise BenchError("forced tokens changed a greedy value")
        result = summarise(run.pairs, "wall", plan.pairs)
        return PairFigure(what="forced tokens, wall off / on", result=result, pairs=run.pairs, counts=counts)

    def neighbours(self, rounds: int, round_s: float) -> NeighbourFigures:
        """Steps of unconstrained rows while constraints arrive."""
        new: list[float] = []
        known: list[float] = []
        unseen = (_unseen(schema, 1000 + i) for i in range(10**6) for schema in SCHEMAS.values())
        same = iter(lambda: JsonSchema(canonical_schema(_PERSON)), None)
        before = self.core.compiler.misses
        for index in range(2 * rounds + 1):
            is_new = index % 2 == 0
            p99 = self._round(unseen if is_new else same, round_s if index else min(2.0, round_s))
            if index:  # the first one warms up
                (new if is_new else known).append(p99)
        return NeighbourFigures(
            arrivals_per_s=_ARRIVALS_PER_S,
            new_p99_ms=tuple(new),
            known_p99_ms=tuple(known),
            ratio=statistics.median(new) / statistics.median(known),
            compiled=self.core.compiler.misses - before,
        )

    def _round(self, constraints: Iterator[Constraint], seconds: float) -> float:
        """99th percentile of the milliseconds between the neighbours' tokens."""
        self.core.flush_cache()
        budget = 4096
        rows = [
            self.start(f"{row}: Tell me a long story.", None, max_new_tokens=budget, ignore_eos=True)
            for row in range(_NUM_NEIGHBOURS)
        ]
        while self.core.scheduler.has_work and len(self.core.scheduler.running) < _NUM_NEIGHBOURS:
            self.core.step()
        arrivals: list[int] = []
        times: list[float] = []
        begun = last = time.perf_counter()
        while last - begun < seconds:
            if last - begun >= len(arrivals) / _ARRIVALS_PER_S:
                arrivals.append(self.start(f"{len(arrivals)}: JSON:", next(constraints), max_new_tokens=1))
            self.core.step()
            now = time.perf_counter()
            times.append(now - last)
            last = now
        self.finish(arrivals)
        for row in rows:
            self.core.cancel(row)
            self.values.pop(row, None)
        return _percentile(times, 99) * 1e3

    def _force(self, force: bool) -> None:
        config = msgspec.structs.replace(self.core.config, disable_forced_tokens=not force)
        self.core.apply(config, self.core.limits)


_NAMES = ("Harry Potter", "Hermione Granger", "Ron Weasley", "Luna Lovegood")


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))
