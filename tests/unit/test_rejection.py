"""Rejection sampling gives the verifier's distribution, by token and by block; a biased verifier is found out."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch

from sgl.runtime.speculation.rejection import Verdict, by_block, by_token

Verify = Callable[[Sequence[int], torch.Tensor, torch.Tensor, Sequence[float]], Verdict]
VOCAB, LENGTH, RUNS = 3, 3, 4_000


def table(seed: int) -> dict[tuple[int, ...], list[float]]:
    """A distribution of the next token after every context of up to `LENGTH` tokens."""
    rng = random.Random(seed)
    rows = {}
    for length in range(LENGTH + 1):
        for context in itertools.product(range(VOCAB), repeat=length):
            weights = [rng.random() ** 2 + 0.01 for _ in range(VOCAB)]
            rows[context] = [weight / sum(weights) for weight in weights]
    return rows


def sample(verify: Verify, p: dict, q: dict, num_drafts: int, rng: random.Random) -> tuple[tuple[int, ...], int]:  # type: ignore[type-arg]
    """`LENGTH` tokens of text: drafts from `q`, verified against `p`, as often as it takes; and accepted drafts."""
    text: tuple[int, ...] = ()
    accepted = 0
    while len(text) < LENGTH:
        num = min(num_drafts, LENGTH - len(text) - 1)
        drafts: list[int] = []
        for _ in range(num):
            drafts += rng.choices(range(VOCAB), q[(*text, *drafts)])
        contexts = [(*text, *drafts[:k]) for k in range(num + 1)]
        q_KV = torch.tensor([q[c] for c in contexts[:num]], dtype=torch.float64).reshape(num, VOCAB)
        p_KV = torch.tensor([p[c] for c in contexts], dtype=torch.float64)
        verdict = verify(drafts, q_KV, p_KV, [rng.random() for _ in range(num + 1)])
        accepted += verdict.num_accepted
        text = (*text, *drafts[: verdict.num_accepted], verdict.token_id)
    return text, accepted


def chi_square(verify: Verify, num_drafts: int, seed: int) -> tuple[float, int, float]:
    """The statistic over all texts of `LENGTH` tokens, its degrees of freedom, and accepted drafts per run."""
    p, q, rng = table(seed), table(seed + 100), random.Random(seed)
    runs = [sample(verify, p, q, num_drafts, rng) for _ in range(RUNS)]
    counts = Counter(text for text, _ in runs)
    statistic = 0.0
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        expected = RUNS
        for k in range(LENGTH):
            expected *= p[text[:k]][text[k]]
        statistic += (counts[text] - expected) ** 2 / expected
    return statistic, VOCAB**LENGTH - 1, sum(accepted for _, accepted in runs) / RUNS


BOUND = 26 + 4.3 * (2 * 26) ** 0.5
"""A chi-square of 26 degrees of freedom is above once in some twenty thousand; all cells and seeds are fixed."""


@pytest.mark.parametrize("verify", [by_token, by_block])
@pytest.mark.parametrize(("num_drafts", "seed"), [(1, 1), (2, 2)])
def test_the_distribution_is_the_verifiers(verify: Verify, num_drafts: int, seed: int) -> None:
    statistic, freedom, accepted = chi_square(verify, num_drafts, seed)
    assert freedom == 26
    assert statistic < BOUND
    assert accepted > 0.3


def test_a_biased_verifier_is_found_out() -> None:
    """One that accepts drafts a little too readily."""

    def biased(drafts: Sequence[int], q_KV: torch.Tensor, p_KV: torch.Tensor, uniforms: Sequence[float]) -> Verdict:
        return by_token(drafts, q_KV, p_KV, [0.7 * uniform for uniform in uniforms[:-1]] + [uniforms[-1]])

    assert chi_square(biased, 2, 2)[0] > BOUND


def test_blocks_accept_at_least_as_many() -> None:
    p, q = table(3), table(103)
    accepted = {}
    for verify in (by_token, by_block):
        rng = random.Random(3)
        accepted[verify] = sum(sample(verify, p, q, 2, rng)[1] for _ in range(1500))
    assert accepted[by_block] >= 0.98 * accepted[by_token]


def test_the_proposers_own_distribution_is_always_accepted() -> None:
    rows = torch.tensor([[0.2, 0.3, 0.5]] * 3, dtype=torch.float64)
    for verify in (by_token, by_block):
        assert verify([2, 0], rows[:2], rows, [0.999, 0.999, 0.1]) == Verdict(2, 0)
