"""Log-probabilities of a prompt, and of forced output: what to score, and the scores as the client reads them.

Pure functions over a request. A token is predicted by the position before it, so the logits of a position that was
found in the cache are missing: a request that wants them reuses the cache up to its first scored position only, and
computes the rest again. The scheduler bounds how many positions are scored in one step.
"""

from __future__ import annotations

from collections.abc import Sequence

from sgl.errors import InvalidParameter
from sgl.lang.graph import Sampling, TokenLogprob
from sgl.runtime.sequence import Request


def prompt_scores(token_ids: Sequence[int], sampling: Sampling) -> dict[int, tuple[int, ...]]:
    """Position -> ids to score after the token there: the next token of the prompt, then the ids that were given.

    Raises:
        InvalidParameter: `logprob_start_len` lies behind the prompt.

    Example:
        >>> prompt_scores([5, 6, 7], Sampling(return_logprob=True, logprob_start_len=0, token_ids_logprob=(9,)))
        {0: (6, 9), 1: (7, 9)}
    """
    start = sampling.logprob_start_len
    if not sampling.return_logprob or start < 0:
        return {}
    if start > len(token_ids):
        raise InvalidParameter(
            f"logprob_start_len is {start}, but the prompt has {len(token_ids)} tokens",
            hint="give a position in the prompt, or -1 for the output only",
            param="logprob_start_len",
        )
    return {p - 1: (token_ids[p], *sampling.token_ids_logprob) for p in range(max(start, 1), len(token_ids))}


def prompt_logprobs(request: Request, sampling: Sampling) -> tuple[TokenLogprob, ...]:
    """One entry per prompt token from `logprob_start_len` on, once `request` has all scores."""
    if not sampling.return_logprob or sampling.logprob_start_len < 0:
        return ()
    ids = request.sequence.token_ids
    entries = [TokenLogprob(ids[0], None)] if sampling.logprob_start_len == 0 else []
    for position in sorted(position for position in request.scores if position < request.prompt_len - 1):
        logprob, *given = request.logprobs[position]
        pairs = tuple(zip(sampling.token_ids_logprob, given, strict=True))
        entries.append(TokenLogprob(ids[position + 1], logprob, request.tops.get(position, ()), pairs))
    return tuple(entries)


def output_logprobs(
    request: Request, drawn: Sequence[TokenLogprob], sampling: Sampling, start: int = 0
) -> tuple[TokenLogprob, ...]:
    """The entries of the output from `start` on, those of forced tokens, which have no log-probability yet, from the
    scores."""
    entries = []
    for index, entry in enumerate(drawn[start:], start):
        position = request.prompt_len + index - 1
        if entry.logprob is None and position in request.logprobs:
            logprob, *given = request.logprobs[position]
            pairs = tuple(zip(sampling.token_ids_logprob, given, strict=True))
            entry = TokenLogprob(entry.token_id, logprob, request.tops.get(position, ()), pairs)
        entries.append(entry)
    return tuple(entries)
