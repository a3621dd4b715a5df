"""Scoring the options of a select: which tokens to compute, and which option wins.

Owns the token trie of one select and the three choices methods. Pure: no pages, no model. A program run turns the
`scores` of `Selection` into requests and hands the log-probabilities back.

An option's score is the log-probability of its tokens after the last stable one: the tokens of `encode(unit + option)`
behind the longest beginning that all of them share with `encode(unit)`. Each inner node of the trie is computed once,
however many options go through it; an option's last token needs no computing at all.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec

from sgl.lang.graph import ChoiceScore, ChoicesMethod

Path = tuple[int, ...]


class ScorePath(msgspec.Struct, frozen=True):
    """A chain of option tokens to compute after the base: `wanted[k]` are the ids scored after its first k tokens."""

    tokens: Path
    wanted: dict[int, Path]


class Selection:
    """One select over encoded options.

    Args:
        unit: ids of the pending unit alone; `encoded`: of the unit followed by each option.

    Attributes:
        num_stable: leading tokens that do not depend on the option.
        paths: each option's tokens after these.
        first_ids: ids to score after the stable tokens; `chains`: what else to compute.
    """

    def __init__(self, unit: Sequence[int], encoded: Sequence[Sequence[int]]) -> None:
        self.num_stable = common_length([unit, *encoded])
        self.paths: list[Path] = [tuple(ids[self.num_stable :]) for ids in encoded]
        following: dict[Path, list[int]] = {}
        for path in self.paths:
            for k in range(len(path)):
                ids = following.setdefault(path[:k], [])
                if path[k] not in ids:
                    ids.append(path[k])
        self._following = {prefix: tuple(ids) for prefix, ids in following.items()}
        self.first_ids = self._following[()]
        self.chains: list[ScorePath] = []
        seen: set[Path] = {()}
        for path in self.paths:
            own = [k for k in range(1, len(path)) if path[:k] not in seen]
            if own:
                seen.update(path[:k] for k in own)
                self.chains.append(ScorePath(path[: own[-1]], {k: self._following[path[:k]] for k in own}))
        self._logprobs: dict[tuple[Path, int], float] = {}

    def put(self, prefix: Path, values: Sequence[float]) -> None:
        """The log-probabilities of the ids that may follow `prefix`."""
        for token_id, value in zip(self._following[prefix], values, strict=True):
            self._logprobs[(prefix, token_id)] = value

    def logprobs(self, option: int) -> tuple[float, ...]:
        """Log-probability of each token of an option, once all of its trie nodes are put."""
        path = self.paths[option]
        return tuple(self._logprobs[(path[:k], path[k])] for k in range(len(path)))


def decide(
    choices: Sequence[str],
    paths: Sequence[Path],
    logprobs: Sequence[Sequence[float]],
    method: ChoicesMethod,
    *,
    unconditional: Sequence[Sequence[float]] = (),
    temperature: float = 0.0,
    seed: int = 0,
) -> tuple[int, tuple[ChoiceScore, ...]]:
    """The winning option, and every option's score and probability.

    Probabilities are the softmax of the method's scores (of the scores over `temperature`, when that is positive, and
    the option is then drawn from them). Ties go to the first option.

    Example:
        >>> best, scores = decide(["a", "bc"], [(1,), (2, 3)], [(-1.0,), (-0.5, -0.1)], "token_length_normalized")
        >>> best, [round(s.probability, 3) for s in scores]
        (1, [0.332, 0.668])
    """
    match method:
        case "token_length_normalized":
            scores = [sum(values) / len(values) for values in logprobs]
        case "unconditional_likelihood_normalized":
            scores = [
                sum(a - b for a, b in zip(values, base, strict=True)) / len(values)
                for values, base in zip(logprobs, unconditional, strict=True)
            ]
        case "greedy_token_selection":
            scores = _greedy_scores(logprobs)
    scale = temperature if temperature > 0 else 1.0
    top = max(scores)
    weights = [math.exp((score - top) / scale) for score in scores]
    total = sum(weights)
    best = scores.index(top)
    if temperature > 0:
        best = random.Random(seed).choices(range(len(scores)), weights)[0]
    return best, tuple(
        ChoiceScore(
            choice=choice,
            token_ids=path,
            logprobs=tuple(values),
            score=score,
            probability=weight / total,
            unconditional=tuple(unconditional[i]) if unconditional else (),
        )
        for i, (choice, path, values, score, weight) in enumerate(
            zip(choices, paths, logprobs, scores, weights, strict=True)
        )
    )


def _greedy_scores(logprobs: Sequence[Sequence[float]]) -> list[float]:
    """Token by token: the options with the best token at each position stay; the others are out from there on.

    A shorter option is filled up with its mean. The score counts the positions survived first, so that an option that
    is ruled out later ranks above one ruled out earlier; within these, the mean log-probability ranks.
    """
    longest = max(len(values) for values in logprobs)
    means = [sum(values) / len(values) for values in logprobs]
    rows = [[*values, *[mean] * (longest - len(values))] for values, mean in zip(logprobs, means, strict=True)]
    alive = list(range(len(rows)))
    survived = [0] * len(rows)
    for position in range(longest):
        best = max(rows[i][position] for i in alive)
        alive = [i for i in alive if rows[i][position] == best]
        for i in alive:
            survived[i] = position + 1
    floor = min(means) - 1.0
    return [mean if i in alive else mean + (survived[i] - longest) * -floor for i, mean in enumerate(means)]


def common_length(rows: Sequence[Sequence[int]]) -> int:
    """Length of the beginning that all rows share."""
    shortest = min(len(row) for row in rows)
    first = rows[0]
    for i in range(shortest):
        if any(row[i] != first[i] for row in rows):
            return i
    return shortest
