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


def complete(batch: int = 8, rounds: int = 1, **fields: Any) -> tuple[list[list[tuple[int, ...]]], Any, Any]:
    """Greedy tokens of each round by a core in this process, its counters, and what records its steps."""
    bench = StepBench({"model_path": "dummy", "device": "cuda", "dtype": "float32", "max_total_tokens": 8192, **fields})
    try:
        tokens = [bench.complete(PROMPTS[:batch], 40) for _ in range(rounds)]
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
    """Its verifications are recorded, those of few tokens at start."""
    (tokens, _, again), stats, steps = complete(batch=1, rounds=3, speculative_adaptive=False, **NGRAM)
    assert tokens == again == plain[:1]
    assert stats.accepted_tokens
    assert {size.rows for size in steps._verify_graphs} == {1}


def test_as_it_pays(plain: list[tuple[int, ...]]) -> None:
    """Costs of steps are learned from the device's clock, also where steps overlap."""
    tokens, stats, _ = complete(rounds=3, **NGRAM)
    assert tokens == [plain] * 3
    assert stats.device_busy_s > 0
    assert stats.accepted_tokens <= stats.drafted_tokens


@pytest.mark.parametrize("way", ["chains", "trees", "draft model"])
def test_bfloat16(way: str) -> None:
    """Another shape of a step may break a near tie otherwise; everything else holds."""
    (first, second), stats, _ = complete(rounds=2, **{**WAYS[way], "speculative_adaptive": False, "dtype": "bfloat16"})
    assert [len(tokens) for tokens in first] == [len(tokens) for tokens in second]
    assert stats.accepted_tokens
