"""Deterministic mode: the logits after a context are the same bits, however the context came to be computed, and so
what is drawn from them is the same, whether greedily, with a seed, under penalties or a constraint.

Every way of computing runs the same requests. `Watching` notes the bits of the logits after each context that any way
meets; the counters of each way prove that it was the way it says."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.scripted import seen_by

from sgl.grammars.spec import Constraint, Regex
from sgl.kernels.native import library
from sgl.lang.graph import (
    Event,
    FailedEvent,
    Fork,
    Gen,
    Graph,
    Node,
    ProgramOptions,
    Sampling,
    Tokens,
    ValueEvent,
)
from sgl.runtime.config import EngineConfig, ResolvedConfig
from sgl.runtime.core import EngineCore
from sgl.runtime.loading.checkpoint import Checkpoint, open_checkpoint
from sgl.runtime.loading.facts import load_native_kernels
from sgl.runtime.loading.sources import locate
from sgl.runtime.model_runner import ModelRunner
from sgl.runtime.models.registry import CausalLM
from sgl.runtime.plan import Move, StepPlan
from sgl.runtime.resolution import resolve
from sgl.runtime.sampler import Sampler
from sgl.runtime.stats import Stats
from sgl.runtime.text.tokenizer import Tokenizer

Outcome = tuple[Any, ...]
"""Everything that a client sees of a generation but its counters."""


@dataclass(frozen=True)
class Case:
    """One request. Its first `stem` ids are those of others, too."""

    ids: tuple[int, ...]
    stem: int
    sampling: Sampling
    constraint: Constraint | None = None

    def gen(self, id: int, branch: int = 0) -> Gen:
        return Gen(id=id, branch=branch, name=f"x{id}", sampling=self.sampling, constraint=self.constraint)


@dataclass(frozen=True)
class Way:
    """A way of computing: options of the engine, what its counters prove, how requests become programs, how many of
    these are open at the same time, and how often all are run."""

    options: Mapping[str, object]
    proof: Callable[[Stats], bool]
    form: str = "single"
    wave: int = 100
    rounds: int = 1


WAYS = {
    "alone": Way({"disable_radix_cache": True}, lambda s: s.cached_tokens == 0, wave=1),
    "batched": Way({"disable_radix_cache": True}, lambda s: s.forwards < s.requests),
    "cached": Way({}, lambda s: s.cached_tokens > 0.65 * s.prompt_tokens, rounds=2),
    "chunked": Way({"chunked_prefill_size": 24}, lambda s: s.prefill_tokens / s.forwards < 24),
    "forked": Way({}, lambda s: s.programs < s.requests and s.cached_tokens > s.prefill_tokens, form="forked"),
}
IN_TURNS = Way({}, lambda s: s.programs < s.requests and s.cached_tokens > s.prefill_tokens, form="turns")
TURNS = 3
UNDER_PRESSURE = {
    "retracted": Way(
        {"max_total_tokens": 130, "schedule_conservativeness": 0.001},
        lambda s: s.retractions > 0 and s.recomputed_tokens > 0,
    ),
    "in pages of four": Way({"max_running_requests": 7, "page_size": 4}, lambda s: s.copied_tokens > 0),
}


class Watching(ModelRunner):
    """Compares the logits after every context with those that were seen first."""

    seen: dict[bytes, bytes]
    differing: list[int]
    num_trees = 0
    """Chunks of all runners that branched."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.differing = []
        self.slots = np.full(self.cache.layer(0)[0].shape[0], -1, dtype=np.int32)

    def forward(self, plan: StepPlan, drawn: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().forward(plan, drawn)
        moved = [(self._slots_of(c.target, c.num_tokens), self._slots_of(c.source, c.num_tokens)) for c in plan.copies]
        for target, ids in [(target, self.slots[source].copy()) for target, source in moved]:
            self.slots[target] = ids
        for chunk in plan.chunks:
            self.slots[self._of(chunk.page_table, np.arange(chunk.start, chunk.end))] = chunk.token_ids
        rows = iter(logits.cpu().numpy())
        for chunk in plan.chunks:
            context = self.slots[self._of(chunk.page_table, np.arange(chunk.end))]
            assert -1 not in context
            for offset in chunk.logit_offsets:
                path = seen_by(chunk, offset)
                bits = hashlib.blake2b(next(rows).tobytes(), digest_size=16).digest()
                if self.seen.setdefault(context[path].tobytes(), bits) != bits:
                    self.differing.append(len(path))
            Watching.num_trees += bool(chunk.parents)
        return logits

    def move(self, moves: Sequence[Move]) -> None:
        super().move(moves)
        self.slots[[move.target for move in moves]] = self.slots[[move.source for move in moves]]

    def _of(self, page_table: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return page_table[positions // self.page_size] * self.page_size + positions % self.page_size

    def _slots_of(self, page: int, num_tokens: int) -> np.ndarray:
        return page * self.page_size + np.arange(num_tokens)


@dataclass
class Bench:
    """A model on which the same cases are run in several ways."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    deterministic: bool = True
    num_threads: int = 1
    numerics: Mapping[str, object] = field(default_factory=dict)
    seen: dict[bytes, bytes] = field(default_factory=dict)
    model: CausalLM | None = None

    def run(self, way: Way, cases: Sequence[Case]) -> tuple[list[Outcome], list[int]]:
        """Outcomes, and the lengths of contexts whose logits had other bits than `seen` says."""
        given = {"max_total_tokens": 8192, "max_running_requests": 32, "num_threads": self.num_threads, **way.options}
        config: ResolvedConfig = resolve(
            EngineConfig(**given, **self.numerics, enable_deterministic_inference=self.deterministic),
            self.checkpoint.facts(),
        )
        if self.model is None:
            if config.kernels == "native":
                load_native_kernels()
            self.model = self.checkpoint.build_model(
                config.dtype,
                config.device,
                deterministic=self.deterministic,
                kernels=config.kernels,
                quantization=config.quantization,
            )
        runner = Watching(self.model, self.checkpoint.config, config)
        runner.seen = self.seen
        places: dict[tuple[int, int], int] = {}  # (program, node) -> case
        found: dict[int, Outcome] = {}

        def emit(program: int, event: Event) -> None:
            assert not isinstance(event, FailedEvent), event
            if isinstance(event, ValueEvent):
                found[places[program, event.node]] = (event.value, event.token_ids, event.finish, event.logprobs)

        core = EngineCore(config, self.tokenizer, runner, Sampler(self.tokenizer.vocab_size), emit=emit)
        programs = count()
        for _ in range(way.rounds):
            found.clear()
            plans = FORMS[way.form](cases)
            while wave := list(islice(plans, way.wave)):
                for case_of_node, graph in wave:
                    program = next(programs)
                    places.update({(program, node): case for node, case in case_of_node.items()})
                    core.open(program, ProgramOptions())
                    core.submit(program, graph, finish=True)
                while core.has_work:
                    core.step()
                core.snapshot().check()
        assert way.proof(core.snapshot()), core.snapshot()
        return [found[case] for case in range(len(cases))], runner.differing


def singles(cases: Sequence[Case]) -> Iterator[tuple[dict[int, int], Graph]]:
    """A program for each case."""
    for index, case in enumerate(cases):
        yield {1: index}, Graph(nodes=(Tokens(id=0, token_ids=case.ids), case.gen(1)))


def forks(cases: Sequence[Case]) -> Iterator[tuple[dict[int, int], Graph]]:
    """A program for each stem, which forks into the cases that begin with it."""
    stems: dict[tuple[int, ...], list[int]] = {}
    for index, case in enumerate(cases):
        stems.setdefault(case.ids[: case.stem], []).append(index)
    for stem, members in stems.items():
        nodes: list[Node] = [
            Tokens(id=0, token_ids=stem),
            Fork(id=1, children=tuple(range(1, len(members) + 1))),
        ]
        case_of_node = {}
        for branch, index in enumerate(members, start=1):
            case = cases[index]
            nodes.append(Tokens(id=len(nodes), branch=branch, token_ids=case.ids[case.stem :]))
            case_of_node[len(nodes)] = index
            nodes.append(case.gen(len(nodes), branch))
        yield case_of_node, Graph(nodes=tuple(nodes))


def turns(cases: Sequence[Case]) -> Iterator[tuple[dict[int, int], Graph]]:
    """A program for every few cases: each one's ids and generation behind those before it."""
    for first in range(0, len(cases), TURNS):
        nodes: list[Node] = []
        case_of_node = {}
        for index, case in enumerate(cases[first : first + TURNS], start=first):
            nodes.append(Tokens(id=len(nodes), token_ids=case.ids))
            case_of_node[len(nodes)] = index
            nodes.append(case.gen(len(nodes)))
        yield case_of_node, Graph(nodes=tuple(nodes))


FORMS = {"single": singles, "forked": forks, "turns": turns}


def check_resubmitted(bench: Bench, cases: Sequence[Case]) -> None:
    """Every generation of programs of several turns, sent again as a plain request with all that stood before it."""
    outcomes, differing = bench.run(IN_TURNS, cases)
    assert not differing
    plain: list[Case] = []
    state: tuple[int, ...] = ()
    for index, (case, (_, token_ids, *_)) in enumerate(zip(cases, outcomes, strict=True)):
        before = state if index % TURNS else ()
        plain.append(replace(case, ids=(*before, *case.ids)))
        state = (*before, *case.ids, *token_ids)
    num_contexts = len(bench.seen)
    assert bench.run(WAYS["batched"], plain) == (outcomes, [])
    assert len(bench.seen) == num_contexts, "the very contexts that the programs were in"


KINDS: tuple[tuple[Mapping[str, Any], str | None], ...] = (
    ({"temperature": 0}, None),
    ({"temperature": 0}, None),
    ({"temperature": 0, "return_logprob": True, "top_logprobs_num": 3}, None),
    ({"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.3}, None),
    ({"temperature": 1.1, "top_p": 0.9, "top_k": 40}, None),
    ({"temperature": 0.8, "min_p": 0.02, "repetition_penalty": 0.8}, None),
    ({"temperature": 0}, "[0-9]{2,6}"),
    ({"temperature": 1.0}, "(yes|no|maybe)[.!]?"),
)


def toy_cases(number: int, new_tokens: Sequence[int] = (1, 2, 3)) -> list[Case]:
    """Random prompts over six stems; every kind of drawing, each with a seed of its own."""
    rng = random.Random(5)
    stems = [tuple(rng.randrange(256) for _ in range(length)) for length in (3, 3, 20, 20, 70, 70)]
    cases = []
    for index in range(number):
        stem = rng.choice(stems)
        tail = tuple(rng.randrange(256) for _ in range(rng.randint(1, 12)))
        options, regex = KINDS[index % len(KINDS)]
        sampling = Sampling(max_new_tokens=rng.choice(new_tokens), seed=index, ignore_eos=regex is None, **options)
        cases.append(Case(stem + tail, len(stem), sampling, Regex(regex) if regex is not None else None))
    return cases


def toy_bench(**fields: Any) -> Bench:
    return Bench(open_checkpoint(locate("dummy")), Tokenizer.toy(), **fields)


@pytest.mark.parametrize("count", [250, pytest.param(1000, marks=pytest.mark.slow)])
def test_toy_model(count: int) -> None:
    bench, cases = toy_bench(), toy_cases(count)
    outcomes = {name: bench.run(way, cases) for name, way in WAYS.items()}
    alone, _ = outcomes["alone"]
    assert outcomes == {name: (alone, []) for name in WAYS}
    assert len(bench.seen) > 1.5 * count, "contexts, most of them met in every way"
    check_resubmitted(bench, cases)
    drawn = [Sampling(**options).temperature > 0 for options, _ in KINDS]
    others = [
        replace(c, sampling=msgspec.structs.replace(c.sampling, seed=index + 10_000)) for index, c in enumerate(cases)
    ]
    other, _ = bench.run(WAYS["batched"], others[:200])
    changed = {index % len(KINDS) for index, outcome in enumerate(other) if outcome != alone[index]}
    assert changed == {kind for kind, random in enumerate(drawn) if random}, "a seed means something where one is drawn"


@pytest.mark.parametrize("number", [48, pytest.param(1000, marks=pytest.mark.slow)])
def test_under_pressure(number: int) -> None:
    """Longer outputs, which are put back in the middle and computed again, or stand on pages that they copied."""
    bench, cases = toy_bench(), toy_cases(number, new_tokens=(4, 8, 16))
    outcomes = {name: bench.run(way, cases) for name, way in {"alone": WAYS["alone"], **UNDER_PRESSURE}.items()}
    alone, _ = outcomes["alone"]
    assert outcomes == {name: (alone, []) for name in outcomes}


@pytest.mark.parametrize("way", ["batched", "chunked"])
def test_the_ordinary_path_is_told_apart(way: str) -> None:
    """The same check without deterministic mode finds differences, so it can."""
    bench, cases = toy_bench(deterministic=False), toy_cases(60)
    bench.run(WAYS["alone"], cases)
    assert bench.run(WAYS[way], cases)[1]


TOPICS = (
    "rain", "a lighthouse", "prime numbers", "bread", "the moon", "chess", "ants", "glass", "tea", "maps", "snow",
    "a clock", "rivers", "honey", "the sea", "music", "bees", "iron", "coffee", "stars", "wind", "a bridge", "zero",
    "salt", "the sun",
)  # fmt: skip


@pytest.mark.parametrize(
    ("num_topics", "new_tokens"), [(10, 2), pytest.param(25, 16, marks=pytest.mark.slow)], ids=["20", "50"]
)
def test_smollm2_prompts(num_topics: int, new_tokens: int) -> None:
    """Two prompts per topic in every way; the longer outputs of the slow case also under pressure."""
    checkpoint = open_checkpoint(locate("smollm2-135m"))
    bench = Bench(checkpoint, Tokenizer.from_gguf(checkpoint.gguf_metadata or {}), num_threads=2)
    cases = []
    for index, topic in enumerate(TOPICS[:num_topics]):
        for text, options in (
            (f"Here is a short text about {topic}. It begins", {"temperature": 0}),
            (f"Write a line about {topic}:", {"temperature": 1.0, "top_p": 0.95, "seed": index}),
        ):
            ids = tuple(bench.tokenizer.encode(text))
            cases.append(Case(ids, 4, Sampling(max_new_tokens=new_tokens, ignore_eos=True, **options)))
    ways = WAYS if num_topics == 10 else {**WAYS, "retracted": UNDER_PRESSURE["retracted"]}
    outcomes = {name: bench.run(way, cases) for name, way in ways.items()}
    alone, _ = outcomes["alone"]
    assert outcomes == {name: (alone, []) for name in outcomes}
    assert len(bench.seen) == 2 * num_topics * new_tokens
    check_resubmitted(bench, cases)


needs_compiler = pytest.mark.skipif(library.compiler() is None, reason="there is no C++ compiler")


@needs_compiler
@pytest.mark.parametrize("numerics", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=["bfloat16", "int8"])
def test_native_kernels_give_the_same_bits_in_every_way_too(numerics: Mapping[str, object]) -> None:
    """Without deterministic mode: their sums have one order, whatever is in the step."""
    bench = toy_bench(deterministic=False, num_threads=2, numerics=numerics)
    cases = toy_cases(48, new_tokens=(4, 8, 16))
    outcomes = {name: bench.run(way, cases) for name, way in {**WAYS, **UNDER_PRESSURE}.items()}
    alone, _ = outcomes["alone"]
    assert outcomes == {name: (alone, []) for name in outcomes}


@needs_compiler
def test_native_kernels_on_the_blocks_of_smollm2() -> None:
    checkpoint = open_checkpoint(locate("smollm2-135m"))
    bench = Bench(checkpoint, checkpoint.tokenizer(), False, 2, {"quantization": "gguf"})
    cases = [
        Case(tuple(bench.tokenizer.encode(f"Here is a short text about {topic}. It begins")), 4, sampling)
        for topic in TOPICS[:8]
        for sampling in (Sampling(max_new_tokens=6, ignore_eos=True, temperature=0),)
    ]
    outcomes = {name: bench.run(way, cases) for name, way in WAYS.items()}
    alone, _ = outcomes["alone"]
    assert outcomes == {name: (alone, []) for name in outcomes}
