"""What is told about a value, in the shape that SGLang's `meta_info` has.

Owns the translation of a `ValueEvent` into a plain mapping; programs (`get_meta_info`) and `Engine.generate` give the
same. Part of the graph's contract: other rooms import it from `sgl.lang.graph`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl.lang.graph import ChoiceScore, TokenLogprob, ValueEvent


def meta_info(event: ValueEvent) -> dict[str, Any]:
    """How a value came about: why it ended (and where in its JSON), its tokens, log-probabilities and scores.

    Log-probabilities are triples (logprob, token id, None): `output_token_logprobs` and `input_token_logprobs` (from
    `logprob_start_len` on), with `..._top_logprobs` and `..._token_ids_logprobs` beside them where they were asked for.
    """
    finish: dict[str, Any] = {"type": event.finish}
    if event.finish == "length":
        finish["length"] = len(event.token_ids)
        if event.truncated_at is not None:
            finish["truncated_at"] = event.truncated_at
    elif event.matched is not None:
        finish["matched"] = event.matched
    info: dict[str, Any] = {
        "finish_reason": finish,
        "prompt_tokens": event.usage.prompt_tokens,
        "completion_tokens": event.usage.completion_tokens,
        "reasoning_tokens": event.usage.reasoning_tokens,
        "cached_tokens": event.usage.cached_tokens,
        "e2e_latency": event.latency_s,
        "output_ids": list(event.token_ids),
    }
    info.update(_logprobs("output", event.logprobs))
    info.update(_logprobs("input", event.prompt_logprobs))
    if event.choices:
        info.update(_scores(event.choices))
    return info


def _logprobs(side: str, entries: tuple[TokenLogprob, ...]) -> dict[str, Any]:
    """The three lists of one side, as far as they were asked for."""
    lists: dict[str, Any] = {}
    if entries:
        lists[f"{side}_token_logprobs"] = [(entry.logprob, entry.token_id, None) for entry in entries]
    if any(entry.top for entry in entries):
        lists[f"{side}_top_logprobs"] = [_triples(entry.top) for entry in entries]
    if any(entry.given for entry in entries):
        lists[f"{side}_token_ids_logprobs"] = [_triples(entry.given) for entry in entries]
    return lists


def _triples(pairs: tuple[tuple[int, float], ...]) -> list[tuple[float, int, None]]:
    return [(logprob, token_id, None) for token_id, logprob in pairs]


def _scores(scores: tuple[ChoiceScore, ...]) -> dict[str, Any]:
    """Of a select."""
    info: dict[str, Any] = {
        "probabilities": {score.choice: score.probability for score in scores},
        "scores": {score.choice: score.score for score in scores},
    }
    if not all(score.complete for score in scores):
        info["bounds"] = [score.choice for score in scores if not score.complete]
    info["normalized_prompt_logprobs"] = [
        sum(score.logprobs) / len(score.logprobs) if score.logprobs else 0.0 for score in scores
    ]
    info["input_token_logprobs"] = [
        [(logprob, token_id, None) for logprob, token_id in zip(score.logprobs, score.token_ids, strict=False)]
        for score in scores
    ]
    info["output_token_logprobs"] = [[] for _ in scores]
    longest = max(len(score.logprobs) for score in scores)
    info["greedy_logprob_matrix"] = [
        [*score.logprobs, *[mean] * (longest - len(score.logprobs))]  # as the greedy method compares them
        for score, mean in zip(scores, info["normalized_prompt_logprobs"], strict=True)
    ]
    if any(score.unconditional for score in scores):
        info["unconditional_token_logprobs"] = [list(score.unconditional) for score in scores]
        info["normalized_unconditional_prompt_logprobs"] = [
            sum(score.unconditional) / len(score.unconditional) if score.unconditional else 0.0 for score in scores
        ]
    return info
