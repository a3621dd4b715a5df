"""Guesses from the program: what it writes behind a generation, for the place where that ends.

Owns `Endings`, how long the generations of each node of a program were, and `Literals`, what is known to follow those
that run. The drafter asks both: where a generation is likely to end, what follows is the draft. Nothing has to be
guessed of it but the place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

from sgl.runtime.cache_key import CacheKey
from sgl.runtime.sequence import Request

_Node: TypeAlias = tuple[CacheKey, str, int]
_LONGEST = 64
"""Ends behind more tokens are counted together."""
_MOST_NODES = 4096
_PRIOR_ENDS, _PRIOR_TOKENS = 1.0, 8.0
"""What is believed of a node that nobody has seen: one end in so many tokens."""
_WEIGHT = 2.0
"""Of the average of all places, beside what is known of a place."""


class _Lengths:
    """Of one node: how many generations ended at each length, and how many got there."""

    __slots__ = ("ended", "num_ends", "num_tokens", "reached")

    def __init__(self) -> None:
        self.ended = [0] * (_LONGEST + 1)
        self.reached = [0] * (_LONGEST + 1)
        self.num_ends = _PRIOR_ENDS
        self.num_tokens = _PRIOR_TOKENS

    def add(self, length: int, *, ended: bool) -> None:
        for place in range(min(length, _LONGEST) + 1):
            self.reached[place] += 1
        self.ended[min(length, _LONGEST)] += ended
        self.num_ends += ended
        self.num_tokens += length + 1

    def chance(self, length: int) -> float:
        place = min(length, _LONGEST)
        average = self.num_ends / self.num_tokens
        return (self.ended[place] + _WEIGHT * average) / (self.reached[place] + _WEIGHT)


class Endings:
    """The chance that a generation ends at its next token, from others of the same node of the same program.

    Example:
        >>> endings = Endings()
        >>> for length in (3, 3, 3):
        ...     endings.add(("", "form", 4), length)
        >>> endings.chance(("", "form", 4), 3) > 0.6 > 0.2 > endings.chance(("", "form", 4), 2)
        True
    """

    def __init__(self) -> None:
        self._nodes: OrderedDict[object, _Lengths] = OrderedDict()

    def add(self, node: object, length: int, *, ended: bool = True) -> None:
        """A generation of `node` had `length` tokens when it ended, or was ended by its limit."""
        lengths = self._nodes.get(node)
        if lengths is None:
            lengths = self._nodes[node] = _Lengths()
            if len(self._nodes) > _MOST_NODES:
                self._nodes.popitem(last=False)
        lengths.add(length, ended=ended)
        self._nodes.move_to_end(node)

    def chance(self, node: object, length: int) -> float:
        """That one which has `length` tokens ends now."""
        lengths = self._nodes.get(node)
        return _PRIOR_ENDS / _PRIOR_TOKENS if lengths is None else lengths.chance(length)


class Literals:
    """What programs write behind the generations that run, looked up once for each."""

    def __init__(self) -> None:
        self._known: dict[int, Sequence[int]] = {}  # by sequence

    def of(self, request: Request) -> Sequence[int]:
        """The ids that follow `request` when it ends."""
        id = request.sequence.id
        if id not in self._known:
            self._known[id] = request.following() if request.following is not None else ()
        return self._known[id]

    def forget(self, request: Request) -> None:
        """The request is over."""
        self._known.pop(request.sequence.id, None)


def node_of(request: Request) -> _Node:
    """Which node of which program a request belongs to, for whatever has the same cache key."""
    return request.sequence.namespace, request.program.name if request.program is not None else "", request.node
