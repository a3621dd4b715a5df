"""Rejection sampling gives the verifier's distribution, by token and by block; a biased verifier is found out: as
functions of probabilities, and in an engine whose draft model draws."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from support.programs import start
from support.programs import text as literal
from support.scripted import Rig, ScriptedRunner, scripted_logits

from sgl.lang.graph import Gen, Sampling, ValueEvent
from sgl.runtime.plan import StepPlan
from sgl.runtime.sampler import Sampler
from sgl.runtime.speculation import rejection
from sgl.runtime.speculation.draft_model import DraftModel
from sgl.runtime.speculation.drafter import Drafter
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


class Noisy(ScriptedRunner):
    """A draft model that is wrong in its own way."""

    def forward(self, plan: StepPlan, drawn: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().forward(plan, drawn)
        return logits + 0.7 * torch.cos(torch.arange(logits.shape[1]) * 1.7)


SAMPLING = Sampling(max_new_tokens=3, temperature=1.0, top_k=2, ignore_eos=True, return_logprob=True)
PROGRAMS = 800


def drawn_texts(sampling: Sampling = SAMPLING, *, by_block: bool = False) -> tuple[list[tuple[int, ...]], Rig]:
    """What so many programs draw after the same prompt, on an engine with a draft model that draws, too."""
    draft = DraftModel(
        Noisy(900, 1), Sampler(Rig.tokenizer.vocab_size), num_slots=900, context_len=200, chunk=64, by_distribution=True
    )
    rig = Rig(drafter=Drafter([draft], most=2, most_of_step=64, by_block=by_block), num_pages=900)
    for program in range(PROGRAMS):
        start(rig, program, literal(0, "row "), Gen(id=1, name="x", sampling=sampling))
        if program % 100 == 99:
            rig.run()
    rig.run()
    return [rig.of(program, ValueEvent)[0].token_ids for program in range(PROGRAMS)], rig


def statistic_of(texts: Sequence[tuple[int, ...]]) -> float:
    """Chi-square of texts of three tokens, each one of the two most probable."""
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for known, chance in expected.items():
            logits = torch.from_numpy(scripted_logits([*b"row ", *known])).double()
            values, ids = logits.topk(2)
            for token_id, share in zip(ids.tolist(), torch.softmax(values, dim=0).tolist(), strict=True):
                longer[(*known, token_id)] = chance * share
        expected = longer
    counts = Counter(texts)
    assert set(counts) <= set(expected)
    return sum((counts[t] - PROGRAMS * e) ** 2 / (PROGRAMS * e) for t, e in expected.items())


ENGINE_BOUND = 7 + 4.3 * 14**0.5


@pytest.mark.parametrize("by_block", [False, True])
def test_an_engine_draws_from_the_models_distribution(by_block: bool) -> None:
    texts, rig = drawn_texts(by_block=by_block)
    assert statistic_of(texts) < ENGINE_BOUND
    stats = rig.core.stats
    assert 0.2 < stats.accepted_tokens / stats.drafted_tokens < 0.95
    value = rig.of(5, ValueEvent)[0]
    for place, entry in enumerate(value.logprobs):
        logits = torch.from_numpy(scripted_logits([*b"row ", *value.token_ids[:place]]))[: Rig.tokenizer.vocab_size]
        assert entry.logprob == pytest.approx(float(logits.log_softmax(dim=0)[value.token_ids[place]]), abs=1e-4)


def test_an_engine_with_a_biased_verifier_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that accepts drafts a little too readily, in the engine's place of the right one."""
    right = rejection.by_token
    monkeypatch.setattr(rejection, "by_token", lambda d, q, p, u: right(d, q, p, [*(0.5 * x for x in u[:-1]), u[-1]]))
    texts, _ = drawn_texts()
    assert statistic_of(texts) > ENGINE_BOUND


def test_a_request_with_a_seed_of_its_own_draws_the_same_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PROGRAMS", 20)
    sampling = Sampling(max_new_tokens=9, temperature=1.0, seed=7, ignore_eos=True)
    texts, rig = drawn_texts(sampling)
    plain = Rig()
    start(plain, 0, literal(0, "row "), Gen(id=1, name="x", sampling=sampling))
    plain.run()
    assert set(texts) == {plain.of(0, ValueEvent)[0].token_ids}
    assert rig.core.stats.drafted_tokens
