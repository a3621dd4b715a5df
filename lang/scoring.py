"""From log-probabilities to the scores of a select's options: the three methods.

Owns the arithmetic, for every backend. Part of the graph's contract: other rooms import it from `sgl.lang.graph`.
"""

from __future__ import annotations

from collections.abc import Sequence


def method_scores(
    method: str, logprobs: Sequence[Sequence[float]], unconditional: Sequence[Sequence[float]] = ()
) -> list[float]:
    """The score of each option; the largest wins.

    Args:
        method: a `ChoicesMethod`.
        logprobs: of each option's tokens, at least one.
        unconditional: of the same tokens without the prompt, for the method that wants them.

    Example:
        >>> method_scores("token_length_normalized", [(-1.0,), (-0.5, -0.1)])
        [-1.0, -0.3]
    """
    if method == "unconditional_likelihood_normalized":
        return [
            sum(a - b for a, b in zip(values, base, strict=True)) / len(values)
            for values, base in zip(logprobs, unconditional, strict=True)
        ]
    if method == "greedy_token_selection":
        return _greedy_scores(logprobs)
    return [sum(values) / len(values) for values in logprobs]


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
