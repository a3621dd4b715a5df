"""One generation while it runs: what to draw next and when it has ended.

Owns the output ids, the incremental text, the constraint's state and the reason of the end. Does not own the sequence
(the scheduler appends what `push` returns) nor the draw (the sampler does). A program run makes one for each `Gen`.

Where the constraint leaves one continuation, `force` takes its tokens without a draw; they go the same way as drawn
ones, so stops, limits and text see no difference. A drawn token after which `max_new_tokens` could not complete the
text any more is replaced by the next one of a completion that fits (`sgl.grammars.closing`).

The end, in the order in which it is looked for: an end-of-sequence or stop token id, a stop string or pattern, a
constraint that nothing can follow, `max_new_tokens`. What ended the output is not part of it unless `no_stop_trim`; an
end-of-sequence token that is kept so is part of the value and not of the state, which the program goes on with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from sgl.errors import ConstraintDeadEnd, ConstraintTooComplex
from sgl.grammars.closing import Steering
from sgl.grammars.matcher import Matcher, StopReason
from sgl.grammars.reasoning import ReasoningMatcher
from sgl.lang.graph import Sampling, TokenLogprob
from sgl.limits import DEFAULT_LIMITS, Limits
from sgl.runtime.healing import Seam
from sgl.runtime.plan import RowResult, SampleSpec
from sgl.runtime.sequence import NOTHING_FORCED, ForcedRun
from sgl.runtime.text.detokenize import StreamDecoder, TokenBytes
from sgl.runtime.thinking import ReasoningCount


class Kept(NamedTuple):
    """What of an output stays in the state: leading tokens, their text, and text to be encoded anew after them.

    The text before a healed seam is the output's.
    """

    num_tokens: int
    text: str
    rest: str


class Generation:
    """Draws tokens until something ends it.

    Args:
        sampling: how to draw and when to stop.
        tokenizer: bytes of tokens.
        eos_ids: the model's end-of-sequence ids.
        seed: resolved seed.
        max_new_tokens: `sampling.max_new_tokens`, or less where the context ends first.
        matcher: the constraint, at its start; `steering`: what keeps its text within the budget.
        seam: where the output meets the text before it, if its first token is to be drawn over that.
        reasoning: counts the tokens of reasoning, where no matcher does.
        forces: take tokens without a draw where the constraint leaves no other.
        limits: bounds the time of stop patterns.

    Attributes:
        finish: `stop` or `length` once it has ended; `matched` is the stop string, id, or text that a pattern matched.
        failed: error code and reason, when the output is unusable.
    """

    def __init__(
        self,
        sampling: Sampling,
        tokenizer: TokenBytes,
        eos_ids: frozenset[int],
        *,
        seed: int,
        max_new_tokens: int,
        matcher: Matcher | None = None,
        steering: Steering | None = None,
        seam: Seam | None = None,
        reasoning: ReasoningCount | None = None,
        forces: bool = True,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.sampling = sampling
        self.seed = seed
        self.max_new_tokens = max_new_tokens
        self.matcher = matcher
        self.decoder = StreamDecoder(
            tokenizer,
            sampling.stop,
            sampling.stop_regex,
            keep_stop=sampling.no_stop_trim,
            min_tokens=sampling.min_new_tokens,
            skip_special_tokens=sampling.skip_special_tokens,
            limits=limits,
            skip_bytes=len(seam.text.encode()) if seam is not None else 0,
        )
        self.output_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish: str | None = None
        self.matched: str | int | None = None
        self.failed: tuple[str, str] | None = None
        self.before_text: Callable[[], None] | None = None  # a fault point
        self._new_text: list[str] = []
        self._untold: list[int] = []  # tokens whose text nobody has asked for; none where a stop may end it
        self._num_taken = 0
        self._forces = forces and matcher is not None
        self._steering = steering
        self._reasoning = reasoning
        self._seam = seam  # until the first token is there
        self._seam_text = seam.text if seam is not None else ""
        self.forced: list[tuple[int, int]] = []  # runs of forced tokens: where in the output, and how many
        self._unscored: list[int] = []  # places in the output of tokens that were taken instead of drawn ones
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._before_eos: str | None = None  # the text, when an end-of-sequence token is kept after it
        self._params = json.loads(sampling.custom_params) if sampling.custom_params is not None else None
        self._ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_ids)
        self._blocked = tuple(sorted(self._ends | eos_ids))
        penalties = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty)
        self._reads_output = penalties != (0.0, 0.0, 1.0) or sampling.custom_logit_processor is not None

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the model's reasoning so far, without its markers."""
        if isinstance(self.matcher, ReasoningMatcher):
            return self.matcher.num_reasoning_tokens
        return self._reasoning.num_tokens if self._reasoning is not None else 0

    @property
    def finished(self) -> bool:
        """Whether nothing more is to be drawn."""
        return self.finish is not None

    @property
    def ends_next(self) -> bool:
        """Whether the next token is the last, whatever it is."""
        return len(self.output_ids) + 1 >= self.max_new_tokens

    @property
    def num_left(self) -> int:
        """Most tokens that are still to come; 0 also where drafts cannot be checked, as over a healed seam."""
        return 0 if self.finished or self._seam is not None else self.max_new_tokens - len(self.output_ids)

    @property
    def num_kept(self) -> int:
        """Leading tokens of the output that stay in the state."""
        return self.keep().num_tokens

    def ends_with(self, token_id: int) -> bool:
        """Whether a token would end the output, as far as the token alone tells."""
        if token_id in self._ends:
            return True
        if not self.sampling.stop:
            return False
        text = self._tokenizer.token_bytes(token_id)
        return any(stop.encode() in text for stop in self.sampling.stop)

    def spec(self, drafts: Sequence[int] = ()) -> SampleSpec:
        """How to draw the next token, or the one behind `drafts` if they turn out to be the next ones."""
        position = len(self.output_ids) + len(drafts)
        output_ids = self.output_ids
        if drafts:
            output_ids = [*output_ids, *drafts] if self._reads_output else []
        return SampleSpec(
            sampling=self.sampling,
            seed=self.seed,
            position=position,
            output_ids=output_ids,
            blocked_ids=self._blocked if position < self.sampling.min_new_tokens else (),
            matcher=self.matcher if self._seam is None else self._seam,
            processor_params=self._params,
        )

    def force(self) -> ForcedRun:
        """Take every token that the constraint leaves no choice about, up to the end of the output if one is met."""
        if not self._forces and not self._unscored:
            return NOTHING_FORCED
        first = len(self.output_ids)
        kept = [self._take(TokenLogprob(token_id, None)) for token_id in self._forced()]
        if len(self.output_ids) > first:
            self.forced.append((first, len(self.output_ids) - first))
        unscored = sorted({*self._unscored, *range(first, len(self.output_ids))})
        self._unscored.clear()
        if not kept and not unscored:
            return NOTHING_FORCED
        given = self.sampling.token_ids_logprob
        return ForcedRun(
            num_tokens=len(kept),
            token_ids=[token_id for token_id in kept if token_id is not None],
            scores={i: (self.output_ids[i], *given) for i in unscored}
            if self.sampling.return_logprob and self.failed is None
            else {},
        )

    def _forced(self) -> Iterator[int]:
        """Forced tokens, while whoever asks takes them one by one."""
        while self._forces and self._seam is None and self.matcher is not None:
            forced = [] if self.finished else self.matcher.forced_tokens()
            if not forced:
                return
            for token_id in forced:
                if self.finished:
                    return
                yield token_id
                if self.output_ids[-1:] != [token_id]:
                    break  # another was taken instead

    def push(self, row: RowResult) -> int | None:
        """Take the drawn token; the id to append to the sequence, or `None` when it ended the output."""
        if row.token_id is None or self.finished:
            return None
        return self._take(TokenLogprob(row.token_id, row.logprob, row.top, row.given))

    def _take(self, entry: TokenLogprob) -> int | None:
        """Go on with a token; its id when it stays in the sequence."""
        token_id = entry.token_id
        if token_id in self._ends:
            return self._take_end(entry)
        if self._seam is not None:
            return self._take_over(self._seam, entry)
        if self.matcher is not None and not self.matcher.accept(token_id):
            self.failed = (ConstraintDeadEnd.code, f"the constraint refused token {token_id}, which its mask allowed")
            self._end("stop", None)
            return None
        if self._steering is not None:
            left = self.max_new_tokens - len(self.output_ids) - 1
            if not self._steering.keeps(token_id, left):
                return self._take_instead(self._steering)
        return self._take_accepted(entry)

    def _take_over(self, seam: Seam, entry: TokenLogprob) -> int | None:
        """Go on with the token over the seam."""
        self._seam = None
        if not seam.accepts(entry.token_id, self.matcher):
            self.failed = (ConstraintDeadEnd.code, f"token {entry.token_id} does not begin with {seam.text!r}")
            self._end("stop", None)
            return None
        if self._steering is not None and not self._steering.restart(self.max_new_tokens - 1):
            entry = self._take_text_alone(seam, entry, self._steering)
        return self._take_accepted(entry)

    def _take_text_alone(self, seam: Seam, entry: TokenLogprob, steering: Steering) -> TokenLogprob:
        """What is taken over the seam where nothing fits behind `entry`: the text's own token, if that helps."""
        rest, left = seam.rests[entry.token_id], self.max_new_tokens - 1
        if rest is None or self.matcher is None:
            return entry
        self.matcher.rollback(1)
        if steering.restart(left):
            self._unscored.append(0)
            return TokenLogprob(seam.token_id, None)
        self.matcher.accept(rest)
        steering.restart(left)
        return entry

    def _take_instead(self, steering: Steering) -> int | None:
        """Go on with the token that leads to the end of the text; end the output where the text is complete."""
        token_id = steering.instead
        if token_id is None:  # complete as it is; no budget has ended what still had tokens
            self._end("length" if len(self.output_ids) + 1 >= self.max_new_tokens else "stop", None)
            return None
        self._unscored.append(len(self.output_ids))
        return self._take(TokenLogprob(token_id, None))

    def _take_accepted(self, entry: TokenLogprob) -> int:
        """Go on with a token that the constraint has accepted."""
        token_id = entry.token_id
        self._append(entry)
        if self.failed is not None:
            return token_id
        if self.decoder.finished_by is not None:
            self._end("stop", self.decoder.finished_by)
        elif self.matcher is not None and (reason := self.matcher.stop_reason()) is not StopReason.NOT_STOPPED:
            if reason in (StopReason.DEAD_END, StopReason.LIMIT):
                what = "allows nothing further" if reason is StopReason.DEAD_END else "hit a limit of its engine"
                self.failed = (ConstraintDeadEnd.code, f"the constraint {what} after {len(self.output_ids)} tokens")
            self._end("stop", None)
        elif len(self.output_ids) >= self.max_new_tokens:
            self._end("length", None)
        return token_id

    def _append(self, entry: TokenLogprob) -> None:
        self.output_ids.append(entry.token_id)
        if self._reasoning is not None:
            self._reasoning.push(entry.token_id)
        if self.sampling.return_logprob:
            self.logprobs.append(entry)
        if self.before_text is not None:
            self.before_text()
        if not self.decoder.has_stops:
            self._untold.append(entry.token_id)
            return
        try:
            self._new_text.append(self.decoder.push(entry.token_id))
        except ConstraintTooComplex as error:  # a stop pattern that takes too long
            self.failed = (error.code, str(error))
            self.finish = "stop"

    def _take_end(self, entry: TokenLogprob) -> int | None:
        """Take the token that ends the output; its id when it stays in the sequence."""
        token_id = entry.token_id
        is_eos = token_id in self._eos_ids
        if self.sampling.no_stop_trim:
            self._append(entry)
        if self.failed is None:
            self._end("stop", token_id)
        if not self.sampling.no_stop_trim:
            return None
        if is_eos and self.decoder.finished_by is None:
            self._before_eos = self.text.removesuffix(self._eos_text(token_id))
        return None if is_eos else token_id

    def _eos_text(self, token_id: int) -> str:
        if self.sampling.skip_special_tokens:
            return ""
        return self._tokenizer.token_bytes(token_id, skip_special_tokens=False).decode("utf-8", "replace")

    @property
    def text(self) -> str:
        """The output's text so far; once it has ended, all of it."""
        self._decode()
        return self.decoder.text

    def _decode(self) -> None:
        """Bring the text up to date with the tokens."""
        if self._untold:
            self._new_text.append(self.decoder.push_all(self._untold))
            self._untold.clear()

    def take_delta(self) -> tuple[str, tuple[int, ...]]:
        """Text that became final, and ids that were drawn, since the last call."""
        self._decode()
        text, ids = "".join(self._new_text), tuple(self.output_ids[self._num_taken :])
        self._new_text.clear()
        self._num_taken = len(self.output_ids)
        return text, ids

    def keep(self) -> Kept:
        """What of the output stays in the state."""
        text = self.text
        if self._before_eos is not None:
            return Kept(len(self.output_ids) - 1, self._seam_text + self._before_eos, "")
        if self.decoder.finished_by is None:
            return Kept(len(self.output_ids), self._seam_text + text, "")
        num_tokens, rest = self.decoder.tokens_for_text(len(text))
        if num_tokens == 0:
            return Kept(0, "", self._seam_text + rest)
        return Kept(num_tokens, self._seam_text + text[: len(text) - len(rest)], rest)

    def _end(self, finish: str, matched: str | int | None) -> None:
        self.finish = finish
        self.matched = matched
        self._decode()
        self._new_text.append(self.decoder.finish())
