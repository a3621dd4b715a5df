"""What any prefix cache could have hit: offline optimum (Belady's MIN) and LRU over the same requests, by the token.

Owns the model of a prefix cache that the counters of `sgl bench program` are held against. Called with the accesses of
one run in order of admission (`sgl.bench.stepped` records them); pure, no engine, no clock.

The model. A token's keys and values depend on the whole prefix before it, so the things that are cached are the nodes
of a token trie, one token each, and a node can be hit only while all its ancestors are there. Requests are served one
after the other. Serving one needs all its tokens (prompt and computed output) in the cache together, so they may not
be evicted meanwhile; everything else may, down to `capacity` tokens in all. A hit is a prompt token that was there
before; the last prompt token is never one, because its logits have to be computed, and neither is an output token.

Why farthest-next-use is the optimum here. Between two uses of a token, the second one a possible hit, the token is
either kept all the time or not worth keeping; keeping it takes one slot at each request in between that does not use
it, and a request leaves `capacity - its own length` slots. So a set of hits is a set of intervals, all of weight one,
with a bound on how many cover each request. The largest such set is found from left to right: when a request leaves too
few slots, drop those intervals that end last (an exchange argument: any solution can swap the interval it drops here
for the one that ends later without losing a hit). That is eviction of the token whose next hit is farthest away. An
ancestor is used whenever its descendant is, so its next use is never later: with ties broken towards the deeper token,
only leaves are evicted, and the optimum without the prefix rule obeys the rule.

What it is, precisely: the exact maximum of hits in this model, except where a request uses, without being able to hit
it, a token that an earlier request had and that has descendants: an output that repeats cached tokens, or a prompt that
ends where another went on. Keeping the descendants then takes keeping that token for no hit of its own; the prefix rule
can cost hits that this bound still counts. Either way no policy hits more in the given order. An engine that runs
requests at the same time pins all their tokens at once, so it has less freedom than the model. (It may also finish them
in another order than it admitted them, which can gain single hits; that is the one way to be above the bound.)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from sgl.errors import InvalidParameter

Tokens = npt.NDArray[np.int32]

_NEVER = 1 << 60


class Access(msgspec.Struct, frozen=True):
    """One request as the cache sees it.

    Args:
        tokens: int32 `[length]`, all that is computed for it: prompt, then output but for its last token.
        num_reusable: leading tokens that may be hits: prompt length - 1, or 0 where hits are not counted.
        namespace: nothing is shared between two of these.
    """

    tokens: Tokens
    num_reusable: int
    namespace: str = ""


class _Segment:
    """Consecutive tokens that every access uses together or not at all."""

    __slots__ = ("children", "depth", "hits", "kept", "last", "parent", "tokens", "uses")

    def __init__(self, tokens: Tokens, parent: _Segment | None) -> None:
        self.tokens = tokens
        self.parent = parent
        self.children: dict[int, _Segment] = {}
        self.depth = 0
        self.uses: list[int] = []  # accesses, in order
        self.hits: list[bool] = []  # whether that use may be a hit
        self.kept = 0  # leading tokens in the simulated cache
        self.last = -1  # index into `uses` of the latest use


class PrefixTree:
    """The union of all accesses as a tree of segments.

    Args:
        accesses: in the order in which they are served.

    Raises:
        InvalidParameter: an access is empty, or has more reusable tokens than tokens.

    Example:
        >>> def ids(*values): return np.array(values, dtype=np.int32)
        >>> tree = PrefixTree([Access(ids(1, 2, 3), 2), Access(ids(7, 8), 1), Access(ids(1, 2, 4), 2)])
        >>> tree.num_tokens, tree.num_reusable, tree.longest
        (6, 5, 3)
        >>> tree.hits_forever(), tree.hits_belady(3), tree.hits_lru(3)
        (2, 1, 1)
    """

    def __init__(self, accesses: Sequence[Access]) -> None:
        self._roots: dict[str, _Segment] = {}
        self.num_reusable = 0
        self.longest = 0
        for index, access in enumerate(accesses):
            if not 0 <= access.num_reusable <= len(access.tokens) or len(access.tokens) == 0:
                raise InvalidParameter(
                    f"access {index} has {len(access.tokens)} tokens, {access.num_reusable} of them reusable; "
                    "expected at least one token and at most that many reusable ones",
                    param="accesses",
                )
            # Both ends become borders of segments.
            self._end(access.namespace, access.tokens[: access.num_reusable])
            self._end(access.namespace, access.tokens)
            self.num_reusable += access.num_reusable
            self.longest = max(self.longest, len(access.tokens))
        self._paths = [self._use(index, access) for index, access in enumerate(accesses)]
        self._segments = list({id(segment): segment for path in self._paths for segment in path}.values())
        self.num_tokens = sum(len(segment.tokens) for segment in self._segments)
        """Distinct tokens: what a cache that keeps everything ends up with."""

    def hits_forever(self) -> int:
        """Hits when nothing is ever evicted."""
        return sum(len(s.tokens) for s in self._segments for hit in s.hits[1:] if hit)

    def hits_belady(self, capacity: int) -> int:
        """Most hits that any policy can have with `capacity` tokens (see the module's text)."""
        return self._simulate(capacity, _next_hit)

    def hits_lru(self, capacity: int) -> int:
        """Hits of evicting the least recently used leaf first."""
        return self._simulate(capacity, _last_use)

    def _simulate(self, capacity: int, rank: Callable[[_Segment], int]) -> int:
        """Serve all accesses; when room is needed, the segment of the smallest rank goes, its end first."""
        if capacity < self.longest:
            raise InvalidParameter(
                f"capacity is {capacity}; one access alone needs {self.longest} tokens",
                hint="give the cache at least that much",
                param="capacity",
            )
        for segment in self._segments:
            segment.kept, segment.last = 0, -1
        queue: list[tuple[int, int, int, int, _Segment]] = []
        hits = used = 0
        for path in self._paths:
            for segment in path:
                segment.last += 1
                if segment.hits[segment.last]:
                    hits += segment.kept
                used += len(segment.tokens) - segment.kept
                segment.kept = len(segment.tokens)
            while used > capacity:
                entry = heapq.heappop(queue)
                last, segment = entry[2], entry[-1]
                if last != segment.last:
                    continue  # it has been used since, perhaps by this very access
                gone = min(segment.kept, used - capacity)
                segment.kept -= gone
                used -= gone
                if segment.kept:
                    heapq.heappush(queue, entry)
            for segment in path:
                heapq.heappush(queue, (rank(segment), -segment.depth, segment.last, id(segment), segment))
        return hits

    # --- building ---

    def _root(self, namespace: str) -> _Segment:
        if namespace not in self._roots:
            self._roots[namespace] = _Segment(np.empty(0, dtype=np.int32), None)
        return self._roots[namespace]

    def _end(self, namespace: str, tokens: Tokens) -> None:
        """Add a path and make a border of its end."""
        node = self._root(namespace)
        while len(tokens):
            child = node.children.get(int(tokens[0]))
            if child is None:
                node.children[int(tokens[0])] = _Segment(tokens, node)
                return
            same = _common(child.tokens, tokens)
            node = child if same == len(child.tokens) else _split(child, same)
            tokens = tokens[same:]

    def _use(self, index: int, access: Access) -> list[_Segment]:
        """Note the access on each segment of its path; the path."""
        node, path, length = self._root(access.namespace), [], 0
        while length < len(access.tokens):
            depth = node.depth
            node = node.children[int(access.tokens[length])]
            node.depth = depth + 1
            length += len(node.tokens)
            node.uses.append(index)
            node.hits.append(length <= access.num_reusable)
            path.append(node)
        return path


def _next_hit(segment: _Segment) -> int:
    """MIN: whoever is hit last, or never again, goes first."""
    following = segment.last + 1
    if following < len(segment.uses) and segment.hits[following]:
        return -segment.uses[following]
    return -_NEVER


def _last_use(segment: _Segment) -> int:
    """LRU: whoever was used longest ago goes first."""
    return segment.uses[segment.last]


def _common(left: Tokens, right: Tokens) -> int:
    length = min(len(left), len(right))
    differing = np.flatnonzero(left[:length] != right[:length])
    return int(differing[0]) if len(differing) else length


def _split(segment: _Segment, length: int) -> _Segment:
    """Cut a segment that nobody has used yet; the upper part."""
    parent = segment.parent
    if parent is None:
        raise InvalidParameter("the root has no tokens to split", param="segment")
    upper = _Segment(segment.tokens[:length], parent)
    parent.children[int(upper.tokens[0])] = upper
    segment.tokens = segment.tokens[length:]
    segment.parent = upper
    upper.children[int(segment.tokens[0])] = segment
    return upper
