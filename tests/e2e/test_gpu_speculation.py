"""Speculation on a CUDA device: the tokens of an engine that guesses nothing, in float32, whoever guesses, and graphs
of its verifications."""

from __future__ import annotations

from typing import Any

import pytest

from sgl.bench.steps import StepBench

pytestmark = pytest.mark.gpu

PROMPTS = [[*range(60, 60 + 5 + i)] * (3 + i % 3) for i in range(8)]
NGRAM = {"speculative_algorithm": "NGRAM"}
DRAFT = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "dummy"}
WAYS: dict[str, dict[str, Any]] = {
    "chains": {**NGRAM, "speculative_ngram_max_bfs_breadth": 1},
    "trees": NGRAM,
    "trees in pages of four": {**NGRAM, "page_size": 4},
    "launched one by one": {**NGRAM, "disable_decode_cuda_graph": True},
    "steps in turns": {**NGRAM, "disable_overlap_schedule": True},
    "draft model": DRAFT,
}


def complete(
    batch: int = 8, rounds: int = 1, temperature: float = 0.0, **fields: Any
) -> tuple[list[list[tuple[int, ...]]], Any, Any]:
    """Tokens of each round by a core in this process, greedy ones if nothing else is asked for; its counters, and what
    records its steps."""
    bench = StepBench({"model_path": "dummy", "device": "cuda", "dtype": "float32", "max_total_tokens": 8192, **fields})
    try:
        tokens = [bench.complete(PROMPTS[:batch], 40, temperature) for _ in range(rounds)]
        stats = bench.core.snapshot()
        stats.check()
        return tokens, stats, bench.core._runner._gpu_steps  # type: ignore[attr-defined]
    finally:
        bench.close()


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    return complete()[0][0]


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_without_guesses(plain: list[tuple[int, ...]], way: str) -> None:
    (first, second), stats, steps = complete(rounds=2, speculative_adaptive=False, **WAYS[way])
    assert first == plain
    assert second == plain
    assert 0 < stats.accepted_tokens <= stats.drafted_tokens
    assert stats.forwards < 2 * 40
    assert bool(steps._verify_graphs) == (way != "launched one by one")


def test_one_row_at_a_time(plain: list[tuple[int, ...]]) -> None:
    """Its verifications are recorded."""
    (tokens, _, again), stats, steps = complete(batch=1, rounds=3, speculative_adaptive=False, **NGRAM)
    assert tokens == again == plain[:1]
    assert stats.accepted_tokens
    assert any(size.rows == 1 for size in steps._verify_graphs)


def test_as_it_pays(plain: list[tuple[int, ...]]) -> None:
    """Costs of steps are learned from the device's clock, also where steps overlap."""
    tokens, stats, _ = complete(rounds=3, **NGRAM)
    assert tokens == [plain] * 3
    assert stats.device_busy_s > 0
    assert stats.accepted_tokens <= stats.drafted_tokens


def test_a_step_that_was_recorded_on_the_way_is_no_usual_one() -> None:
    """What is learned of times is far from what recording takes, and no step of few rows is launched one by one."""
    bench = StepBench({"model_path": "dummy", "device": "cuda", "max_total_tokens": 8192, **NGRAM})
    try:
        for _ in range(3):
            bench.complete(PROMPTS, 40)
        drafter, steps = bench.core.scheduler.drafter, bench.core.runner._gpu_steps
        assert drafter is not None
        known = [*drafter.costs._seconds.values(), *drafter._overlapped._seconds.values()]
        assert known
        assert max(known) < 0.02
        assert {size.rows for size in steps._verify_graphs} >= {1, 2, 4, 8}
    finally:
        bench.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rule", ["speculative_use_rejection_sampling", "speculative_use_block_verification"])
def test_rejection_sampling(rule: str, dtype: str) -> None:
    """The draft model is the model: nearly everything that it draws is accepted, by either rule."""
    fields = {**DRAFT, rule: True, "dtype": dtype, "speculative_adaptive": False}
    (tokens,), stats, _ = complete(temperature=1.0, **fields)
    assert [len(each) for each in tokens] == [40] * 8
    assert stats.accepted_tokens > 0.8 * stats.drafted_tokens > 0


@pytest.mark.parametrize("way", ["chains", "trees", "draft model"])
def test_bfloat16(way: str) -> None:
    """Another shape of a step may break a near tie otherwise; everything else holds."""
    (first, second), stats, _ = complete(rounds=2, **{**WAYS[way], "speculative_adaptive": False, "dtype": "bfloat16"})
    assert [len(tokens) for tokens in first] == [len(tokens) for tokens in second]
    assert stats.accepted_tokens
