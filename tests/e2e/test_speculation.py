"""Speculation in deterministic mode: whatever guesses, the outcomes are those of an engine that guesses nothing.

The toy model repeats itself often enough that guesses are right; its counters prove that each way speculated.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from e2e.test_deterministic import KINDS, Bench, Case, Watching, Way, toy_bench

from sgl.grammars.spec import Regex
from sgl.lang.graph import Event, Gen, Graph, ProgramOptions, Sampling, Tokens, ValueEvent
from sgl.runtime.config import config_from_mapping
from sgl.runtime.engine_start import build_core
from sgl.runtime.loading.checkpoint import open_checkpoint
from sgl.runtime.loading.sources import locate
from sgl.runtime.stats import Stats
from sgl.runtime.text.tokenizer import Tokenizer

OFF = Way({}, lambda s: s.drafted_tokens == 0)
ALWAYS: Mapping[str, object] = {"speculative_algorithm": "NGRAM", "speculative_adaptive": False}


def _speculated(stats: Stats) -> bool:
    return 0 < stats.accepted_tokens < stats.drafted_tokens


WAYS = {
    "n-gram": Way(ALWAYS, _speculated),
    "frequent, few": Way(
        {**ALWAYS, "speculative_ngram_match_type": "PROB", "speculative_num_draft_tokens": 3}, _speculated
    ),
    "as it pays": Way({"speculative_algorithm": "NGRAM"}, lambda s: s.accepted_tokens <= s.drafted_tokens),
    "chunked": Way({**ALWAYS, "chunked_prefill_size": 24}, _speculated),
    "forked": Way(ALWAYS, _speculated, form="forked"),
    "retracted": Way(
        {**ALWAYS, "max_total_tokens": 150, "schedule_conservativeness": 0.001},
        lambda s: _speculated(s) and s.retractions > 0,
    ),
    "in pages of four": Way({**ALWAYS, "page_size": 4, "max_running_requests": 7}, _speculated),
    "chains": Way({**ALWAYS, "speculative_ngram_max_bfs_breadth": 1}, _speculated),
    "little cache": Way({**ALWAYS, "disable_radix_cache": True}, _speculated),
}


def repetitive_cases(number: int) -> list[Case]:
    """Prompts that say the same thing several times, with every kind of drawing."""
    rng = random.Random(11)
    cases = []
    for index in range(number):
        word = tuple(rng.randrange(97, 123) for _ in range(rng.randint(2, 5)))
        ids = (*word, 32) * rng.randint(2, 6)
        options, regex = KINDS[index % len(KINDS)]
        sampling = Sampling(max_new_tokens=rng.choice((4, 8, 16)), seed=index, ignore_eos=regex is None, **options)
        cases.append(Case(ids, len(word), sampling, Regex(regex) if regex is not None else None))
    return cases


def test_toy_model() -> None:
    check_toy_model(200, others=32)


@pytest.mark.slow
def test_toy_model_3000_requests() -> None:
    check_toy_model(3000, others=3000)


def check_toy_model(number: int, *, others: int) -> None:
    """So many requests in the first way, and in each other one."""
    bench, cases = toy_bench(), repetitive_cases(number)
    off, _ = bench.run(OFF, cases)
    for name, way in WAYS.items():
        some = number if name == "n-gram" else others
        trees = Watching.num_trees
        outcomes, differing = bench.run(way, cases[:some])
        assert (outcomes, differing) == (off[:some], []), name
        if name in ("n-gram", "forked", "retracted", "chains"):
            assert (Watching.num_trees > trees) == (name != "chains"), name
    cases = cases[:others]
    in_turns = replace(OFF, form="turns")
    plain, _ = bench.run(in_turns, cases)
    outcomes, differing = bench.run(Way(ALWAYS, _speculated, form="turns"), cases)
    assert (outcomes, differing) == (plain, [])


@pytest.mark.parametrize(("layers", "accepts"), [(2, "all"), (1, "some")])
def test_a_draft_model(layers: int, accepts: str) -> None:
    """The toy model guesses for itself, where it is always right, greedily and not, and for a shorter one."""
    plain, _ = _run_dummy(layers)
    values, stats = _run_dummy(layers, speculative_algorithm="STANDALONE", speculative_draft_model_path="dummy")
    assert values == plain
    assert stats.drafted_tokens > 30
    assert (stats.accepted_tokens == stats.drafted_tokens) == (accepts == "all")
    assert stats.accepted_tokens


def _run_dummy(layers: int, **options: object) -> tuple[list[tuple[int, ...]], Stats]:
    """Tokens of a few requests of every kind on the toy model; the engine's counters."""
    values: dict[int, tuple[int, ...]] = {}

    def emit(program: int, event: Event) -> None:
        if isinstance(event, ValueEvent):
            values[program] = event.token_ids

    fields = {"json_model_override_args": {"num_hidden_layers": layers}, **options}
    if options:
        fields["speculative_adaptive"] = False
    core, _ = build_core(
        config_from_mapping({"model_path": "dummy", "enable_deterministic_inference": True, **fields}), emit=emit
    )
    for program, (sampling, regex) in enumerate(KINDS):
        node = Gen(
            id=1,
            name="x",
            constraint=Regex(regex) if regex is not None else None,
            sampling=Sampling(max_new_tokens=16, seed=program, ignore_eos=regex is None, **sampling),
        )
        core.open(program, ProgramOptions())
        core.submit(program, Graph(nodes=(Tokens(id=0, token_ids=tuple(range(60, 80 + program))), node)), finish=True)
    while core.has_work:
        core.step()
    core.snapshot().check()
    core.compiler.close()
    return [values[program] for program in range(len(KINDS))], core.snapshot()


SENTENCE = "The ferry leaves the old harbour at nine, and comes back to the old harbour at noon."


@pytest.mark.parametrize("number", [4, pytest.param(300, marks=pytest.mark.slow)])
def test_smollm2(number: int) -> None:
    """Real text: copying, constrained, sampled, penalized; each kind with prompts of its own."""
    checkpoint = open_checkpoint(locate("smollm2-135m"))
    bench = Bench(checkpoint, Tokenizer.from_gguf(checkpoint.gguf_metadata or {}), num_threads=2)
    cases = []
    for index in range(number):
        options, regex = KINDS[index % len(KINDS)]
        ids = tuple(bench.tokenizer.encode(f"{index}. {SENTENCE} {SENTENCE} {SENTENCE[: 20 + index % 40]}"))
        sampling = Sampling(max_new_tokens=10, seed=index, ignore_eos=regex is None, **options)
        cases.append(Case(ids, 2, sampling, Regex(regex) if regex is not None else None))
    off, _ = bench.run(OFF, cases)
    outcomes, differing = bench.run(WAYS["n-gram"], cases)
    assert (outcomes, differing) == (off, [])
