"""One step of the engine as a value: which sequence advances by how many tokens.

Owns `Chunk` and `StepPlan`, made by the scheduler, read by the model runner and the sampler, and never changed; and
`StepResult`, which comes back at once or as a `Pending` one.
Prefill, chunked prefill, decode and scoring are the same thing with different token counts. Pages that a chunk writes
may be read by later chunks of the same plan: a layer writes all keys and values before any attention reads them, so
two sequences that share a prefix compute it once even when they start in the same step.

A step may be planned and computed before the tokens of the one before are known to the host: see `Chunk.follows`.

Verification of drafts is a chunk, too: behind the tokens that are known it computes some that are guessed, and draws
after each of them as if it were known (`Chunk.checks`). What is drawn is the same with and without them; how far the
guesses agree with it says how many of the draws count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from sgl.lang.graph import Sampling

if TYPE_CHECKING:
    from sgl.grammars.matcher import MaskSource
    from sgl.runtime.masks import MaskJob


UNKNOWN = -1
"""Stands for a token that a step before draws and the host has not seen yet."""
NOBODY = 0
"""In place of a sequence: nobody wants the chunk's result any more."""


class SampleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Draw the next token from the logits after a chunk's last token.

    Args:
        sampling: temperature and the rest.
        seed: resolved seed of this generation; with `position` it fixes the draw.
        position: how many tokens the generation has produced so far.
        output_ids: these tokens, for penalties and processors; empty behind a draft where neither is asked for.
        processor_params: what the custom logit processor is given.
        blocked_ids: tokens that may not come now (stops before `min_new_tokens`).
        matcher: the constraint's state; its mask is in the plan's `masks`.
    """

    sampling: Sampling
    seed: int
    position: int
    output_ids: list[int]
    blocked_ids: tuple[int, ...] = ()
    matcher: MaskSource | None = None
    processor_params: Any = None


class ScoreSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities wanted: after the chunk's token at `offset`, of each of `token_ids` and of the `top` best."""

    offset: int
    token_ids: tuple[int, ...]
    top: int = 0


class Proposed(NamedTuple):
    """Distributions that drafts were drawn from, a float64 `[V]` for each; judged by block or token by token."""

    rows: tuple[Any, ...]
    by_block: bool


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive tokens of one sequence to compute in this step.

    Args:
        sequence: its id.
        token_ids: tokens at positions `start .. start + len(token_ids)`.
        page_table: page of each group of `page_size` positions, int32, covering the sequence up to its last token here.
        sample: what to draw after the last token, if anything.
        scores: log-probabilities to return, in order.
        follows: the only token is `UNKNOWN` as yet: which of the tokens that the step before draws, in the order of its
            chunks, it is.
        num_drafts: of `token_ids`, the last so many are guesses; `sample` draws after the last one before them.
        checks: what to draw after each of the first drafts. Drafts behind those are guesses of what stands after the
            end of the generation.
        num_ahead: logits are wanted after the last so many drafts, too, for whoever goes on there.
        proposed: where the first drafts were drawn from, if they are to be accepted by rejection sampling: then results
            are those of its verdict.
        parents: of drafts that are a tree, which of them each one continues (-1: the known tokens), parents first. They
            lie one after another all the same, as if at positions one after another. Empty for a chain.
    """

    sequence: int
    token_ids: list[int]
    start: int
    page_table: npt.NDArray[np.int32]
    sample: SampleSpec | None = None
    scores: tuple[ScoreSpec, ...] = ()
    follows: int | None = None
    num_drafts: int = 0
    checks: tuple[SampleSpec, ...] = ()
    num_ahead: int = 0
    parents: tuple[int, ...] = ()
    proposed: Proposed | None = None

    @property
    def end(self) -> int:
        """Length of the sequence after this chunk, drafts included."""
        return self.start + len(self.token_ids)

    @property
    def known_end(self) -> int:
        """The same without drafts."""
        return self.end - self.num_drafts

    @property
    def drafts(self) -> list[int]:
        """The guesses."""
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    def path(self, draft: int) -> list[int]:
        """The drafts from the known tokens to one of them, which is the last.

        Example:
            >>> tree = Chunk(
            ...     sequence=1,
            ...     token_ids=[4, 7, 8, 9],
            ...     start=2,
            ...     page_table=np.zeros(6, np.int32),
            ...     num_drafts=3,
            ...     parents=(-1, 0, 0),
            ... )
            >>> tree.path(2), tree.drafts
            ([0, 2], [7, 8, 9])
        """
        if not self.parents:
            return list(range(draft + 1))
        path = [draft]
        while (parent := self.parents[path[-1]]) >= 0:
            path.append(parent)
        return path[::-1]

    @property
    def draws(self) -> list[tuple[int, SampleSpec]]:
        """Where to draw, as offsets into `token_ids`, and how."""
        if self.sample is None:
            return []
        first = len(self.token_ids) - self.num_drafts - 1
        return list(enumerate((self.sample, *self.checks), start=first))

    @property
    def logit_offsets(self) -> list[int]:
        """Offsets into `token_ids` whose logits are needed, ascending and distinct."""
        length = len(self.token_ids)
        if not self.num_drafts and not self.scores:
            return [] if self.sample is None else [length - 1]
        wanted = {score.offset for score in self.scores}
        wanted.update(offset for offset, _ in self.draws)
        wanted.update(range(length - self.num_ahead, length))
        return sorted(wanted)


class PageCopy(msgspec.Struct, frozen=True, kw_only=True):
    """Copy the keys and values of the first `num_tokens` slots of page `source` to the same slots of page `target`."""

    source: int
    target: int
    num_tokens: int


class Move(NamedTuple):
    """The keys and values in one slot of the pool belong in another."""

    source: int
    target: int


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The chunks of one step; logits rows come in their order, offset by offset.

    `copies` are done before anything is computed, and as if all at once: every source is read before any target is
    written. They stand beside chunks, never alone. `masks` are being filled for chunks that draw under a constraint.

    With `carried`, nothing is computed: the plan draws from logits of the step that was computed last, its rows being
    those of the given numbers.
    """

    chunks: tuple[Chunk, ...]
    copies: tuple[PageCopy, ...] = ()
    masks: MaskJob | None = None
    carried: tuple[int, ...] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this step."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def num_pairs(self) -> int:
        """Pairs of a computed token and a key that it attends to: what attention costs."""
        return sum(len(chunk.token_ids) * (chunk.start + chunk.end + 1) // 2 for chunk in self.chunks)


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a step gave one chunk: the token drawn, its log-probability, those of the top ones and of the ids given, and
    per score asked for the log-probabilities of its ids (`scores`) and of the top ones (`tops`; empty without any).

    `failed` is a reason (a code of `sgl.errors` and a sentence) when this row alone is unusable. `more` are the results
    of the chunk's `checks`, which mean something as long as the drafts before them were right.
    """

    sequence: int
    token_id: int | None = None
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    given: tuple[tuple[int, float], ...] = ()
    scores: tuple[tuple[float, ...], ...] = ()
    tops: tuple[tuple[tuple[int, float], ...], ...] = ()
    failed: tuple[str, str] | None = None
    more: tuple[RowResult, ...] = ()


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """One `RowResult` per chunk of the plan, in its order."""

    rows: tuple[RowResult, ...]


class Pending(Protocol):
    """The result of a step that a device may still compute.

    Attributes:
        token_ids: int64 `[D]` where the model is, one per draw (`Chunk.draws`), in their order; of a row that failed
            any valid id. What the forward of the next step takes in place of tokens that it `follows`.
    """

    token_ids: Any

    def wait(self) -> StepResult:
        """The result, once it is there."""


class Done:
    """A result that is there at once."""

    def __init__(self, result: StepResult, token_ids: Any = None) -> None:
        self.token_ids = token_ids
        self._result = result

    def wait(self) -> StepResult:
        """See `Pending.wait`."""
        return self._result
