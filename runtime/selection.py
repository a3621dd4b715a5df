"""Scoring the options of a select: which tokens to compute, and which option wins.

Owns the token trie of one select and the three choices methods. Pure: no pages, no model. A program run turns the
`scores` of `Selection` into requests and hands the log-probabilities back.

An option's score is the log-probability of its tokens after the last stable one: the tokens of `encode(unit + option)`
behind the longest beginning that all of them share with `encode(unit)`. Each inner node of the trie is computed once,
however many options go through it; an option's last token needs no computing at all.

When only the best option is wanted, options are computed in waves, most promising first, until no other can win: no
token has a log-probability above 0, so an option's mean is at most what its known tokens leave it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

import msgspec

from sgl.lang.graph import ChoiceScore, ChoicesMethod, method_scores

Path = tuple[int, ...]


_WAVE = 8
"""Options computed together before looking whether the best one is known."""


class ScorePath(msgspec.Struct, frozen=True):
    """A chain of option tokens to compute after the base: `wanted[k]` are the ids scored after its first k tokens."""

    tokens: Path
    wanted: dict[int, Path]

    def behind(self, num_cached: int) -> list[ScorePath]:
        """The same work where the first `num_cached` tokens are cached already.

        These are computed all the same, for their scores, but nobody else needs what that writes: a chain of their own.
        What hangs below them is computed behind the cached ones, where other options find it in turn.

        Example:
            >>> [part.tokens for part in ScorePath((1, 2, 3), {1: (2,), 2: (3, 4), 3: (5,)}).behind(2)]
            [(1, 2), (1, 2, 3)]
        """
        again = {k: ids for k, ids in self.wanted.items() if k <= num_cached}
        below = {k: ids for k, ids in self.wanted.items() if k > num_cached}
        if not again or not below:
            return [self]
        return [ScorePath(self.tokens[:num_cached], again), ScorePath(self.tokens, below)]


class Selection:
    """One select over encoded options.

    Args:
        unit: ids of the pending unit alone; `encoded`: of the unit followed by each option.

    Attributes:
        num_stable: leading tokens that do not depend on the option.
        paths: each option's tokens after these.
        first_ids: ids to score after the stable tokens.
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
        self._asked: set[Path] = {()}
        self._logprobs: dict[tuple[Path, int], float] = {}

    def chains(self, options: Iterable[int] | None = None) -> list[ScorePath]:
        """What is still to be computed for `options` (all by default), each trie node in one chain only."""
        chains = []
        for option in range(len(self.paths)) if options is None else options:
            path = self.paths[option]
            own = [k for k in range(1, len(path)) if path[:k] not in self._asked]
            if own:
                self._asked.update(path[:k] for k in own)
                chains.append(ScorePath(path[: own[-1]], {k: self._following[path[:k]] for k in own}))
        return chains

    def next_wave(self, method: ChoicesMethod) -> list[ScorePath]:
        """What to compute next to find the best option alone; nothing when it is known.

        The first tokens of all options, and everything asked for before, have been put.
        """
        known = [self.logprobs(option) for option in range(len(self.paths))]
        open_options = [i for i, path in enumerate(self.paths) if len(known[i]) < len(path)]
        if method == "greedy_token_selection":
            # The method looks at first tokens first: whoever has not the best one is out.
            top = max(values[0] for values in known)
            alive = [i for i, values in enumerate(known) if values[0] == top]
            return self.chains(alive)
        bounds = [sum(values) / len(path) for values, path in zip(known, self.paths, strict=True)]
        best = max(((bounds[i], -i) for i in range(len(bounds)) if i not in open_options), default=(-math.inf, 0))
        able = sorted((i for i in open_options if (bounds[i], -i) > best), key=lambda i: -bounds[i])
        return self.chains(able[:_WAVE])

    def put(self, prefix: Path, values: Sequence[float]) -> None:
        """The log-probabilities of the ids that may follow `prefix`."""
        for token_id, value in zip(self._following[prefix], values, strict=True):
            self._logprobs[(prefix, token_id)] = value

    def logprobs(self, option: int) -> tuple[float, ...]:
        """Log-probabilities of the leading tokens of an option whose trie nodes are put."""
        path = self.paths[option]
        found = []
        for k in range(len(path)):
            value = self._logprobs.get((path[:k], path[k]))
            if value is None:
                break
            found.append(value)
        return tuple(found)


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

    Options with fewer `logprobs` than tokens are out of the race (`Selection.next_wave`): they get the bound of their
    score. Probabilities are the softmax of the method's scores (of the scores over `temperature`, when that is
    positive, and the option is then drawn from them). Ties go to the first option.

    Example:
        >>> best, scores = decide(["a", "bc"], [(1,), (2, 3)], [(-1.0,), (-0.5, -0.1)], "token_length_normalized")
        >>> best, [round(s.probability, 3) for s in scores]
        (1, [0.332, 0.668])
    """
    complete = [len(values) == len(path) for values, path in zip(logprobs, paths, strict=True)]
    if not all(complete):
        return _decide_among(choices, paths, logprobs, method, complete)
    scores = method_scores(method, logprobs, unconditional)
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


def _decide_among(
    choices: Sequence[str],
    paths: Sequence[Path],
    logprobs: Sequence[Sequence[float]],
    method: ChoicesMethod,
    complete: Sequence[bool],
) -> tuple[int, tuple[ChoiceScore, ...]]:
    """The winner of the complete options, and a bound for each of the others."""
    racing = [i for i, done in enumerate(complete) if done]
    best, scored = decide(
        [choices[i] for i in racing], [paths[i] for i in racing], [logprobs[i] for i in racing], method
    )
    scores = [
        ChoiceScore(choice, path, tuple(values), sum(values) / len(path), 0.0, complete=False)
        for choice, path, values in zip(choices, paths, logprobs, strict=True)
    ]
    for i, score in zip(racing, scored, strict=True):
        scores[i] = score
    return racing[best], tuple(scores)


def common_length(rows: Sequence[Sequence[int]]) -> int:
    """Length of the beginning that all rows share."""
    shortest = min(len(row) for row in rows)
    first = rows[0]
    for i in range(shortest):
        if any(row[i] != first[i] for row in rows):
            return i
    return shortest
