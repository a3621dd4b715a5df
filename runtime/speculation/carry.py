"""Generations that begin behind the end of another one, in the same step.

Owns what a step has computed behind the end of generations: drafts that nobody drew after yet (`Tail`). When the
program then goes on as was guessed, the next generation's prompt stands among them: its keys and values are there, and
so are the logits after it. So it draws without a forward, and what it draws may agree with further drafts, up to its
own end and the next literal. A chain of generations and literals that was guessed right is one step.

The scheduler leaves tails while it processes a step, tells of requests that are queued, and asks for what goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from sgl.runtime.plan import Chunk
from sgl.runtime.sequence import Request, Sampled


class Tail(NamedTuple):
    """What is left of a chunk.

    Args:
        chunk: whose generation ended before its drafts did.
        rows: the step's row of logits for each of its `logit_offsets`.
        end: of the sequence, as far as drafts were counted as right.
    """

    chunk: Chunk
    rows: Sequence[int]
    end: int


class Tails:
    """The tails of the step that was processed last, and the requests that came on their sequences since."""

    def __init__(self) -> None:
        self._tails: dict[int, Tail] = {}
        self._begun: dict[int, Request] = {}

    def clear(self) -> None:
        """Another step begins."""
        self._tails.clear()
        self._begun.clear()

    def leave(self, tail: Tail) -> None:
        """A generation has ended before its drafts."""
        self._tails[tail.chunk.sequence] = tail

    def came(self, request: Request) -> None:
        """A request was queued."""
        if request.sequence.id in self._tails:
            self._begun[request.sequence.id] = request

    def take(self) -> Iterator[tuple[Request, Tail]]:
        """The requests that begin within a tail, each with it; afterwards there are neither."""
        for id, request in list(self._begun.items()):
            tail = self._tails[id]
            if not request.done and _last_place(request, tail) is not None:
                yield request, tail
        self.clear()


def goes_on(request: Request, generation: Sampled, tail: Tail) -> tuple[Chunk, list[int]]:
    """The chunk that draws after the last token of a request which begins within `tail`, with what is left of the
    drafts; and the rows of its logits."""
    old, token_ids = tail.chunk, request.sequence.token_ids
    place = len(token_ids) - 1 - old.start
    offsets = old.logit_offsets
    drafts = tuple(old.token_ids[place + 1 :])
    num_checks = 0
    while num_checks < min(len(drafts), generation.num_left - 1) and place + num_checks + 1 in offsets:
        num_checks += 1
    num_ahead = 0
    while num_ahead < len(drafts) and len(old.token_ids) - 1 - num_ahead in offsets:
        num_ahead += 1
    chunk = msgspec.structs.replace(
        old,
        token_ids=old.token_ids[place:],
        start=len(token_ids) - 1,
        sample=generation.spec(),
        scores=(),
        num_drafts=len(drafts),
        checks=tuple(generation.spec(drafts[: i + 1]) for i in range(num_checks)),
        num_ahead=num_ahead,
        proposed=None,
    )
    return chunk, [tail.rows[offsets.index(place + offset)] for offset in chunk.logit_offsets]


def _last_place(request: Request, tail: Tail) -> int | None:
    """Where in the tail's chunk the last token of a request stands, if all its tokens are the chunk's and there are
    logits after it."""
    chunk, token_ids = tail.chunk, request.sequence.token_ids
    place = len(token_ids) - 1 - chunk.start
    generation = request.generation
    if generation is None or generation.finished or request.has_scores_left or request.scores:
        return None
    if place not in chunk.logit_offsets or token_ids[chunk.start :] != chunk.token_ids[: place + 1]:
        return None
    return place
