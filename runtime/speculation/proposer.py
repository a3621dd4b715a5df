"""What a proposer of drafts is: something that guesses how a sequence goes on.

Owns the protocol and its values. A guess is never trusted: whatever a proposer says, the output is the same; a bad one
costs time. Proposers are asked by the drafter alone, on the engine core's thread, once or more per row and step, so
they must be fast: microseconds for one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from sgl.runtime.sequence import Request, Sampled


class Proposal(NamedTuple):
    """A guess.

    Args:
        token_ids: what comes next, in order.
        source: who says so; accepted and refused drafts are counted by it.
        strength: how much speaks for it, as a small number. What it is worth is learned, by source and strength.
        drawn_from: a float64 `[V]` for each token where it was drawn so, and is to be accepted by rejection sampling.
            Then what is sent of the guess must not depend on what the tokens are.
    """

    token_ids: Sequence[int]
    source: str
    strength: int = 0
    drawn_from: Sequence[Any] = ()


NOTHING = Proposal((), "")


class Proposer(Protocol):
    """Guesses how sequences go on."""

    def prepare(self, rows: Sequence[tuple[Request, Sampled]], num_drafts: int) -> None:
        """Rows that may be asked for next, all of a step: for who computes many at once."""

    def propose(self, request: Request, drafts: Sequence[int], room: int) -> Proposal:
        """At most `room` tokens that may come after the request's known tokens and `drafts`; none is an answer, too."""

    def branches(self, request: Request, room: int) -> Sequence[Proposal]:
        """Other ways in which the known tokens may go on, likeliest first, at most `room` tokens each. They may begin
        as what was proposed does, and as each other."""

    def ended(self, request: Request) -> None:
        """The request is over: what was kept for it alone may go."""
