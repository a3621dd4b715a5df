"""Trees of guesses: several ways in which a text may go on, checked in one step.

Owns `Tree`, which takes a chain and other proposals together, by what they have in common at the beginning, and
chooses the guesses most likely to be right. The drafter makes one for a row that other proposals are worth trying for.

A guess is as likely as everything on the way to it is right; so those that are chosen are connected, and a chain that
is surer than its branches stays alone. What a branch is worth (a way to go on beside a likelier one) is learned as a
kind of its own. Guesses are laid out branch by branch, likeliest first: where that one is right, nothing has to move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sgl.grammars.matcher import Matcher, StopReason
from sgl.runtime.sequence import Sampled
from sgl.runtime.speculation.control import Trust
from sgl.runtime.speculation.proposer import Proposal

BRANCH = "branch"
"""The source of a guess beside a likelier one."""
_MOST_LIKELY, _LEAST_LIKELY = 0.995, 0.01
_MOST_NODES = 64
"""As many as attention takes (`sgl.kernels.attention.MAX_TREE`)."""
_ROOT = -1


class Sent(NamedTuple):
    """One draft that was sent: its kind, and the chance that was given to it."""

    source: str
    strength: int
    chance: float


class Layout(NamedTuple):
    """Drafts in the order in which they are computed; `parents` as in `Chunk`."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    sent: list[Sent]


class _Node(NamedTuple):
    token_id: int
    parent: int
    depth: int
    chance: float  # that it and all before it are right
    sent: Sent


def bounded(chance: float) -> float:
    """A chance that neither success nor failure can make certain."""
    return min(_MOST_LIKELY, max(_LEAST_LIKELY, chance))


class Tree:
    """Ways in which the text of one row may go on.

    Args:
        token_ids, sent: the chain.
        longest: tokens of a way at most.
        bar: the chance from which on a guess pays.
        better: how much the row's guesses are better than everyone's.
    """

    def __init__(
        self, token_ids: Sequence[int], sent: Sequence[Sent], *, longest: int, bar: float, trust: Trust, better: float
    ) -> None:
        self._nodes: list[_Node] = []
        self._children: dict[int, dict[int, int]] = {_ROOT: {}}  # by token, the likeliest first
        self._longest = longest
        self._bar = bar
        self._trust = trust
        self._better = better
        at = _ROOT
        for token_id, each in zip(token_ids, sent, strict=True):
            at = self._append(at, token_id, each)

    def add(self, proposal: Proposal, generation: Sampled) -> None:
        """Another way, as far as it is likely enough."""
        at = _ROOT
        for i, token_id in enumerate(proposal.token_ids[: self._longest]):
            known = self._children[at].get(token_id)
            if known is not None:
                at = known
                continue
            source = BRANCH if self._children[at] else proposal.source
            strength = proposal.strength + i
            chance = self._trust.of(source, strength) + (self._better if source != BRANCH else 0.0)
            sent = Sent(source, strength, bounded(chance))
            if self._chance(at) * sent.chance <= self._bar or generation.ends_with(token_id):
                return
            at = self._append(at, token_id, sent)

    def lay_out(self, most: int, matcher: Matcher | None) -> Layout | None:
        """The `most` likeliest guesses, as far as the constraint takes them; `None` when they are a chain. The matcher
        is left as it was."""
        likeliest = sorted(range(len(self._nodes)), key=lambda i: -self._nodes[i].chance)
        kept = set(likeliest[: min(most, _MOST_NODES)])
        parents: list[int] = []
        places = {_ROOT: _ROOT}
        chosen: list[_Node] = []
        depth = 0  # of the matcher
        try:
            left = self._kept_children(_ROOT, kept)
            while left:
                index = left.pop()
                node = self._nodes[index]
                if matcher is not None:
                    if depth >= node.depth:
                        matcher.rollback(depth - node.depth + 1)
                        depth = node.depth - 1
                    if not matcher.accept(node.token_id):
                        continue
                    depth = node.depth
                places[index] = len(chosen)
                parents.append(places[node.parent])
                chosen.append(node)
                if matcher is None or matcher.stop_reason() is StopReason.NOT_STOPPED:
                    left += self._kept_children(index, kept)
        finally:
            if matcher is not None and depth:
                matcher.rollback(depth)
        if parents == list(range(-1, len(parents) - 1)):
            return None
        return Layout(tuple(node.token_id for node in chosen), tuple(parents), [node.sent for node in chosen])

    def _kept_children(self, index: int, kept: set[int]) -> list[int]:
        """The last is the likeliest."""
        return [child for child in reversed(self._children[index].values()) if child in kept]

    def _chance(self, index: int) -> float:
        return self._nodes[index].chance if index >= 0 else 1.0

    def _append(self, parent: int, token_id: int, sent: Sent) -> int:
        index = len(self._nodes)
        depth = self._nodes[parent].depth + 1 if parent >= 0 else 1
        self._nodes.append(_Node(token_id, parent, depth, self._chance(parent) * sent.chance, sent))
        self._children[parent][token_id] = index
        self._children[index] = {}
        return index
