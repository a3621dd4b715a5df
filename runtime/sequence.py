"""A token sequence and the work that is asked of it.

Owns `Sequence` (ids, page table, place in the radix tree) and `Request` (what to compute on a sequence and what came of
it). The scheduler alone changes pages, tree position and usage; the program run appends ids while no request is active.

Layout of a sequence:

    token_ids  |---- shared ----|-- own --|-- not computed --|
               0           num_shared  num_computed     len(token_ids)

`shared` tokens lie on pages of the radix tree (locked through `node`), `own` ones on pages of this sequence alone.
"""

from __future__ import annotations

import math
from collections import abc, deque
from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple, Protocol, TypeAlias

from sgl.grammars.matcher import Matcher
from sgl.lang.graph import Sampling, Usage
from sgl.runtime.cache_key import CacheKey
from sgl.runtime.page_table import PageTable
from sgl.runtime.plan import RowResult, SampleSpec
from sgl.runtime.radix import RadixNode


class Sequence:
    """Token ids with their place in the KV cache.

    Attributes:
        namespace: what besides the ids decides whether cached pages are its own.
        pages, node, num_shared, num_computed: its place, see above; `seen` is the node where it ended when it was
            looked up last.
        owner: knows when it is needed next; `priority`: the highest of its requests.
        forked_at: its length when it was forked from another; 0 when it was not.
        rested_at, next_use: the steps since when, and as far as is known until when, nothing is planned on it.
    """

    __slots__ = (
        "forked_at",
        "id",
        "namespace",
        "next_use",
        "node",
        "num_computed",
        "num_shared",
        "owner",
        "pages",
        "priority",
        "rested_at",
        "seen",
        "token_ids",
    )

    def __init__(self, id: int, namespace: CacheKey, token_ids: list[int] | None = None) -> None:
        self.id = id
        self.namespace = namespace
        self.token_ids = token_ids if token_ids is not None else []
        self.pages = PageTable()
        self.node: RadixNode | None = None
        self.seen: RadixNode | None = None
        self.num_shared = 0
        self.num_computed = 0
        self.owner: Owner | None = None
        self.priority = 0
        self.forked_at = 0
        self.rested_at = 0
        self.next_use = math.inf

    def __len__(self) -> int:
        return len(self.token_ids)


class Owner(Protocol):
    """What a sequence belongs to: `ProgramRun`."""

    def next_use(self, sequence: Sequence) -> float | None:
        """The step in which the sequence will be computed on; infinite when never, `None` when nobody knows."""


class ForcedRun(NamedTuple):
    """Output tokens that were taken without a draw: how many, the ids to append to the sequence (one that ended the
    output is not among them), and by index in the output the ids whose log-probabilities are still wanted."""

    num_tokens: int
    token_ids: list[int]
    scores: dict[int, tuple[int, ...]]


NOTHING_FORCED = ForcedRun(0, [], {})


class Sampled(Protocol):
    """What draws tokens for a request: `Generation`. `failed` is an error code and a reason."""

    failed: tuple[str, str] | None

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning among those taken so far."""

    @property
    def matcher(self) -> Matcher | None:
        """The constraint's state."""

    @property
    def num_left(self) -> int:
        """Most tokens that are still to come; 0 where drafts cannot be checked."""

    @property
    def output_ids(self) -> list[int]:
        """The tokens so far."""

    @property
    def num_kept(self) -> int:
        """Leading tokens of the output that stay in the state."""

    @property
    def matched(self) -> str | int | None:
        """The stop or id that ended the output, if one did."""

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn, and what ends them."""

    def ends_with(self, token_id: int) -> bool:
        """Whether a token would end the output, as far as the token alone tells."""

    def spec(self, drafts: abc.Sequence[int] = ()) -> SampleSpec:
        """How to draw the next token, or the one behind `drafts` if they turn out to be the next ones."""

    def push(self, row: RowResult) -> int | None:
        """Take the drawn token; the id to append to the sequence, or `None` when the generation ended without it."""

    def force(self) -> ForcedRun:
        """Take the tokens that must come next."""

    @property
    def finished(self) -> bool:
        """Whether nothing more is to be drawn."""

    @property
    def ends_next(self) -> bool:
        """Whether the next token is the last, whatever it is."""


Following: TypeAlias = Callable[[], abc.Sequence[int]]
"""Token ids that a program appends when a generation ends, up to its next one; empty when nobody knows."""


class ProgramInfo:
    """What the scheduler and the trace know of a program: its number (older ones are smaller), and whether a step has
    computed anything of it."""

    __slots__ = ("name", "number", "started")

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.started = False


class Request:
    """Compute a sequence to its end and then sample, or return log-probabilities.

    Attributes:
        program, branch, node, label: what it belongs to, for scheduling and traces.
        path_len: tokens from here to the end of its branch's longest path, as far as the graph is known.
        following: tells what its program writes behind its output, as far as that is known.
        arrival: its number in the order in which requests were queued; `running`: it was admitted, and not put back.
        queued_at, first_at: when it was queued, and had its first output token, on the engine's clock; 0 before.

    Args:
        sequence: what to compute; its ids at this moment are the prompt.
        priority: larger runs earlier.
        generation: draws tokens after the prompt; `None` computes the prompt only.
        scores: position -> ids whose log-probabilities are wanted after the token there, and with each those of the
            `top` most probable ones.
        new_tokens: most tokens that will be appended.
        score_only: an option of a select: only what it computes itself counts as its prompt.
        option: number of the option whose unconditional score this is.
    """

    def __init__(
        self,
        sequence: Sequence,
        *,
        generation: Sampled | None = None,
        scores: dict[int, tuple[int, ...]] | None = None,
        top: int = 0,
        new_tokens: int = 0,
        priority: int = 0,
        score_only: bool = False,
        option: int | None = None,
    ) -> None:
        self.sequence = sequence
        self.generation = generation
        self.scores = scores or {}
        self.top = top
        self.new_tokens = new_tokens
        self.priority = priority
        self.score_only = score_only
        self.option = option
        self.program: ProgramInfo | None = None
        self.branch = 0
        self.node = 0
        self.label = ""
        self.path_len = new_tokens
        self.arrival = 0
        self.running = False
        self.prompt_len = len(sequence)
        self.accounted = 0
        self.logprobs: dict[int, tuple[float, ...]] = {}
        self.tops: dict[int, tuple[tuple[int, float], ...]] = {}
        self._unscored = deque(sorted(self.scores))
        self.failed: tuple[str, str] | None = None
        self.queued = False
        self.queued_at = 0.0
        self.first_at = 0.0
        self.last_step = 0
        self.done = False
        self.following: Following | None = None
        self.cached_tokens = 0
        self.prefill_tokens = 0
        self.completion_tokens = 0
        self.forced_tokens = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.recomputed_tokens = 0

    @property
    def reusable_len(self) -> int:
        """Most tokens that may be taken from the cache: what is computed to get its logits may not be."""
        return min(len(self.sequence) - 1, self._unscored[0]) if self._unscored else len(self.sequence) - 1

    @property
    def decodes(self) -> bool:
        """Whether all that is left to compute is the token drawn last: the prompt is behind it."""
        sequence = self.sequence
        return sequence.num_computed == len(sequence.token_ids) - 1 >= self.prompt_len and not self._unscored

    @property
    def has_scores_left(self) -> bool:
        """Whether log-probabilities are still to come."""
        return bool(self._unscored)

    def unscored(self, start: int, end: int) -> list[int]:
        """Positions from `start` to `end` whose log-probabilities are still to come."""
        return [position for position in takewhile(lambda p: p < end, self._unscored) if position >= start]

    def take_scores(self, position: int, values: tuple[float, ...], top: tuple[tuple[int, float], ...]) -> None:
        """The log-probabilities after the token at `position`."""
        self.logprobs[position] = values
        if top:
            self.tops[position] = top
        while self._unscored and self._unscored[0] in self.logprobs:
            self._unscored.popleft()

    def take_forced(self, run: ForcedRun) -> None:
        """Append what was forced: the next chunk computes it with what stands before it, and its log-probabilities."""
        self.completion_tokens += run.num_tokens
        self.forced_tokens += run.num_tokens
        self.sequence.token_ids.extend(run.token_ids)
        for index, token_ids in run.scores.items():
            position = self.prompt_len + index - 1  # the position before predicts it
            self.scores[position] = token_ids
            self._unscored.append(position)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to compute, draw or score."""
        drawn = self.generation is None or self.generation.finished
        return drawn and not self._unscored and self.sequence.num_computed >= self.prompt_len

    def account_found(self, start: int, end: int) -> None:
        """Positions `start .. end` were found in the cache."""
        if not self.score_only:
            self.cached_tokens += max(0, min(end, self.prompt_len) - max(start, self.accounted))
        self.accounted = max(self.accounted, end)

    def account_computed(self, start: int, end: int) -> None:
        """Positions `start .. end` are computed by this step."""
        self.recomputed_tokens += max(0, min(end, self.accounted) - start)
        self.prefill_tokens += max(0, min(end, self.prompt_len) - max(start, self.accounted))
        self.accounted = max(self.accounted, end)

    def take_back(self, start: int) -> None:
        """The output token at `start` is computed for nothing: it counts as if it had not been planned."""
        self.accounted = min(self.accounted, start)

    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(
            prompt_tokens=self.cached_tokens + self.prefill_tokens,
            cached_tokens=self.cached_tokens,
            prefill_tokens=self.prefill_tokens,
            completion_tokens=self.completion_tokens,
            forced_tokens=self.forced_tokens,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            reasoning_tokens=self.generation.num_reasoning_tokens if self.generation is not None else 0,
            scored_tokens=self.prefill_tokens if self.score_only else 0,
            recomputed_tokens=self.recomputed_tokens,
        )
