"""The sampler against a numpy reference, row by row; a wrong reference fails the same test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch

from sgl.grammars.matcher import Bitmask
from sgl.lang.graph import Sampling
from sgl.runtime import sampler
from sgl.runtime.plan import Chunk, RowResult, SampleSpec, ScoreSpec, StepPlan
from sgl.runtime.sampler import Sampler

VOCAB = 12
LOGITS = torch.tensor(np.random.default_rng(3).normal(size=VOCAB), dtype=torch.float32)


class Only:
    """A matcher that allows the ids it was given."""

    def __init__(self, *ids: int) -> None:
        self.ids = ids

    def fill(self, bitmask: Bitmask, row: int) -> None:
        bitmask[row] = 0
        for i in self.ids:
            bitmask[row, i // 32] |= np.int32(1 << (i % 32))


def spec(position: int = 0, *, seed: int = 1, output: list[int] | None = None, **fields: object) -> SampleSpec:
    matcher = fields.pop("matcher", None)
    blocked = fields.pop("blocked", ())
    return SampleSpec(
        sampling=Sampling(**fields),
        seed=seed,
        position=position,
        output_ids=output or [],
        blocked_ids=blocked,
        matcher=matcher,
    )


def sample(*rows: tuple[torch.Tensor, SampleSpec], vocab_size: int = VOCAB) -> tuple[RowResult, ...]:
    chunks = tuple(
        Chunk(sequence=i, token_ids=[0], start=0, page_table=np.zeros(1, np.int32), sample=spec)
        for i, (_, spec) in enumerate(rows)
    )
    logits = torch.stack([row for row, _ in rows])
    return Sampler(vocab_size).sample(StepPlan(chunks=chunks), logits).rows


def reference(fields: Mapping[str, Any]) -> np.ndarray:
    """The distribution that a draw should have."""
    logits = LOGITS.double().numpy().copy()
    for token, bias in fields.get("logit_bias", ()):
        logits[token] += bias
    scaled = logits / fields.get("temperature", 1.0)
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    kept, mass = [], 0.0
    for rank, token in enumerate(order):
        if rank >= fields.get("top_k", VOCAB) or mass >= fields.get("top_p", 1.0):
            break
        if probs[token] < fields.get("min_p", 0.0) * probs[order[0]]:
            break
        kept.append(token)
        mass += probs[token]
    out = np.zeros(VOCAB)
    out[kept] = probs[kept] / mass
    return out


BIAS = ((0, 1.5), (3, -100.0), (7, -0.7), (9, 2.25))
CASES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.3, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 2.0, "logit_bias": BIAS},
    {"temperature": 1.5, "top_k": 8, "top_p": 0.6},
    {"temperature": 0.8, "top_p": 0.95, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 7, "min_p": 0.25},
    {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.2, "top_k": 9, "top_p": 0.7, "min_p": 0.05, "logit_bias": BIAS},
]
NUM_DRAWS = 3000
CHANCE = 1e-3
"""That a right sampler fails any of the cases, had the seeds not been fixed."""
SPREADS = NormalDist().inv_cdf(1 - CHANCE / (2 * VOCAB * len(CASES)))
"""Standard deviations that a cell may be off: corrected (Bonferroni) for the number of cells in all cases."""


def deviates(probs: np.ndarray, counts: Counter[int]) -> bool:
    """Whether any cell is further from its expectation than chance explains; one that cannot be drawn, at all."""
    for token in range(VOCAB):
        expected = NUM_DRAWS * probs[token]
        spread = np.sqrt(NUM_DRAWS * probs[token] * (1 - probs[token]))
        if abs(counts[token] - expected) > SPREADS * spread + (0.5 if expected else 0.0):
            return True
    return False


@cache
def draws(case: int) -> Counter[int]:
    counts: Counter[int] = Counter()
    for start in range(0, NUM_DRAWS, 250):
        rows = [(LOGITS, spec(position, **CASES[case])) for position in range(start, start + 250)]
        counts.update(row.token_id for row in sample(*rows))
    return counts


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: str(CASES[case]))
def test_draws_follow_the_distribution(case: int) -> None:
    assert not deviates(reference(CASES[case]), draws(case))


WRONG: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {
    "hotter": lambda fields: {**fields, "temperature": fields["temperature"] * 1.4},
    "no temperature": lambda fields: {**fields, "temperature": 1.0},
    "one more in top-k": lambda fields: {**fields, "top_k": fields.get("top_k", VOCAB) + 1},
    "no top-p": lambda fields: {**fields, "top_p": 1.0},
    "no min-p": lambda fields: {**fields, "min_p": 0.0},
    "no bias": lambda fields: {**fields, "logit_bias": ()},
    "bias after temperature": lambda fields: {
        **fields, "logit_bias": [(i, b * fields["temperature"]) for i, b in fields.get("logit_bias", ())]
    },
    "crossing token left out": lambda fields: {**fields, "top_p": fields.get("top_p", 1.2) - 0.2},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_sampler_fails_the_same_test(name: str) -> None:
    """What the wrong sampler would draw is another distribution, in every case that it changes enough to be told apart:
    at least one, and never a case that it does not change."""
    told_apart = 0
    for case, fields in enumerate(CASES):
        wrong = reference(WRONG[name](fields))
        changed = float(np.abs(wrong - reference(fields)).max())
        if changed == 0.0:
            assert not deviates(wrong, draws(case))
        elif changed > 0.045:
            assert deviates(wrong, draws(case)), fields
            told_apart += 1
    assert told_apart >= 1


def test_greedy_and_tiny_temperature() -> None:
    best = int(LOGITS.argmax())
    assert [row.token_id for row in sample((LOGITS, spec(temperature=0)), (LOGITS, spec(temperature=1e-6)))] == [
        best
    ] * 2


def test_top_p_keeps_the_token_that_crosses() -> None:
    """The smallest set of most probable tokens whose probabilities reach top-p, the token that crosses it included. One
    that is reached exactly is not crossed: the next token is out."""
    logits = torch.full((VOCAB,), -1e9)
    logits[:2] = torch.tensor([0.5, 0.5]).log()
    seen = {sample((logits, spec(position, top_p=0.5)))[0].token_id for position in range(40)}
    assert seen == {0}, "half of the mass is reached by the first of two equals"
    seen = {sample((logits, spec(position, top_p=0.51)))[0].token_id for position in range(40)}
    assert seen == {0, 1}


def test_a_draw_depends_on_seed_and_position_only() -> None:
    alone = sample((LOGITS, spec(5, seed=9)))[0].token_id
    crowd = sample((LOGITS + 1, spec(0)), (LOGITS, spec(5, seed=9)), (LOGITS, spec(6, seed=9)))
    assert crowd[1].token_id == alone
    assert len({sample((LOGITS, spec(5, seed=seed)))[0].token_id for seed in range(40)}) > 3


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        ({"frequency_penalty": 1.5}, lambda value, count: value - 1.5 * count),
        ({"presence_penalty": 0.7}, lambda value, count: value - 0.7),
        ({"repetition_penalty": 1.3}, lambda value, count: value / 1.3 if value > 0 else value * 1.3),
    ],
)
def test_penalties(fields: dict[str, float], change: Callable[[float, int], float]) -> None:
    output = [2, 2, 7]
    want = LOGITS.clone()
    for token in (2, 7):
        want[token] = change(float(LOGITS[token]), output.count(token))
    for position in range(30):
        got = sample((LOGITS, spec(position, output=output, **fields)))[0].token_id
        assert got == sample((want, spec(position)))[0].token_id


def test_mask_and_blocked_ids() -> None:
    worst = int(LOGITS.argmin())
    assert sample((LOGITS, spec(temperature=0, matcher=Only(worst))))[0].token_id == worst
    best = int(LOGITS.argmax())
    assert sample((LOGITS, spec(temperature=0, blocked=(best,))))[0].token_id == int(LOGITS.topk(2).indices[1])


def test_padding_is_never_drawn() -> None:
    logits = LOGITS.clone()
    logits[VOCAB - 2 :] = 99.0
    assert sample((logits, spec(temperature=0)), vocab_size=VOCAB - 2)[0].token_id == int(LOGITS[: VOCAB - 2].argmax())


def test_bad_rows_fail_alone() -> None:
    nan = LOGITS.clone()
    nan[3] = float("nan")
    rows = sample((LOGITS, spec(temperature=0)), (nan, spec(temperature=0)), (LOGITS, spec(matcher=Only())))
    assert rows[0].token_id == int(LOGITS.argmax())
    assert rows[1].failed is not None
    assert rows[1].failed[0] == "invalid_logits"
    assert rows[2].failed is not None
    assert rows[2].failed[0] == "constraint_dead_end"


def test_scores_are_log_probabilities_of_the_model() -> None:
    chunk = Chunk(
        sequence=4,
        token_ids=[1, 2, 3],
        start=0,
        page_table=np.arange(3, dtype=np.int32),
        scores=(ScoreSpec(offset=0, token_ids=(5,)), ScoreSpec(offset=2, token_ids=(1, 0))),
    )
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    (row,) = Sampler(VOCAB).sample(StepPlan(chunks=(chunk,)), logits).rows
    want = torch.log_softmax(logits.double(), dim=-1)
    assert row.scores[0] == pytest.approx([float(want[0, 5])], abs=1e-5)
    assert row.scores[1] == pytest.approx([float(want[1, 1]), float(want[1, 0])], abs=1e-5)


def test_logprobs_ignore_temperature_and_penalties() -> None:
    (row,) = sample(
        (LOGITS, spec(temperature=0.5, output=[1], presence_penalty=1.0, return_logprob=True, top_logprobs_num=2))
    )
    want = torch.log_softmax(LOGITS.double(), dim=-1)
    assert row.logprob == pytest.approx(float(want[row.token_id]), abs=1e-5)
    assert [token for token, _ in row.top] == LOGITS.topk(2).indices.tolist()


def test_looking_at_few_tokens_first_draws_what_looking_at_all_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat and steep rows, ties at the edge of what is looked at, and limits on both sides of it; alone as together."""
    random = np.random.default_rng(0)
    rows = []
    for i in range(120):
        logits = np.round(random.normal(size=300) * random.choice([0.2, 1.0, 3.0, 6.0]), random.integers(0, 3))
        fields = {"top_p": random.choice([1.0, 0.5, 0.95]), "min_p": random.choice([0.0, 0.02, 0.3])}
        top_k = int(random.choice([-1, 3, 19, 20, 21, 60]))
        rows.append((torch.tensor(logits, dtype=torch.float32), spec(i, top_k=top_k, **fields)))

    def tokens(candidates: int) -> list[int | None]:
        monkeypatch.setattr(sampler, "_CANDIDATES", candidates)
        return [row.token_id for row in sample(*rows, vocab_size=300)]

    few = tokens(20)
    assert few == tokens(300)
    assert few == [sample(row, vocab_size=300)[0].token_id for row in rows]
