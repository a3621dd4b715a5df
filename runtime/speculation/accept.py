"""Rejection sampling in the engine's steps: drafts that were drawn from a distribution, and what they are judged by.

Owns the random numbers of drafts and of verdicts, and `Judgement`, the verdict on one chunk. The draft model draws with
`draw`, and sends its distributions along (`Chunk.proposed`); the sampler, on the CPU or a GPU, judges them. A verdict
comes back as the results that draws would have given, so whoever takes them need not know.

Numbers of a round (the drafts of a step, and the verdict on them) are functions of the request's seed, the round's
first position and the place, and no two rounds share one: a verdict by block looks at later drafts than those it
accepts, whose numbers must not come back. Requests with a seed of their own, greedy ones, and those under a constraint
or a processor are not judged so: a draft counts if it is what is drawn (`is_judged`).

Shapes: D draws of a chunk, K drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from sgl.runtime.plan import Chunk, RowResult, SampleSpec
from sgl.runtime.sampler import GREEDY, distributions, top_of, uniform_of
from sgl.runtime.sequence import Sampled
from sgl.runtime.speculation import rejection

_DRAFT, _VERDICT = 2 << 62, 3 << 62
_START_BITS = 31


def is_judged(generation: Sampled) -> bool:
    """Whether drafts of a generation are accepted by rejection sampling, where the engine does that at all."""
    sampling = generation.sampling
    return (
        sampling.temperature >= GREEDY
        and sampling.seed is None
        and sampling.custom_logit_processor is None
        and generation.matcher is None
    )


def draw(q_RV: torch.Tensor, specs: Sequence[SampleSpec], places: Sequence[int]) -> list[int]:
    """A draft of each row of float64 `q_RV`.

    Args:
        specs: of the rows; `places`: how many drafts of the round come before each.
    """
    return [
        rejection.pick(q_V, uniform_of(spec.seed, _number(_DRAFT, spec.position - place, spec.position)))
        for q_V, spec, place in zip(q_RV, specs, places, strict=True)
    ]


class Judgement:
    """The verdict on the drafts of a chunk with `proposed`. What it needs of logits is computed when it is made.

    Args:
        logits_DV: float32, those of the chunk's draws, of ids that the tokenizer knows.
    """

    def __init__(self, chunk: Chunk, logits_DV: torch.Tensor) -> None:
        self._chunk = chunk
        self._specs = [spec for _, spec in chunk.draws]
        self._p_DV = distributions(logits_DV, self._specs)
        wants_logprobs = self._specs[0].sampling.return_logprob
        self._logprobs_DV = torch.log_softmax(logits_DV, dim=-1) if wants_logprobs else None

    def results(self, drawn: Sequence[RowResult]) -> list[RowResult]:
        """What the draws gave by this verdict: the drafts that are accepted, the token that comes behind them, and
        nothing for those after it. `drawn` are the results otherwise: a row that failed stays so."""
        proposed = self._chunk.proposed
        if proposed is None:
            return list(drawn)
        failed = next((i for i, row in enumerate(drawn) if row.failed is not None), len(drawn))
        drafts = self._chunk.drafts[: min(len(proposed.rows), failed)]
        if failed == 0 or not drafts:
            return list(drawn)
        # The last draft may end the generation: then nothing is drawn behind it.
        p_KV = torch.cat([self._p_DV, self._p_DV[-1:]])[: len(drafts) + 1]
        start, seed = self._specs[0].position, self._specs[0].seed
        uniforms = [uniform_of(seed, _number(_VERDICT, start, start + place)) for place in range(len(drafts) + 1)]
        judge = rejection.by_block if proposed.by_block else rejection.by_token
        verdict = judge(drafts, torch.stack(proposed.rows[: len(drafts)]).to(p_KV.device), p_KV, uniforms)
        tokens = [*drafts[: verdict.num_accepted], verdict.token_id]
        results = list(drawn)
        for place in range(len(drawn)):
            if place < len(tokens) and place < failed:
                results[place] = self._described(place, tokens[place], drawn[place])
            elif place != failed or place > verdict.num_accepted:
                results[place] = RowResult(sequence=drawn[place].sequence)
        return results

    def _described(self, place: int, token_id: int, row: RowResult) -> RowResult:
        if self._logprobs_DV is None:
            return msgspec.structs.replace(row, token_id=token_id)
        sampling, logprobs_V = self._specs[place].sampling, self._logprobs_DV[place]
        ids = sampling.token_ids_logprob
        return msgspec.structs.replace(
            row,
            token_id=token_id,
            logprob=float(logprobs_V[token_id]),
            top=top_of(logprobs_V, sampling.top_logprobs_num),
            given=tuple(zip(ids, logprobs_V[list(ids)].tolist(), strict=True)) if ids else (),
        )


def _number(kind: int, start: int, position: int) -> int:
    """In place of a position: a number that no draw and no other round has."""
    return kind | start << _START_BITS | position
