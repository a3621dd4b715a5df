"""From logits to tokens and log-probabilities.

Owns the order of the steps: vocabulary padding, penalties, logit bias, custom processor, blocked ids, constraint mask,
temperature, top-k, top-p, min-p, draw. The mask comes last of what changes logits, so that nothing gets past a
constraint; it comes with the plan, filled while that was computed (`masks.py`). Log-probabilities are those of the
model itself, before any of it. Called by the engine core between forward and process. Rows are independent: one with
NaN, without an allowed token, or whose processor fails, fails alone and is reported in its `RowResult`.

A draw is a function of (seed, position) and the row's logits: a hash of the two is the row's uniform number, so that
neighbours, batch composition and retraction never change it.

Shapes: R rows of logits, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import torch

from sgl.errors import ConstraintDeadEnd, GenerationError, InvalidLogits, SglError
from sgl.kernels import registry
from sgl.kernels.native import library
from sgl.kernels.registry import Function, OpFacts
from sgl.lang.graph import Sampling
from sgl.runtime.masks import MaskFiller, MaskJob
from sgl.runtime.plan import Chunk, Done, Pending, RowResult, SampleSpec, StepPlan, StepResult
from sgl.runtime.processors import BUILT_IN, LogitProcessor

if TYPE_CHECKING:
    from sgl.runtime.speculation.accept import Judgement

_Pairs: TypeAlias = tuple[tuple[int, float], ...]
NAN = ("invalid_logits", "the model returned NaN or no finite logit for this row")
GREEDY = 1e-5
"""Temperatures below are 0."""
_ROWS_AT_ONCE = 8
"""Rows whose probabilities are in memory at a time, as doubles."""
_CANDIDATES = 512
"""Most probable tokens that are looked at before all are: sorting a large vocabulary costs more than a small model."""


class Draw(NamedTuple):
    """A row of logits to draw from, and the place of its mask among those of the step."""

    row: int
    spec: SampleSpec
    mask: int | None


class Sampler:
    """Samples and scores the rows of a step.

    Args:
        vocab_size: ids that the tokenizer knows; padding logits beyond it are never drawn.
        processors: custom logit processors by name.
    """

    def __init__(self, vocab_size: int, processors: Mapping[str, LogitProcessor] = BUILT_IN) -> None:
        self.vocab_size = vocab_size
        self.processors = processors
        self._filler = MaskFiller(vocab_size)  # for a plan that brings no masks
        self._ops: dict[tuple[str, str], Function] = {}  # by name and device

    def start(self, plan: StepPlan, logits: torch.Tensor) -> Pending:
        """As `sample`; the result is there at once."""
        result = self.sample(plan, logits)
        rows = [row for chunk, row in zip(plan.chunks, result.rows, strict=True) if chunk.sample]
        drawn = [each.token_id or 0 for row in rows for each in (row, *row.more)]
        return Done(result, torch.tensor(drawn, dtype=torch.int64, device=logits.device))

    def sample(self, plan: StepPlan, logits: torch.Tensor) -> StepResult:
        """One result per chunk. `logits` is float32 `[R, V]`, rows in the plan's order; it is not changed."""
        blocks: list[tuple[Chunk, list[int], torch.Tensor]] = []
        drawing: list[Draw] = []
        first = num_masks = 0
        for chunk in plan.chunks:
            offsets = chunk.logit_offsets
            blocks.append((chunk, offsets, logits[first : first + len(offsets)]))
            for offset, spec in chunk.draws:
                has_mask = spec.matcher is not None
                drawing.append(Draw(first + offsets.index(offset), spec, num_masks if has_mask else None))
                num_masks += has_mask
            first += len(offsets)
        masks = plan.masks if plan.masks is not None else self._filler.start(plan.chunks)
        drawn = iter(self._draw(logits, drawing, masks))
        rows = []
        for chunk, offsets, block in blocks:
            row = next(drawn) if chunk.sample is not None else RowResult(sequence=chunk.sequence)
            more = tuple(islice(drawn, len(chunk.checks)))
            if chunk.proposed is not None:
                places = [offsets.index(offset) for offset, _ in chunk.draws]
                row, *rest = judgement(chunk, block[places, : self.vocab_size]).results((row, *more))
                more = tuple(rest)
            scores, tops, failed = self._score(chunk, offsets, block)
            rows.append(
                msgspec.structs.replace(
                    row, sequence=chunk.sequence, scores=scores, tops=tops, failed=row.failed or failed, more=more
                )
            )
        return StepResult(rows=tuple(rows))

    def _score(
        self, chunk: Chunk, offsets: list[int], block: torch.Tensor
    ) -> tuple[tuple[tuple[float, ...], ...], tuple[_Pairs, ...], tuple[str, str] | None]:
        """The log-probabilities that a chunk asks for, of ids and of top ones, and why there are none."""
        if not chunk.scores:
            return (), (), None
        wanted = block[[offsets.index(score.offset) for score in chunk.scores], : self.vocab_size]
        if bool(torch.isnan(wanted).any()):
            return tuple(() for _ in chunk.scores), (), NAN
        logprobs = torch.log_softmax(wanted, dim=-1)
        values = tuple(tuple(logprobs[i, list(s.token_ids)].tolist()) for i, s in enumerate(chunk.scores))
        tops = tuple(top_of(logprobs[i], s.top) for i, s in enumerate(chunk.scores))
        return values, tops if any(tops) else (), None

    def _draw(self, logits: torch.Tensor, drawing: list[Draw], masks: MaskJob | None) -> list[RowResult]:
        """Greedy rows where their logits lie, the others on a copy of theirs; one result each."""
        results = self._largest(logits, drawing, masks)
        rest = [i for i in range(len(drawing)) if i not in results]
        if rest:
            drawn = self._draw_adjusted(logits, [drawing[i] for i in rest], masks)
            results.update(zip(rest, drawn, strict=True))
        return [results[i] for i in range(len(drawing))]

    def _draw_adjusted(self, logits: torch.Tensor, drawing: list[Draw], masks: MaskJob | None) -> list[RowResult]:
        """Rows whose logits are changed by what was asked for, and those that turn out to be unusable."""
        specs = [draw.spec for draw in drawing]
        adjusted = logits[[draw.row for draw in drawing], : self.vocab_size]  # a copy
        # The largest of a row that holds a NaN is NaN.
        largest = adjusted.amax(dim=-1)
        broken = (torch.isnan(largest) | (largest == -torch.inf)).tolist()
        failures = {i: NAN for i, is_broken in enumerate(broken) if is_broken}
        for i, spec in enumerate(specs):
            _penalize(adjusted[i], spec)
            if i not in failures and (failed := self._process(adjusted[i], spec)) is not None:
                failures[i] = failed
        if masks is not None:
            failures = {**self._mask(adjusted, drawing, masks), **failures}
        dead = (adjusted.amax(dim=-1) == -torch.inf).tolist()
        is_greedy = [spec.sampling.temperature < GREEDY for spec in specs]
        greedy = adjusted.argmax(dim=-1).tolist() if any(is_greedy) else []
        random = [i for i in range(len(specs)) if not (is_greedy[i] or dead[i] or i in failures)]
        tokens = dict(zip(random, _draw_rows(adjusted, random, specs, self._op("top_k", logits.device)), strict=True))
        results = []
        for i, draw in enumerate(drawing):
            if i in failures:
                results.append(RowResult(sequence=0, failed=failures[i]))
            elif dead[i]:
                results.append(RowResult(sequence=0, failed=dead_end(draw, masks)))
            else:
                token = greedy[i] if is_greedy[i] else tokens[i]
                results.append(self._described(logits, token, draw))
        return results

    def _mask(self, adjusted: torch.Tensor, drawing: list[Draw], masks: MaskJob) -> dict[int, tuple[str, str]]:
        """Apply the masks to the rows that have one, in place; by row, why its mask is missing."""
        rows = [i for i, draw in enumerate(drawing) if draw.mask is not None]
        if not rows:
            return {}
        device = adjusted.device
        words = torch.from_numpy(masks.rows([drawing[i].mask for i in rows])).to(device)
        self._op("apply_bitmask", device)(adjusted, words, torch.tensor(rows, device=device))
        failures = masks.wait().failures
        return {i: failures[place] for i, draw in enumerate(drawing) if (place := draw.mask) in failures}

    def _largest(self, logits: torch.Tensor, drawing: list[Draw], masks: MaskJob | None) -> dict[int, RowResult]:
        """Greedy rows whose logits nothing but a mask changes, as far as they have a token; by place in `drawing`.

        They are read once, where they lie.
        """
        plain = [i for i, draw in enumerate(drawing) if _is_plainly_greedy(draw.spec)]
        if not plain:
            return {}
        rows = [drawing[i].row for i in plain]
        wanted = (logits if rows == list(range(len(logits))) else logits[rows])[:, : self.vocab_size]
        places = [drawing[i].mask for i in plain]
        words = None
        if masks is not None and places.count(None) < len(places):
            words = torch.from_numpy(masks.rows(places)).to(logits.device)
        tokens = self._op("argmax", logits.device)(wanted, words).tolist()
        found = zip(plain, tokens, strict=True)
        return {i: self._described(logits, token, drawing[i]) for i, token in found if token >= 0}

    def _described(self, logits: torch.Tensor, token: int, draw: Draw) -> RowResult:
        """The row's result, with log-probabilities when they were asked for."""
        sampling = draw.spec.sampling
        if not sampling.return_logprob:
            return RowResult(sequence=0, token_id=token)
        logprobs = torch.log_softmax(logits[draw.row, : self.vocab_size], dim=-1)
        ids = sampling.token_ids_logprob
        return RowResult(
            sequence=0,
            token_id=token,
            logprob=float(logprobs[token]),
            top=top_of(logprobs, sampling.top_logprobs_num),
            given=tuple(zip(ids, logprobs[list(ids)].tolist(), strict=True)) if ids else (),
        )

    def _op(self, name: str, device: torch.device) -> Function:
        key = (name, device.type)
        if key not in self._ops:
            native = device.type == "cpu" and library.loaded() is not None
            self._ops[key] = registry.get(name, OpFacts(device=device.type, native=native))
        return self._ops[key]

    def _process(self, row: torch.Tensor, spec: SampleSpec) -> tuple[str, str] | None:
        """Have the request's processor change the row in place, then block ids; why the row is unusable."""
        name = spec.sampling.custom_logit_processor
        failed = None
        if name is not None:
            processor = self.processors[name]  # admission has seen to it that there is one
            failed = process_row(row, name, lambda row: processor(row, tuple(spec.output_ids), spec.processor_params))
        _block(row, spec)
        return failed


def judgement(chunk: Chunk, logits_DV: torch.Tensor) -> Judgement:
    """See `Judgement`, which is needed where drafts are drawn from distributions only."""
    from sgl.runtime.speculation.accept import Judgement

    return Judgement(chunk, logits_DV)


def dead_end(draw: Draw, masks: MaskJob | None) -> tuple[str, str]:
    """Why no token is left in a row: the constraint allows none, or what it allows is forbidden by something else."""
    name = draw.spec.sampling.custom_logit_processor
    others = f"the logit processor {name!r}" if name is not None else "blocked tokens and logit bias"
    if draw.mask is None or masks is None:
        return GenerationError.code, f"{others} left no token to draw"
    if masks.rows([draw.mask]).any():
        return GenerationError.code, f"{others} left none of the tokens that the constraint allows"
    return ConstraintDeadEnd.code, "the constraint allows no token here"


def _is_plainly_greedy(spec: SampleSpec) -> bool:
    """Whether the next token is the one with the largest logit, of those that a constraint allows."""
    return spec.sampling.temperature < GREEDY and not changes_logits(spec)


def changes_logits(spec: SampleSpec) -> bool:
    """Whether anything but a constraint's mask changes the logits of the row."""
    sampling = spec.sampling
    penalized = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) != (0.0, 0.0, 1.0)
    return bool(penalized or sampling.logit_bias or sampling.custom_logit_processor is not None or spec.blocked_ids)


def top_of(logprobs: torch.Tensor, num: int) -> _Pairs:
    """The `num` most probable ids of one row, with their log-probabilities."""
    if not num:
        return ()
    values, ids = logprobs.topk(min(num, len(logprobs)))
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))


def _penalize(row: torch.Tensor, spec: SampleSpec) -> None:
    """Apply penalties over the output so far, and the logit bias, in place. `row` is `[V]`."""
    sampling = spec.sampling
    penalties = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty)
    if spec.output_ids and penalties != (0.0, 0.0, 1.0):
        ids, counts = torch.unique(torch.tensor(spec.output_ids), return_counts=True)
        ids, counts = ids.to(row.device), counts.to(row.device)
        values = row[ids] - sampling.frequency_penalty * counts - sampling.presence_penalty
        scale = sampling.repetition_penalty
        row[ids] = torch.where(values > 0, values / scale, values * scale)
    if sampling.logit_bias:
        biased, bias = zip(*sampling.logit_bias, strict=True)
        row[list(biased)] += torch.tensor(bias, dtype=row.dtype, device=row.device)


def _block(row: torch.Tensor, spec: SampleSpec) -> None:
    """Make what may not come now impossible, in place. `row` is `[V]`."""
    blocked = [token for token in spec.blocked_ids if token < len(row)]
    if blocked:
        row[blocked] = -torch.inf


def process_row(row: torch.Tensor, name: str, processor: Callable[[torch.Tensor], Any]) -> tuple[str, str] | None:
    """Give a copy of the row to a processor and take what it returns; what is wrong with that."""
    try:
        changed = processor(row.clone())
    except Exception as error:  # noqa: BLE001 - code of the operator: it fails the row that asked for it
        said = error.message if isinstance(error, SglError) else f"{type(error).__name__}: {error}"
        return GenerationError.code, f"the logit processor {name!r} raised: {said}"
    if not isinstance(changed, torch.Tensor) or changed.shape != row.shape or not changed.is_floating_point():
        what = f"{tuple(changed.shape)} {changed.dtype}" if isinstance(changed, torch.Tensor) else repr(changed)[:80]
        return GenerationError.code, f"the logit processor {name!r} returned {what}; expected {tuple(row.shape)} floats"
    if bool(torch.isnan(changed).any() | (changed == torch.inf).any()):
        return InvalidLogits.code, f"the logit processor {name!r} returned NaN or infinity"
    row.copy_(changed)
    return None


def _draw_rows(adjusted: torch.Tensor, rows: Sequence[int], specs: Sequence[SampleSpec], top_k: Function) -> list[int]:
    """Draw a token from each of `rows` of the adjusted logits `[R, V]`; `top_k` is the op.

    top-p keeps the smallest set of most probable tokens whose probabilities reach `top_p`, the one that crosses it
    included; min-p keeps those with at least `min_p` times the largest probability. Ties rank by id.
    """
    found: dict[int, int] = {}
    for is_cut in (False, True):
        group = [i for i in rows if _is_cut(specs[i].sampling) == is_cut]
        for first in range(0, len(group), _ROWS_AT_ONCE):
            some = group[first : first + _ROWS_AT_ONCE]
            logits, own = adjusted[some], [specs[i] for i in some]
            tokens = _draw_cut_group(logits, own, top_k) if is_cut else _draw_group(logits, own)
            found.update(zip(some, tokens, strict=True))
    return [found[i] for i in rows]


def _is_cut(sampling: Sampling) -> bool:
    """Whether some of the tokens cannot be drawn."""
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _draw_group(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    """A token of each row of `[G, V]`; all can be drawn."""
    temperature, uniform = _draws(specs, logits)
    probs = torch.softmax(logits.double() / temperature, dim=-1)
    return _pick(probs, uniform).flatten().tolist()


def _draw_cut_group(logits: torch.Tensor, specs: Sequence[SampleSpec], top_k: Function) -> list[int]:
    """A token of each row of `[G, V]`, of those that are left: the most probable ones are looked at before all are."""
    temperature, uniform = _draws(specs, logits)
    settings = [spec.sampling for spec in specs]
    vocab_size = logits.shape[-1]
    scale = 1.0 / temperature
    largest, ids, mass = top_k(logits, min(_CANDIDATES, vocab_size), scale.squeeze(-1))
    probs = torch.exp(largest.double() * scale - mass.unsqueeze(-1))
    tokens, is_decided = _pick_kept(probs, ids, vocab_size, uniform, settings)
    undecided = [i for i, decided in enumerate(is_decided) if not decided]
    if undecided:  # rows that keep more tokens than were looked at
        probs = torch.softmax(logits[undecided].double() / temperature[undecided], dim=-1)
        probs, ids = probs.sort(dim=-1, descending=True, stable=True)
        rest, _ = _pick_kept(probs, ids, vocab_size, uniform[undecided], [settings[i] for i in undecided])
        for i, token in zip(undecided, rest, strict=True):
            tokens[i] = token
    return tokens


def _draws(specs: Sequence[SampleSpec], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Temperatures and uniform numbers of rows, `[G, 1]` each."""
    temperature = _column([spec.sampling.temperature for spec in specs], like)
    return temperature, _column([uniform_of(spec.seed, spec.position) for spec in specs], like)


def _pick_kept(
    probs: torch.Tensor, ids: torch.Tensor, vocab_size: int, uniform: torch.Tensor, settings: Sequence[Sampling]
) -> tuple[list[int], list[bool]]:
    """Cut sorted rows `[G, C]` and pick from what is left; and of each row whether no token that is missing counts."""
    keep = _kept(probs, vocab_size, settings)
    # A token as probable as the last one that is here may have been left out in its favour.
    decided = (probs.shape[-1] == vocab_size) | ~(keep & (probs <= probs[:, -1:])).any(dim=-1)
    return ids.gather(-1, _pick(probs * keep, uniform)).flatten().tolist(), decided.tolist()


def _kept(probs: torch.Tensor, vocab_size: int, settings: Sequence[Sampling]) -> torch.Tensor:
    """Which columns of sorted rows `[G, C]` can be drawn."""
    before = probs.cumsum(dim=-1) - probs
    top_p = _column([each.top_p if each.top_p < 1.0 else 2.0 for each in settings], probs)  # 2 cuts nothing
    top_k = _column([each.top_k if each.top_k > 0 else vocab_size for each in settings], probs)
    min_p = _column([each.min_p for each in settings], probs)
    keep = (before < top_p) & (probs >= min_p * probs[:, :1])
    keep &= (torch.arange(probs.shape[-1], device=probs.device) < top_k) & (probs > 0)
    keep[:, 0] = True
    return keep


def distributions(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """What rows `[G, V]` are drawn from, float64, where neither a constraint nor a processor has a say."""
    adjusted = logits.clone()
    for row, spec in zip(adjusted, specs, strict=True):
        _penalize(row, spec)
        _block(row, spec)
    settings = [spec.sampling for spec in specs]
    probs = torch.softmax(adjusted.double() / _column([each.temperature for each in settings], logits), dim=-1)
    if not any(map(_is_cut, settings)):
        return probs
    ranked, ids = probs.sort(dim=-1, descending=True, stable=True)
    ranked *= _kept(ranked, logits.shape[-1], settings)
    return torch.zeros_like(probs).scatter_(-1, ids, ranked / ranked.sum(dim=-1, keepdim=True))


def _pick(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The column of each row where its running sum passes `uniform` times the whole; `[G, 1]`."""
    sums = probs.cumsum(dim=-1)
    picked = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)
    # Rounding may put the threshold on the sum itself: then it is the last column that has a probability.
    return torch.minimum(picked, (sums < sums[:, -1:]).sum(dim=-1, keepdim=True))


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def uniform_of(seed: int, position: int) -> float:
    """A number in [0, 1) in which every bit depends on both."""
    data = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 11) / 2**53
