"""Verification of drafts that were drawn from a distribution: rejection sampling, by token and by block.

Owns two pure functions over probabilities, called by `accept.py`. A proposer of point guesses needs neither: there the
verifier draws as ever, from its own (seed, position), and a guess counts if it is what was drawn. A draft model that
draws is better served by them: a draft is accepted with the chance min(1, p / q), which no rule that keeps the
verifier's distribution surpasses for a single draft.

* By token (Leviathan et al. 2023, Chen et al. 2023): drafts are accepted one by one until the first that is not; in
  its place a token is drawn from what `p` has more than `q`.
* By block (Sun et al. 2024): how many of the drafts count is decided by their joint chances, which accepts as many on
  average as by token at least, and often more.

Both give exactly the verifier's distribution, whatever `q` is: a test holds them to it, and finds a biased one.

Shapes: K drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Verdict(NamedTuple):
    """`num_accepted` drafts count, and `token_id` comes behind them."""

    num_accepted: int
    token_id: int


def by_token(drafts: Sequence[int], q_KV: torch.Tensor, p_KV: torch.Tensor, uniforms: Sequence[float]) -> Verdict:
    """Accept drafts one by one.

    Args:
        drafts: each drawn from its row of `q_KV`, given those before it.
        q_KV: float64 `[K, V]`, the proposer's distributions.
        p_KV: float64 `[K + 1, V]`, the verifier's, after each number of drafts.
        uniforms: K + 1 numbers in [0, 1), independent of the drafts.

    Example:
        >>> q, p = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.2, 0.8], [1.0, 0.0]])
        >>> by_token([1], q, p, [0.9, 0.5]), by_token([0], q, p, [0.9, 0.5])
        (Verdict(num_accepted=1, token_id=0), Verdict(num_accepted=0, token_id=1))
    """
    for place, draft in enumerate(drafts):
        if uniforms[place] * float(q_KV[place, draft]) >= float(p_KV[place, draft]):
            left = (p_KV[place] - q_KV[place]).clamp(min=0)
            # One number decides and draws: given the refusal, what is left of it is uniform again.
            ratio = float(p_KV[place, draft]) / float(q_KV[place, draft])
            return Verdict(place, pick(left, (uniforms[place] - ratio) / (1 - ratio)))
    return Verdict(len(drafts), pick(p_KV[len(drafts)], uniforms[len(drafts)]))


def by_block(drafts: Sequence[int], q_KV: torch.Tensor, p_KV: torch.Tensor, uniforms: Sequence[float]) -> Verdict:
    """Accept the longest beginning of the drafts whose joint chance allows it. Arguments as `by_token`; `uniforms` has
    K + 1 numbers, the last of which draws the token behind."""
    weight = 1.0  # how much of the verifier's mass on the drafts so far the proposer covers
    num_accepted, left_over = 0, p_KV[0] - q_KV[0] if len(drafts) else p_KV[0]
    for place, draft in enumerate(drafts):
        weight = min(1.0, weight * float(p_KV[place, draft]) / float(q_KV[place, draft]))
        if place + 1 == len(drafts):
            chance, missing = weight, p_KV[place + 1]
        else:
            missing = (weight * p_KV[place + 1] - q_KV[place + 1]).clamp(min=0)
            more = float(missing.sum())
            chance = more / (more + 1.0 - weight) if more + 1.0 - weight > 0 else 1.0
        if uniforms[place] < chance:
            num_accepted, left_over = place + 1, missing
    if num_accepted == 0 and len(drafts):
        left_over = left_over.clamp(min=0)
    return Verdict(num_accepted, pick(left_over, uniforms[len(drafts)]))


def pick(mass_V: torch.Tensor, uniform: float) -> int:
    """The token where the running sum of `mass_V`, which need not sum to 1, passes the share `uniform`."""
    sums = mass_V.double().cumsum(dim=-1)
    place = int(torch.searchsorted(sums, uniform * float(sums[-1]), right=True))
    return min(place, int((sums < sums[-1]).sum()))
