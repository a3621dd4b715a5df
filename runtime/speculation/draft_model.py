"""Guesses from a second, smaller model (`STANDALONE`): it decodes ahead, the engine's model checks.

Owns the draft model's keys and values and which tokens they belong to, per sequence; nobody shares them. Its rows draw
with the generation's own (seed, position): the same uniform number picks from both models' distributions, so that a
sampled draft is what the engine's model would draw as often as their distributions let it (inverse-CDF coupling), and
the exact verification of `verify.py` holds. With `by_distribution`, drafts of rows that allow it are drawn by numbers
of their own, and go with their distributions (`accept.py`). Rows are computed together, one forward per draft.

When its slots run short, sequences that were not asked for longest lose theirs, and are computed again when needed.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from sgl.errors import ConfigError
from sgl.runtime.plan import Chunk, StepPlan, StepResult
from sgl.runtime.sampler import distributions
from sgl.runtime.sequence import Request, Sampled
from sgl.runtime.speculation.accept import draw, is_judged
from sgl.runtime.speculation.ngram import common_length
from sgl.runtime.speculation.proposer import NOTHING, Proposal

if TYPE_CHECKING:
    import torch

    from sgl.runtime.device_clock import DeviceClock
    from sgl.runtime.text.tokenizer import Tokenizer

_NEW = 0.2


class _Runner(Protocol):
    def forward(self, plan: StepPlan, drawn: Any = None) -> Any: ...


class _Sampler(Protocol):
    vocab_size: int

    def sample(self, plan: StepPlan, logits: Any) -> StepResult: ...


class _Row:
    """What the draft model has computed of a sequence."""

    __slots__ = ("slots", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.slots: list[int] = []


class DraftModel:
    """Proposes what a draft model draws.

    Attributes:
        seconds: that one forward takes, lately.

    Args:
        runner, sampler: the draft model, with a pool of `num_slots` pages of one token.
        context_len: of the draft model; longer sequences get no drafts.
        chunk: tokens of a forward at most.
        by_distribution: whether drafts are to be accepted by rejection sampling.
        clock: seconds.
        device_clock: times the forwards on a GPU; nobody else reads it.
    """

    def __init__(
        self,
        runner: _Runner,
        sampler: _Sampler,
        *,
        num_slots: int,
        context_len: int,
        chunk: int,
        by_distribution: bool = False,
        clock: Callable[[], float] = time.monotonic,
        device_clock: DeviceClock | None = None,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._free = list(range(num_slots))
        self._context_len = context_len
        self._chunk = chunk
        self._by_distribution = by_distribution
        self._clock = clock
        self._device_clock = device_clock
        self._rows: OrderedDict[int, _Row] = OrderedDict()  # by sequence; the one asked for last at the end
        self._drafts: dict[int, list[int]] = {}
        self._drawn_from: dict[int, list[torch.Tensor]] = {}
        self.seconds = 0.0

    def prepare(self, rows: Sequence[tuple[Request, Sampled]], num_drafts: int) -> None:
        """Compute up to `num_drafts` drafts for each of `rows`, all together."""
        self._drafts.clear()
        self._drawn_from.clear()
        chosen: list[tuple[Request, Sampled, _Row]] = []
        for request, generation in rows:
            length = len(request.sequence) + num_drafts
            if length <= self._context_len and (row := self._row(request, length)) is not None:
                chosen.append((request, generation, row))
        for begin in range(0, len(chosen), self._chunk):
            self._decode(chosen[begin : begin + self._chunk], num_drafts)

    def propose(self, request: Request, drafts: Sequence[int], room: int) -> Proposal:
        """See `Proposer.propose`: what was prepared."""
        prepared = self._drafts.get(request.sequence.id)
        if drafts or not prepared:
            return NOTHING
        return Proposal(prepared[:room], "model", drawn_from=self._drawn_from.get(request.sequence.id, [])[:room])

    def branches(self, request: Request, room: int) -> Sequence[Proposal]:
        """See `Proposer.branches`: it decodes one text."""
        return ()

    def ended(self, request: Request) -> None:
        """See `Proposer.ended`."""
        row = self._rows.pop(request.sequence.id, None)
        if row is not None:
            self._free.extend(row.slots)

    def _row(self, request: Request, length: int) -> _Row | None:
        """The row of a sequence, cut to what is right of it, with slots for `length` tokens; `None` without room."""
        id = request.sequence.id
        row = self._rows.setdefault(id, _Row())
        self._rows.move_to_end(id)
        same = min(common_length(row.token_ids, request.sequence.token_ids), len(request.sequence) - 1)
        del row.token_ids[same:]
        missing = length - len(row.slots)
        while missing > len(self._free):
            other = next(iter(self._rows))
            if other == id or other in self._drafts:
                return None
            self._free.extend(self._rows.pop(other).slots)
        if missing > 0:
            row.slots += self._free[-missing:]
            del self._free[-missing:]
        self._drafts[id] = []
        return row

    def _decode(self, rows: Sequence[tuple[Request, Sampled, _Row]], num_drafts: int) -> None:
        """Compute what the rows miss, then draft by draft."""
        most = max(1, self._chunk // len(rows))
        for request, _, row in rows:  # all but the last tokens, which all rows compute together
            token_ids = request.sequence.token_ids
            while len(token_ids) - len(row.token_ids) > most:
                end = min(len(token_ids) - 1, len(row.token_ids) + self._chunk)
                self._forward([_chunk(request, row, token_ids[:end], None, ())], 0)
                row.token_ids = token_ids[:end]
        for place in range(num_drafts):
            chunks = []
            for request, generation, row in rows:
                drafts = self._drafts[request.sequence.id]
                chunks.append(_chunk(request, row, [*request.sequence.token_ids, *drafts], generation, drafts))
            begun = self._clock()
            drawn = self._forward(chunks, place, [self._by_distribution and is_judged(each) for _, each, _ in rows])
            if place:
                self.seconds += _NEW * (self._clock() - begun - self.seconds) if self.seconds else self._clock() - begun
            for (request, _, row), chunk, token_id in zip(rows, chunks, drawn, strict=True):
                row.token_ids += chunk.token_ids
                self._drafts[request.sequence.id].append(token_id)

    def _forward(self, chunks: Sequence[Chunk], place: int, judged: Sequence[bool] = ()) -> list[int]:
        """The tokens that the chunks draw, the drafts at `place`; of a row that is unusable, any.

        Args:
            judged: by chunk, whether its draft goes with its distribution.
        """
        plan = StepPlan(chunks=tuple(chunks))
        logits = self._runner.forward(plan)
        chosen = [i for i, is_judged in enumerate(judged) if is_judged]
        if chosen:
            specs = [chunks[i].draws[0][1] for i in chosen]
            q_RV = distributions(logits[chosen, : self._sampler.vocab_size], specs)
            q_RV[q_RV.isnan().any(dim=-1)] = 1 / q_RV.shape[1]
            picked = dict(zip(chosen, draw(q_RV, specs, [place] * len(chosen)), strict=True))
            for i, q_V in zip(chosen, q_RV, strict=True):
                self._drawn_from.setdefault(chunks[i].sequence, []).append(q_V)
            if len(chosen) == len(chunks):
                return [picked[i] for i in chosen]
        tokens = [row.token_id or 0 for row in self._sampler.sample(plan, logits).rows]
        if self._device_clock is not None:
            self._device_clock.take()  # its events are used again
        return tokens if not chosen else [picked.get(i, token) for i, token in enumerate(tokens)]


def _chunk(
    request: Request, row: _Row, token_ids: list[int], generation: Sampled | None, drafts: Sequence[int]
) -> Chunk:
    """The tokens of `token_ids` that the row has not computed; draws behind them for `generation`, without its
    constraint, whose matcher stands elsewhere."""
    sample = None
    if generation is not None:
        sample = msgspec.structs.replace(generation.spec(tuple(drafts)), matcher=None)
    start = len(row.token_ids)
    return Chunk(
        sequence=request.sequence.id,
        token_ids=token_ids[start:],
        start=start,
        page_table=np.array(row.slots[: len(token_ids)], dtype=np.int32),
        sample=sample,
    )


def check_tokenizers(draft: Tokenizer, own: Tokenizer) -> None:
    """Ids have to mean the same to both models.

    Raises:
        ConfigError: they do not, with the first id that differs.
    """
    differing = next(
        (i for i in range(min(draft.vocab_size, own.vocab_size)) if _text(draft, i) != _text(own, i)), None
    )
    if draft.vocab_size != own.vocab_size or differing is not None:
        what = f"{draft.vocab_size} ids and {own.vocab_size}"
        if differing is not None:
            what = (
                f"id {differing} is {_text(draft, differing)!r} to the one and {_text(own, differing)!r} to the other"
            )
        raise ConfigError(
            f"the draft model has another tokenizer than the model: {what}",
            hint="give speculative_draft_model_path a model of the same family",
            param="speculative_draft_model_path",
        )


def _text(tokenizer: Tokenizer, token_id: int) -> bytes:
    return tokenizer.token_bytes(token_id, skip_special_tokens=False)
