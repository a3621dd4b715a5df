"""From logits to tokens on a GPU, without the host waiting for it.

Owns the same step as `sampler.py`, for logits on a CUDA device: everything is queued by `start`, behind the forward
that may still run, and read by `wait`, when the host asks for it. So the next forward can be queued in between, on
tokens that nobody has seen. What a row needs besides its logits goes to the device in one copy; what came of it, in
another.

Rows that nothing but a mask changes are drawn where they lie; penalties, bias, blocked ids and custom processors change
a copy. A custom processor is the operator's code, which may look at its row: the host waits for the forward then.

A draw is a function of (seed, position) and the row's logits here, too, but it takes another token than the CPU for the
same numbers (`kernels/triton/sampling.py`). Greedy rows take the same.

Shapes: R rows of logits, V vocabulary, D drawn rows, N rows whose log-probabilities are wanted.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from sgl.kernels.triton import sampling as kernel
from sgl.lang.graph import Sampling
from sgl.runtime.device_clock import DeviceClock
from sgl.runtime.masks import MaskJob
from sgl.runtime.plan import Pending, RowResult, StepPlan, StepResult
from sgl.runtime.processors import BUILT_IN, LogitProcessor
from sgl.runtime.sampler import GREEDY, NAN, Draw, Sampler, changes_logits, dead_end, judgement, process_row, uniform_of

if TYPE_CHECKING:
    from sgl.runtime.speculation.accept import Judgement


class _Wanted(NamedTuple):
    """Log-probabilities that are wanted of a row of logits: those of some ids, and those of the best."""

    row: int
    token_ids: tuple[int, ...]
    top: int


class DeviceSampler(Sampler):
    """As `Sampler`, on CUDA. Arguments as there.

    Args:
        clock: times the draws.
    """

    def __init__(
        self,
        vocab_size: int,
        processors: Mapping[str, LogitProcessor] = BUILT_IN,
        clock: DeviceClock | None = None,
    ) -> None:
        super().__init__(vocab_size, processors)
        self._clock = clock
        self._settings: list[Sampling] = []
        self._nothing = torch.zeros(1, 1, dtype=torch.int32)
        self._columns: npt.NDArray[np.float64] = np.empty((4, 0))

    def sample(self, plan: StepPlan, logits: torch.Tensor) -> StepResult:
        """See `Sampler.sample`."""
        return self.start(plan, logits).wait()

    def start(self, plan: StepPlan, logits: torch.Tensor) -> Pending:
        """Queue everything that `sample` does."""
        drawing: list[Draw] = []
        scoring: list[_Wanted] = []
        judged: dict[int, list[int]] = {}  # rows of logits of chunks whose drafts are judged, by place in the plan
        first = num_masks = 0
        for place, chunk in enumerate(plan.chunks):
            if not chunk.num_drafts and not chunk.scores:
                if chunk.sample is not None:
                    has_mask = chunk.sample.matcher is not None
                    drawing.append(Draw(first, chunk.sample, num_masks if has_mask else None))
                    num_masks += has_mask
                    first += 1
                continue
            offsets = chunk.logit_offsets
            if chunk.proposed is not None:
                judged[place] = [first + offsets.index(offset) for offset, _ in chunk.draws]
            scoring += [_Wanted(first + offsets.index(s.offset), s.token_ids, s.top) for s in chunk.scores]
            for offset, spec in chunk.draws:
                has_mask = spec.matcher is not None
                drawing.append(Draw(first + offsets.index(offset), spec, num_masks if has_mask else None))
                num_masks += has_mask
            first += len(offsets)
        masks = plan.masks if plan.masks is not None else self._filler.start(plan.chunks)
        step = _Step(plan, drawing, masks, logits.device)
        if self._clock is not None:
            self._clock.mark()
        self._draw_all(logits, step)
        if scoring:
            step.scores = _Logprobs(logits[:, : self.vocab_size], scoring)
        step.described = [i for i, draw in enumerate(drawing) if draw.spec.sampling.return_logprob]
        if step.described:
            wanted = [
                _Wanted(drawing[i].row, sampling.token_ids_logprob or (), sampling.top_logprobs_num)
                for i in step.described
                for sampling in [drawing[i].spec.sampling]
            ]
            chosen = step.token_ids[_sent(step.described, logits.device)]
            step.logprobs = _Logprobs(logits[:, : self.vocab_size], wanted, chosen)
        for place, rows in judged.items():
            step.judgements[place] = judgement(plan.chunks[place], logits[rows, : self.vocab_size])
        if self._clock is not None:
            self._clock.mark()
        step.end()
        return step

    def _draw_all(self, logits: torch.Tensor, step: _Step) -> None:
        """Draw every row of the step that wants it."""
        drawing = step.drawing
        if not drawing:
            step.token_ids = torch.empty(0, dtype=torch.int64, device=logits.device)
            return
        fields = self._fields(drawing)
        words = self._no_words(logits.device) if step.masks is None else _sent(step.masks.wait().words, logits.device)
        changed = [i for i, draw in enumerate(drawing) if changes_logits(draw.spec)]
        if changed:
            rows = _sent([drawing[i].row for i in changed], logits.device)
            adjusted = logits[rows, : self.vocab_size]
            step.raw = dict(zip(changed, range(len(changed)), strict=True)), _fetched(adjusted.amax(dim=-1))
            self._adjust(adjusted, [drawing[i] for i in changed], changed, step)
            own = fields[:, changed]
            own[0] = np.arange(len(changed))
            codes_changed, _ = kernel.draw(adjusted, _sent(own, logits.device), words, self.vocab_size)
        codes, step.token_ids = kernel.draw(logits, _sent(fields, logits.device), words, self.vocab_size)
        if changed:
            places = _sent(changed, logits.device)
            codes[places] = codes_changed
            step.token_ids[places] = codes_changed.clamp(min=0).long()
        step.codes = _fetched(codes)

    def _no_words(self, device: torch.device) -> torch.Tensor:
        """In place of masks: the kernel takes an address."""
        if self._nothing.device != device:
            self._nothing = torch.zeros(1, 1, dtype=torch.int32, device=device)
        return self._nothing

    def _fields(self, drawing: Sequence[Draw]) -> npt.NDArray[np.float64]:
        """What the kernel wants to know of each row, `[FIELDS, D]`; settings are looked at when they change."""
        settings = [draw.spec.sampling for draw in drawing]
        is_same = len(settings) == len(self._settings) and all(map(operator.is_, settings, self._settings))
        if not is_same:
            self._settings = settings
            self._columns = np.array(
                [
                    (0.0 if s.temperature < GREEDY else s.temperature, max(s.top_k, 0), s.top_p, s.min_p)
                    for s in settings
                ]
            ).T
        fields = np.empty((kernel.FIELDS, len(drawing)))
        fields[0] = [draw.row for draw in drawing]
        fields[1] = [-1 if draw.mask is None else draw.mask for draw in drawing]
        fields[2:6] = self._columns
        fields[6] = [
            uniform_of(draw.spec.seed, draw.spec.position) if draw.spec.sampling.temperature >= GREEDY else 0.0
            for draw in drawing
        ]
        return fields

    def _adjust(self, adjusted: torch.Tensor, drawing: Sequence[Draw], places: Sequence[int], step: _Step) -> None:
        """Change the rows of a copy, `[C, V]`, by what was asked for; `places` are theirs in the step."""
        device = adjusted.device
        penalized: list[tuple[int, int, int, float, float, float]] = []
        biased: list[tuple[int, int, float]] = []
        blocked: list[tuple[int, int]] = []
        for i, draw in enumerate(drawing):
            sampling = draw.spec.sampling
            penalties = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty)
            if draw.spec.output_ids and penalties != (0.0, 0.0, 1.0):
                ids, counts = np.unique(np.array(draw.spec.output_ids), return_counts=True)
                penalized += [(i, *pair, *penalties) for pair in zip(ids.tolist(), counts.tolist(), strict=True)]
            biased += [(i, token, bias) for token, bias in sampling.logit_bias or ()]
            blocked += [(i, token) for token in draw.spec.blocked_ids if token < self.vocab_size]
        if penalized:
            i, token, count, frequency, presence, repetition = _sent(np.array(penalized, dtype=np.float64).T, device)
            where = i.long(), token.long()
            values = adjusted[where] - (frequency * count + presence).float()
            scale = repetition.float()
            adjusted[where] = torch.where(values > 0, values / scale, values * scale)
        if biased:
            i, token, bias = _sent(np.array(biased, dtype=np.float64).T, device)
            adjusted[i.long(), token.long()] += bias.float()
        for i, draw in enumerate(drawing):
            name = draw.spec.sampling.custom_logit_processor
            if name is not None:
                processor, spec = self.processors[name], draw.spec
                failed = process_row(
                    adjusted[i],
                    name,
                    lambda row, processor=processor, spec=spec: processor(  # type: ignore[misc]
                        row, tuple(spec.output_ids), spec.processor_params
                    ),
                )
                if failed is not None:
                    step.failures[places[i]] = failed
        if blocked:
            i, token = _sent(np.array(blocked, dtype=np.int64).T, device)
            adjusted.index_put_((i, token), torch.full((), -torch.inf, device=device))


class _Logprobs:
    """Log-probabilities of some rows, on their way to the host.

    Args:
        logits_RV: of the step.
        wanted: of N rows, what.
        chosen: `[N]`, one more id for each.
    """

    def __init__(self, logits_RV: torch.Tensor, wanted: Sequence[_Wanted], chosen: torch.Tensor | None = None) -> None:
        device = logits_RV.device
        rows_N = _sent([each.row for each in wanted], device)
        sums_N = kernel.log_sums(logits_RV, rows_N)
        self._wanted = wanted
        # A row with a NaN has nothing else.
        first_N = logits_RV[rows_N, 0 if chosen is None else chosen] - sums_N
        self._first = _fetched(first_N)
        self._given: torch.Tensor | None = None
        pairs = [(n, token) for n, each in enumerate(wanted) for token in each.token_ids]
        if pairs:
            n, token = _sent(np.array(pairs, dtype=np.int64).T, device)
            self._given = _fetched(logits_RV[rows_N[n], token] - sums_N[n])
        self._top: tuple[torch.Tensor, torch.Tensor] | None = None
        if most := max((each.top for each in wanted), default=0):
            values, ids = _largest(logits_RV, rows_N, most)
            self._top = _fetched(values - sums_N[:, None]), _fetched(ids)

    def read(self) -> list[tuple[float, tuple[float, ...], tuple[tuple[int, float], ...]]]:
        """Of each row: the log-probability of the chosen id (NaN if the row has one), of the given ids, the best."""
        firsts = self._first.tolist()
        given = iter(self._given.tolist() if self._given is not None else ())
        found = []
        for n, each in enumerate(self._wanted):
            top: tuple[tuple[int, float], ...] = ()
            if self._top is not None and each.top:
                values, ids = (part[n, : each.top].tolist() for part in self._top)
                top = tuple(zip(ids, values, strict=True))
            found.append((firsts[n], tuple(next(given) for _ in each.token_ids), top))
        return found


class _Step:
    """A step's draws and scores on their way; see `Pending`.

    Attributes:
        codes: of the drawing kernel, on the host once everything queued before `end` is done.
        failures: rows that are unusable whatever was drawn, by place among the drawn ones.
        raw: of rows whose logits were changed: by place, where the largest of their own logits is found.
        described: places of the rows whose `logprobs` are wanted.
        judgements: by place in the plan, of chunks whose drafts are accepted by rejection sampling.
    """

    token_ids: torch.Tensor
    codes: torch.Tensor

    def __init__(self, plan: StepPlan, drawing: list[Draw], masks: MaskJob | None, device: torch.device) -> None:
        self.plan = plan
        self.drawing = drawing
        self.masks = masks
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.failures: dict[int, tuple[str, str]] = {}
        self.raw: tuple[dict[int, int], torch.Tensor] | None = None
        self.described: list[int] = []
        self.logprobs: _Logprobs | None = None
        self.scores: _Logprobs | None = None
        self.judgements: dict[int, Judgement] = {}

    def end(self) -> None:
        """Everything is queued."""
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> StepResult:
        """See `Pending.wait`."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._is_plain:
            codes = iter(self.codes.tolist())
            return StepResult(
                rows=tuple(
                    RowResult(sequence=chunk.sequence, token_id=next(codes) if chunk.sample is not None else None)
                    for chunk in self.plan.chunks
                )
            )
        drawn = iter(self._drawn())
        scored = iter(self.scores.read() if self.scores is not None else ())
        rows = []
        for place, chunk in enumerate(self.plan.chunks):
            results = [each.result() for each in islice(drawn, len(chunk.draws))]
            if place in self.judgements:
                results = self.judgements[place].results(results)
            row = results[0] if results else RowResult(sequence=0)
            failed = row.failed
            found = [next(scored) for _ in chunk.scores]
            if any(first != first for first, _, _ in found):
                found, failed = [(0.0, (), ())] * len(found), failed or NAN
            tops = tuple(tops for _, _, tops in found)
            rows.append(
                msgspec.structs.replace(
                    row,
                    sequence=chunk.sequence,
                    token_id=row.token_id if failed is None else None,
                    scores=tuple(values for _, values, _ in found),
                    tops=tops if any(tops) else (),
                    failed=failed,
                    more=tuple(results[1:]),
                )
            )
        return StepResult(rows=tuple(rows))

    @property
    def _is_plain(self) -> bool:
        """Whether each chunk has drawn one usable token at most, and nobody wants more than that."""
        if not self.drawing or self.scores is not None or self.logprobs is not None or self.raw is not None:
            return False
        if self.failures or self.judgements or (self.masks is not None and self.masks.wait().failures):
            return False
        return not any(chunk.checks for chunk in self.plan.chunks) and int(self.codes.min()) >= 0

    def _drawn(self) -> list[_Drawn]:
        """What came of each drawn row."""
        if not self.drawing:
            return []
        found = [_Drawn(token) for token in self.codes.tolist()]
        if self.logprobs is not None:
            for i, (logprob, given, top) in zip(self.described, self.logprobs.read(), strict=True):
                ids = self.drawing[i].spec.sampling.token_ids_logprob or ()
                found[i] = _Drawn(found[i].code, logprob, tuple(zip(ids, given, strict=True)), top)
        missing = self.masks.wait().failures if self.masks is not None else {}
        is_clean = not missing and not self.failures and self.raw is None
        for i, (draw, each) in enumerate(zip(self.drawing, found, strict=True)):
            if is_clean and each.code >= 0:
                continue
            if (failed := self._failure(i, draw, each.code, missing)) is not None:
                found[i] = _Drawn(each.code, failed=failed)
        return found

    def _failure(self, i: int, draw: Draw, code: int, missing: Mapping[int, tuple[str, str]]) -> tuple[str, str] | None:
        """Why a row is unusable, if it is."""
        is_changed = self.raw is not None and i in self.raw[0]
        if not self._has_finite(i) if is_changed else code == kernel.INVALID:
            return NAN
        if i in self.failures:
            return self.failures[i]
        if draw.mask is not None and draw.mask in missing:
            return missing[draw.mask]
        return None if code >= 0 else dead_end(draw, self.masks)

    def _has_finite(self, i: int) -> bool:
        """Whether the logits of a changed row were usable before."""
        if self.raw is None:
            return False
        largest = float(self.raw[1][self.raw[0][i]])
        return largest == largest and largest > -np.inf


class _Drawn(NamedTuple):
    """What came of a row: its token (not negative), log-probabilities, or why there is none."""

    code: int
    logprob: float = 0.0
    given: tuple[tuple[int, float], ...] = ()
    top: tuple[tuple[int, float], ...] = ()
    failed: tuple[str, str] | None = None

    def result(self) -> RowResult:
        """The same, for whoever takes it."""
        return RowResult(
            sequence=0,
            token_id=self.code if self.failed is None else None,
            logprob=self.logprob,
            top=self.top,
            given=self.given,
            failed=self.failed,
        )


_RANKED_AT_ONCE = 32
"""Rows whose logits are in memory as keys at a time."""


def _largest(logits_RV: torch.Tensor, rows_N: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logits of some rows, and their ids, `[N, most]` each. Ties rank by id: which of them the library
    takes depends on how many rows there are."""
    vocab_size = logits_RV.shape[1]
    low_V = torch.arange(vocab_size - 1, -1, -1, device=logits_RV.device)
    ids = []
    for rows in torch.split(rows_N, _RANKED_AT_ONCE):
        bits = (logits_RV[rows] + 0.0).view(torch.int32)  # of two zeros one
        keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long().mul_(2**32).add_(low_V)
        best, _ = keys.topk(min(most, vocab_size))
        ids.append(vocab_size - 1 - best % 2**32)
    ids_NK = torch.cat(ids)
    return logits_RV[rows_N[:, None], ids_NK], ids_NK


def _sent(values: Sequence[int] | npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Numbers on the device, without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _fetched(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers on the host, once what was queued so far is done."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
