"""`sgl bench latency --peer NAME`: our engine against another one, in pairs, on the same cores and weights.

Owns what is compared: the cases (batch, prompt and new tokens), the metrics of each, the checks that make the sides
comparable, and the report. How pairs are made and judged is `sgl.bench.harness`; who can be a peer is
`sgl.bench.peers`. A figure that has not enough clean pairs is None in the report.

Raises `BenchError` before anything is measured when the sides differ in dtype, device, threads or weights.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from sgl.bench.harness import PairPlan, measure_pairs, wait_for_quiet
from sgl.bench.load import Fault, ProcSampler, Sampler, between, judge, least_busy
from sgl.bench.pairs import Pair, Result, summarise
from sgl.bench.peers import Peer, find_peer
from sgl.bench.peers.convert import converted
from sgl.bench.peers.messages import Generated, Load, Loaded, Tuned
from sgl.bench.peers.process import Side
from sgl.bench.prompts import Prompts
from sgl.bench.provenance import Model, Provenance, model_record, provenance, side_variables
from sgl.errors import BenchError, InvalidParameter
from sgl.runtime.config import config_from_mapping
from sgl.runtime.loading.facts import cpu_count
from sgl.runtime.loading.sources import ModelSource, locate

OURS = "sgl"
FIRST = "prompt to first token"
DECODE = "decode"
WHOLE = "end to end"
START = "process start to first token"

Progress = Callable[[str], None]

_TUNING_TRIES = 3
_TUNING_TOKENS = 16
_ASKED_ROWS = 2
"""Rows in which the peer is asked what it prefers."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One shape of call: `batch` prompts of `prompt_tokens`, each continued by `new_tokens`."""

    batch: int
    prompt_tokens: int
    new_tokens: int

    def __post_init__(self) -> None:
        if self.batch < 1 or self.prompt_tokens < 1 or self.new_tokens < 2:
            raise InvalidParameter(
                f"batch {self.batch}, prompt_tokens {self.prompt_tokens}, new_tokens {self.new_tokens}; "
                "expected at least 1, 1 and 2",
                param="batch",
            )

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.prompt_tokens}+{self.new_tokens} tokens"


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """How far the two sides say the same. In 16 bits near ties fall either way: less than 1 is no error by itself."""

    preferred: float | None
    """Share of our tokens that the peer, given our text so far, prefers as well, in the first rows (asking takes longer
    than generating); None where it cannot say."""
    common_prefix: float
    """Share of the tokens before the first difference in each row."""


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that a side chose for a case as the fastest."""

    chosen: dict[str, Any]
    tried: dict[str, float]
    """Seconds by candidate."""
    dirty: tuple[Fault, ...]
    """Why the choice is doubtful: what disturbed the last of several tries; empty after a clean one."""


class CaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """One case: a result per metric, and every pair with its raw times."""

    name: str
    results: tuple[Result, ...]
    pairs: tuple[Pair, ...]
    calls_per_turn: int
    case: Case | None = None
    agreement: Agreement | None = None
    tuned: dict[str, Tuning] = {}


class ComparisonReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `sgl bench latency --peer` found. `a` is our engine, `b` the peer; ratios are b over a."""

    model: Model
    provenance: Provenance
    plan: PairPlan
    a: Loaded
    b: Loaded
    peer: str
    weights_sha256: dict[str, str | None]
    mixed: bool
    """Whether the sides were allowed to keep the weights in different forms."""
    cases: tuple[CaseReport, ...]


def compare(
    fields: Mapping[str, Any],
    peer: str,
    *,
    cases: Sequence[Case],
    plan: PairPlan,
    peer_settings: Mapping[str, str] | None = None,
    peer_python: str | None = None,
    mixed: bool = False,
    startup: bool = True,
    sampler: Sampler | None = None,
    progress: Progress = lambda what: None,
) -> ComparisonReport:
    """Measure every case, and the start, against `peer`.

    Args:
        fields: those of `EngineConfig`, for our side; dtype, device and threads hold for both.
        peer_python: the interpreter of an environment of the peer's own.
        mixed: allow weights of different forms and precision on the two sides, as bfloat16 against the file's blocks.
        sampler: of the load; that of the chosen cores by default. Tests invent one.

    Raises:
        BenchError: a side cannot be started, or the sides are not comparable.
    """
    config = config_from_mapping(fields)
    row = find_peer(peer, elsewhere=peer_python is not None)
    threads = config.num_threads or cpu_count()
    source = locate(config.model_path, load_format=config.load_format, offline=config.offline)
    with ExitStack() as stack:
        given = readable(row, source, progress)
        if given is not source:
            fields = {**fields, "model_path": str(given.path), "load_format": "auto"}
        sides = _Sides(fields, row, threads, peer_settings or {}, peer_python, str(given.path))
        sampler = sampler or ProcSampler(sides.cores)
        progress("loading both sides")
        ours, theirs = stack.enter_context(sides.start(OURS)), stack.enter_context(sides.start(peer))
        a = ours.load(sides.load_ours())
        b = theirs.load(sides.load_peer(a))
        progress("comparing the weights")
        weights = {OURS: ours.weights_digest(), peer: theirs.weights_digest()}
        check_comparable(a, b, tuple(weights.values()), mixed=mixed)
        reports = [_run_case(case, (ours, theirs), (a, b), sampler, plan, progress) for case in cases]
        for side in (ours, theirs):
            side.close()
        if startup:
            reports.append(_run_startup(sides, a, sampler, plan, progress))
    return ComparisonReport(
        model=model_record(source),
        provenance=provenance(sides.cores, sides.variables, row.packages if peer_python is None else ()),
        plan=plan,
        a=a,
        b=b,
        peer=peer,
        weights_sha256=weights,
        mixed=mixed,
        cases=tuple(reports),
    )


def readable(peer: Peer, source: ModelSource, progress: Progress) -> ModelSource:
    """What both sides are to load so that the peer can: `source`, or a folder made from its GGUF file.

    Raises:
        BenchError: the peer reads another form, and nothing makes that of this one.
    """
    if peer.reads == "any" or (peer.reads == "gguf" and source.kind == "gguf"):
        return source
    if peer.reads == "folder" and source.path is not None and source.path.is_dir():
        return source
    if peer.reads == "folder" and source.kind == "gguf":
        return ModelSource(source.name, "safetensors", converted(source, progress))
    raise BenchError(f"{peer.name} reads a {peer.reads}; {source.name} is {source.kind}", hint="name another model")


def check_comparable(a: Loaded, b: Loaded, weights: Sequence[str | None], *, mixed: bool = False) -> None:
    """Refuse sides that would be compared for something else than their speed.

    Args:
        mixed: let weights and precision differ.

    Raises:
        BenchError: they differ in device, threads, quantization, dtype (where nothing is quantized: beside quantized
            weights it is that of keys and values only), or weights.
    """
    names = ["device", "num_threads"]
    if not mixed:
        names += ["quantization"] if a.quantization != "none" or b.quantization != "none" else ["dtype"]
    for name in names:
        ours, theirs = getattr(a, name), getattr(b, name)
        if ours != theirs:
            raise BenchError(
                f"{name} is {ours} on our side and {theirs} on the peer's", hint=f"set {name} to what the peer has"
            )
    if mixed:
        return
    known = {digest for digest in weights if digest is not None}
    if len(known) > 1:
        raise BenchError("the two sides compute with different weights", hint="load the same file on both sides")


def agreement(prompts: list[list[int]], ours: Generated, theirs: Generated, peer: Side) -> Agreement:
    """Compare the tokens of one call, whose prompts are of one length."""
    asked = ours.token_ids[:_ASKED_ROWS]
    texts = [prompt + row for prompt, row in zip(prompts, asked, strict=False)]
    liked = peer.preferred(texts, len(prompts[0]) - 1)
    total = sum(len(row) for row in ours.token_ids)
    return Agreement(
        preferred=None if liked is None else _agreeing(asked, liked) / sum(map(len, asked)),
        common_prefix=sum(map(common_prefix_len, ours.token_ids, theirs.token_ids)) / total,
    )


def common_prefix_len(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first difference.

    Example:
        >>> common_prefix_len([1, 2, 3], [1, 2, 4])
        2
    """
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    return length


def _agreeing(rows: list[list[int]], liked: list[list[int]]) -> int:
    """Tokens of our rows that the peer would have chosen there; it says one more, after the last."""
    return sum(
        token == preferred
        for row, preferences in zip(rows, liked, strict=True)
        for token, preferred in zip(row, preferences, strict=False)
    )


class _Sides:
    """How both sides are started: on which cores, with which variables, on which model."""

    def __init__(
        self,
        fields: Mapping[str, Any],
        peer: Peer,
        threads: int,
        peer_settings: Mapping[str, str],
        peer_python: str | None,
        path: str,
    ) -> None:
        self.peer = peer.name
        self._row = peer
        self._python = peer_python
        self._path = path
        self._fields = dict(fields)
        self._config = config_from_mapping(fields)
        self._threads = threads
        self._peer_settings = dict(peer_settings)
        self.cores: Collection[int] = least_busy(os.sched_getaffinity(0), threads)
        self.variables = side_variables(threads)

    def start(self, name: str) -> Side:
        if name != self.peer or name == OURS:
            return Side(name, self.cores, self.variables)
        return Side(name, self.cores, {**self._row.variables, **self.variables}, python=self._python)

    def load_ours(self) -> Load:
        config = self._config
        return Load(
            model_path=config.model_path,
            load_format=config.load_format,
            dtype=config.dtype,
            device=config.device,
            num_threads=self._threads,
            settings=self._fields,
        )

    def load_peer(self, ours: Loaded) -> Load:
        """The same with what our side resolved. Against itself, our engine keeps its options."""
        return Load(
            model_path=self._config.model_path if self._row.reads == "any" else self._path,
            load_format=self._config.load_format,
            dtype=ours.dtype,
            device=ours.device,
            num_threads=ours.num_threads,
            settings={**self._fields, **self._peer_settings} if self.peer == OURS else self._peer_settings,
        )


def _run_case(
    case: Case,
    sides: tuple[Side, Side],
    loaded: tuple[Loaded, Loaded],
    sampler: Sampler,
    plan: PairPlan,
    progress: Progress,
) -> CaseReport:
    high = min(each.vocab_size for each in loaded)

    def prompts(number: int | str) -> list[list[int]]:
        return Prompts(high, seed=f"{plan.seed} {case} {number}").take(case.batch, case.prompt_tokens)

    def call(side: Side) -> Callable[[int], dict[str, float]]:
        """Two generations: until the first token, and all of it. What lies between is decoding."""

        def once(number: int) -> dict[str, float]:
            first = side.generate(prompts(f"{number} first"), 1).seconds
            whole = side.generate(prompts(number), case.new_tokens).seconds
            return {FIRST: first, DECODE: whole - first, WHOLE: whole}

        return once

    ours, theirs = sides
    progress(f"{case}: choosing settings")
    tuned = {side.name: _tune(side, prompts("tune"), case.new_tokens, sampler, plan) for side in sides}
    sample = prompts("sample")
    said = agreement(
        sample, ours.generate(sample, case.new_tokens), theirs.generate(sample, case.new_tokens), peer=theirs
    )
    run = measure_pairs(
        call(ours),
        call(theirs),
        sampler,
        plan,
        sides=[ours.pid, theirs.pid],
        progress=lambda what: progress(f"{case}: {what}"),
    )
    return CaseReport(
        name=str(case),
        case=case,
        results=tuple(summarise(run.pairs, metric, plan.pairs) for metric in (FIRST, DECODE, WHOLE)),
        pairs=run.pairs,
        calls_per_turn=run.calls,
        agreement=said,
        tuned={name: choice for name, choice in tuned.items() if choice is not None},
    )


def _tune(side: Side, prompts: list[list[int]], new_tokens: int, sampler: Sampler, plan: PairPlan) -> Tuning | None:
    """Let a side choose its settings, again while the machine is disturbed; None where there is nothing to choose."""
    choice = Tuned()
    faults: tuple[Fault, ...] = ()
    for _ in range(_TUNING_TRIES):
        _, restless = wait_for_quiet(sampler, plan)
        start = sampler.read()
        choice = side.tune(prompts, min(new_tokens, _TUNING_TOKENS))
        faults = judge(between(start, sampler.read(), cores=sampler.cores), plan.rule)
        if not faults or restless or not choice.chosen:
            break  # nothing to gain by another try
    return Tuning(chosen=choice.chosen, tried=choice.tried, dirty=faults) if choice.chosen else None


def _run_startup(sides: _Sides, ours: Loaded, sampler: Sampler, plan: PairPlan, progress: Progress) -> CaseReport:
    """From starting a process to its first token, everything on the disk cached; the processes live for one call."""

    def call(name: str, load: Load) -> Callable[[int], dict[str, float]]:
        def once(number: int) -> dict[str, float]:
            prompt = Prompts(ours.vocab_size, seed=f"{plan.seed} start {number}").take(1, 8)
            start = time.perf_counter()
            with sides.start(name) as side:
                side.load(load)
                side.generate(prompt, 1)
                seconds = time.perf_counter() - start
            return {START: seconds}

        return once

    run = measure_pairs(
        call(OURS, sides.load_ours()),
        call(sides.peer, sides.load_peer(ours)),
        sampler,
        plan,
        progress=lambda what: progress(f"start: {what}"),
    )
    return CaseReport(
        name="start", results=(summarise(run.pairs, START, plan.pairs),), pairs=run.pairs, calls_per_turn=run.calls
    )
