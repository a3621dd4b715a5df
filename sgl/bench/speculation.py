"""`sgl bench speculation`: what guessed tokens save, and what they cost where there is nothing to guess.

Owns the tasks and the measurement, on a CPU or a GPU. One engine core in this process decodes the same prompts with its
drafter and without, in turns; pairs, the watch over the cores and the statistics are those of `sgl.bench.harness`.
Every call has documents and seeds of its own, equal on both sides, so that nothing is guessed from having been answered
before; what the drafter has learned of the programs and of the machine it keeps, as in use.

* `copy`: a text is to be repeated.
* `json`: facts of a text under a JSON schema, keys forced on both sides.
* `chain`: a form of short generations with literals between them, about a text.
* `random`: sampled text, at temperature 1, which nothing foretells.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from sgl.bench.harness import PairPlan, measure_pairs
from sgl.bench.load import CleanRule, ProcSampler, Sampler, least_busy
from sgl.bench.pairs import Pair, Result, summarise
from sgl.bench.provenance import Provenance, provenance, side_variables
from sgl.errors import BenchError, ConfigError
from sgl.grammars.spec import Constraint, JsonSchema, canonical_schema
from sgl.lang.graph import (
    Event,
    FailedEvent,
    Gen,
    Graph,
    LiteralText,
    Node,
    ProgramOptions,
    Role,
    Sampling,
    Text,
    ValueEvent,
)
from sgl.runtime.config import config_from_mapping
from sgl.runtime.core import EngineCore
from sgl.runtime.engine_start import build_core
from sgl.runtime.loading.facts import cpu_count
from sgl.runtime.plan import StepPlan

TASKS = ("copy", "json", "chain", "random")
BATCHES = (1, 8, 32)


_HOST_THREADS = 2
_MOST_WARM_UPS, _QUIET_WARM_UPS = 24, 4
"""Calls of each side before the clock runs, and how many that record nothing end them."""
_BESIDE_A_GPU = CleanRule(max_foreign=0.1, max_steal=0.1)
"""The host of a GPU only feeds it."""


class TaskFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One task at one batch size; the ratio is the time without speculation over the time with it.

    Attributes:
        accept_len: tokens that a verification gave on average.
        forwards, forwards_off: of one call, the last of each side.
        verified: share of the steps with drafts under way, of all steps of the side that speculates.
        recorded: steps that were recorded as CUDA graphs in the measured time; what is measured is then not yet usual.
        equal: share of the rows whose tokens were the same on both sides; in 16 bits near ties may fall either way.
    """

    task: str
    batch: int
    result: Result
    pairs: tuple[Pair, ...]
    accept_len: float
    forwards: int
    forwards_off: int
    equal: float
    verified: float = 0.0
    recorded: int = 0


class SpeculationReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `sgl bench speculation` prints."""

    model: str
    device: str
    plan: PairPlan
    provenance: Provenance
    figures: tuple[TaskFigure, ...]


def run(
    fields: Mapping[str, Any],
    *,
    plan: PairPlan,
    tasks: Sequence[str] = (),
    batches: Sequence[int] = (),
    new_tokens: int = 96,
    most_seconds: float = math.inf,
    sampler: Sampler | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> SpeculationReport:
    """Measure `tasks` (all by default) at `batches`, on the engine that `fields` describe.

    Args:
        new_tokens: of a generation of one program; fewer of several (`tokens_at`).
        most_seconds: no figure is begun later than this.

    Raises:
        ConfigError: a task that does not exist, or speculation that is switched off.
        BenchError: a generation failed.
    """
    for task in tasks:
        if task not in TASKS:
            raise ConfigError(f"there is no task {task!r}", hint=f"tasks are {', '.join(TASKS)}", param="task")
    fields = {"speculative_algorithm": "NGRAM", **fields}
    config = config_from_mapping(fields)
    on_gpu = config.device == "cuda"
    threads = config.num_threads or (1 if config.model_path == "dummy" else _HOST_THREADS if on_gpu else cpu_count())
    if on_gpu:
        plan = msgspec.structs.replace(plan, rule=_BESIDE_A_GPU)
    cores = least_busy(os.sched_getaffinity(0), threads)
    watch = ProcSampler(cores) if sampler is None else sampler
    bench = _Bench({**fields, "num_threads": threads})
    figures = []
    begun = time.perf_counter()
    try:
        for batch, task in itertools.product(batches or BATCHES, tasks or TASKS):
            if time.perf_counter() - begun > most_seconds:
                progress(f"{task} at batch {batch} is left out: {most_seconds:.0f} s are over")
                continue
            figures.append(bench.measure(task, batch, tokens_at(batch, new_tokens), watch, plan, progress))
            progress(f"{task} at batch {batch}: {told(figures[-1])}")
    finally:
        bench.core.compiler.close()
    return SpeculationReport(
        model=config.model_path,
        device=bench.device,
        plan=plan,
        provenance=provenance(cores, side_variables(threads), ()),
        figures=tuple(figures),
    )


def told(figure: TaskFigure) -> str:
    """A figure in a line."""
    return (
        f"{figure.result.verdict}; {figure.accept_len:.2f} tokens of a verification, {figure.verified:.0%} of the "
        f"steps verified, {figure.recorded} recorded meanwhile"
    )


def tokens_at(batch: int, new_tokens: int) -> int:
    """Tokens of a generation of a batch: a call of many programs takes as long with fewer.

    Example:
        >>> tokens_at(1, 96), tokens_at(8, 96), tokens_at(64, 96)
        (96, 51, 32)
    """
    return min(new_tokens, max(32, int(new_tokens / batch**0.3)))


class _Core(EngineCore):
    """An engine core that keeps its runner at hand, and counts its steps, and those that verify drafts."""

    def __init__(self, config: Any, tokenizer: Any, runner: Any, sampler: Any, **services: Any) -> None:
        super().__init__(config, tokenizer, runner, sampler, **services)
        self.runner = runner
        self.num_steps = self.num_verifying = 0

    def _compute(self, plan: StepPlan, drawn: Any = None) -> Any:
        if self.scheduler.drafter is not None:
            self.num_steps += 1
            self.num_verifying += any(chunk.num_drafts for chunk in plan.chunks)
        return super()._compute(plan, drawn)


class _Bench:
    """One engine core, with and without its drafter."""

    def __init__(self, fields: dict[str, Any]) -> None:
        core, _ = build_core(config_from_mapping(fields), emit=self._emit, kind=_Core)
        if not isinstance(core, _Core):
            raise BenchError(f"build_core made a {type(core).__name__}")
        self.core = core
        self._drafter = self.core.scheduler.drafter
        if self._drafter is None:
            raise ConfigError(
                "speculative_algorithm is NONE: there is nothing to measure",
                hint="leave speculative_algorithm out",
                param="speculative_algorithm",
            )
        self._next = 0
        self._tokens: dict[int, list[tuple[int, ...]]] = {}

    @property
    def device(self) -> str:
        """Where the model is."""
        if self.core.config.device == "cpu":
            return "cpu"
        import torch

        return torch.cuda.get_device_name()

    def _emit(self, program: int, event: Event) -> None:
        if isinstance(event, FailedEvent):
            raise BenchError(f"a generation of the bench failed: {event.error.message}")
        if isinstance(event, ValueEvent):
            self._tokens.setdefault(program, []).append(event.token_ids)

    def measure(
        self, task: str, batch: int, new_tokens: int, sampler: Sampler, plan: PairPlan, progress: Callable[[str], None]
    ) -> TaskFigure:
        """Pairs of the same calls with drafts (a) and without (b)."""
        tokens: dict[bool, list[list[tuple[int, ...]]]] = {True: [], False: []}
        forwards: dict[bool, int] = {}

        def call(number: int, *, speculates: bool) -> dict[str, float]:
            self.core.scheduler.drafter = self._drafter if speculates else None
            self.core.flush_cache()
            before = self.core.snapshot().forwards
            begun = time.perf_counter()
            tokens[speculates].append(self._run(task, batch, new_tokens, plan.seed + number))
            seconds = time.perf_counter() - begun
            forwards[speculates] = self.core.snapshot().forwards - before
            return {"wall": seconds}

        self._warm_up(lambda number: [call(number, speculates=speculates) for speculates in (True, False)])
        for kept in tokens.values():
            kept.clear()
        core = self.core
        start, counts = core.snapshot().as_dict(), (core.num_steps, core.num_verifying, core.runner.num_recorded)
        pairs = measure_pairs(
            lambda number: call(number, speculates=True),
            lambda number: call(number, speculates=False),
            sampler,
            plan,
            progress=progress,
        ).pairs
        self.core.scheduler.drafter = self._drafter
        end = self.core.snapshot().as_dict()
        num_steps, num_verifying, num_recorded = (
            now - before
            for now, before in zip((core.num_steps, core.num_verifying, core.runner.num_recorded), counts, strict=True)
        )
        accepted, verified = (end[name] - start[name] for name in ("accepted_tokens", "verifications"))
        rows = [
            ours == others
            for one, other in zip(tokens[True], tokens[False], strict=False)
            for ours, others in zip(one, other, strict=True)
        ]
        return TaskFigure(
            task=task,
            batch=batch,
            result=summarise(pairs, "wall", plan.pairs),
            pairs=pairs,
            accept_len=1 + accepted / max(1, verified),
            forwards=forwards.get(True, 0),
            forwards_off=forwards.get(False, 0),
            equal=sum(rows) / max(1, len(rows)),
            verified=num_verifying / max(1, num_steps),
            recorded=num_recorded,
        )

    def _warm_up(self, both: Callable[[int], object]) -> None:
        """On a GPU, calls until none records a step any more; drafts have found their usual sizes then."""
        if self.core.config.device != "cuda":
            return
        num_quiet = 0
        for number in range(_MOST_WARM_UPS):
            before = self.core.runner.num_recorded
            both(-2 - number)
            num_quiet = num_quiet + 1 if self.core.runner.num_recorded == before else 0
            if num_quiet == _QUIET_WARM_UPS:
                return

    def _run(self, task: str, batch: int, new_tokens: int, seed: int) -> list[tuple[int, ...]]:
        """One call: `batch` programs from start to end; the tokens of each."""
        programs = []
        for row in range(batch):
            number, self._next = self._next, self._next + 1
            programs.append(number)
            self.core.open(number, ProgramOptions(name=f"bench {task}"))
            nodes = task_nodes(task, random.Random(f"{task}:{seed}:{row}"), new_tokens)
            self.core.submit(number, Graph(nodes=tuple(nodes)), finish=True)
        while self.core.has_work:
            self.core.step()
        return [tuple(token for ids in self._tokens.pop(number) for token in ids) for number in programs]


# --- the tasks --------------------------------------------------------------------------------------------------------

_FIRST = ("Eleanor", "Tomas", "Ingrid", "Malcolm", "Yusuf", "Beatrice", "Henrik", "Paloma", "Rashid", "Cordelia")
_LAST = ("Whitcombe", "Lindqvist", "Okafor", "Brannigan", "Castellan", "Drummond", "Varga", "Hollis", "Petrov", "Amari")
_PLACES = ("Mount Harlan", "Alderney", "Port Sable", "Kestrel Ridge", "Low Fenwick", "Tarrow", "Saint Isarn", "Vell")
_KINDS = ("Observatory", "Library", "Museum", "Botanical Garden", "Lighthouse", "Archive")
_DAYS = ("Mondays", "Tuesdays", "Thursdays", "Saturdays", "Sundays")
_OPENINGS = (
    "Write a poem about the sea", "Tell me about a long day", "Explain why the sky is blue", "Tell a story of a fox",
    "Describe a market in the rain", "Give advice to a young painter", "Write a letter to an old friend",
)  # fmt: skip
_FIELDS = ("name", "founder", "place", "builder", "director", "phone")


def facts(rng: random.Random) -> str:
    """A paragraph with invented facts.

    Example:
        >>> facts(random.Random(1)) == facts(random.Random(1)) != facts(random.Random(2))
        True
    """

    def person() -> str:
        return f"{rng.choice(_FIRST)} {rng.choice(_LAST)}"

    place = rng.choice(_PLACES)
    return (
        f"The {place} {rng.choice(_KINDS)} was founded in {rng.randint(1820, 1995)} by {person()}, who led it for "
        f"{rng.randint(8, 40)} years. It stands at {rng.randint(20, 900)} {rng.choice(_LAST)} Street in "
        f"{rng.choice(_PLACES)}, {rng.randint(100, 2900)} metres above the sea, and was built by "
        f"{rng.choice(_LAST)} & {rng.choice(_LAST)} of {rng.choice(_PLACES)} at a cost of "
        f"{rng.randint(20, 950)},{rng.randint(100, 999)} crowns. Visitors are welcome on {rng.choice(_DAYS)} from "
        f"{rng.randint(8, 12)}:00 to {rng.randint(15, 22)}:30; a ticket costs {rng.randint(3, 40)} crowns. "
        f"The present director is {person()}, assisted by {person()} and {person()}; the telephone number is "
        f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}-{rng.randint(1000, 9999)}."
    )


def task_nodes(task: str, rng: random.Random, new_tokens: int) -> list[Node]:
    """The program of one row."""
    text = facts(rng)
    seed = rng.randrange(2**31)
    if task == "copy":
        return _turn(f"Repeat the following text exactly, word for word:\n\n{text}", new_tokens)
    if task == "json":
        fields = {name: {"type": "string", "maxLength": 60} for name in _FIELDS}
        schema = {"type": "object", "properties": fields, "required": list(_FIELDS), "additionalProperties": False}
        question = f"{text}\n\nGive these facts as JSON, word for word."
        return _turn(question, 2 * new_tokens, JsonSchema(canonical_schema(schema)))
    if task == "chain":
        return _form(text)
    opening = f"{rng.choice(_OPENINGS)}, and begin with the number {rng.randint(2, 999)}."
    return _turn(opening, new_tokens, temperature=1.0, seed=seed, ignore_eos=True)


def _turn(question: str, new_tokens: int, constraint: Constraint | None = None, **sampling: Any) -> list[Node]:
    fields = {"max_new_tokens": new_tokens, "temperature": 0.0, **sampling}
    return [
        Role(id=0, role="user", begin=True),
        Text(id=1, segments=(LiteralText(question),)),
        Role(id=2, role="user", begin=False),
        Role(id=3, role="assistant", begin=True),
        Gen(id=4, name="answer", constraint=constraint, sampling=Sampling(**fields)),
    ]


def _form(text: str) -> list[Node]:
    """Lines of a form: a literal names what comes, a generation fills it in up to the line's end."""
    lines = (
        "Founded in the year", "Founder", "Street", "Town", "Height in metres", "Builders", "Cost", "Opening days",
        "Ticket price", "Director", "Assistants", "Telephone number",
    )  # fmt: skip
    nodes: list[Node] = [Text(id=0, segments=(LiteralText(f"{text}\n\nSummary of the text:\nName:"),))]
    sampling = Sampling(max_new_tokens=16, temperature=0.0, stop=("\n",))
    for number, line in enumerate(lines, start=1):
        nodes.append(Gen(id=2 * number - 1, name=f"line{number}", sampling=sampling))
        nodes.append(Text(id=2 * number, segments=(LiteralText(f"\n{line}:"),)))
    return [*nodes, Gen(id=2 * len(lines) + 1, name="last", sampling=sampling)]
