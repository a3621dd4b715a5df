"""The prefix cache: a radix tree from token ids to pages.

Owns every page that more than one sequence may read: pages enter by `extend` and leave by `evict`, `discard` or `drop`.
Does not own pages that one sequence alone uses, nor the free list, nor the order of eviction (a policy ranks, see
`sgl.runtime.eviction`). Only `paging` and `pins` call it.

A node holds a run of tokens (a multiple of the page size) and its pages. A lock counts the sequences whose path goes
through a node; locked nodes are never evicted, and an ancestor is locked at least as often as each descendant. A pin
is a lock that outlives sequences and is counted against a budget. Splitting a node keeps the lower part's identity, so
that whoever locks a node still ends at the same token. Each `CacheKey` has a root of its own: nothing is shared between
keys. Tokens are compared one by one; children are found by the ids of their first page, not by a hash of them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from itertools import count, islice

import numpy as np
import numpy.typing as npt

from sgl.errors import InternalError
from sgl.runtime.cache_key import CacheKey
from sgl.runtime.eviction import EvictionPolicy, Lru, Rank

Tokens = npt.NDArray[np.int32]

_NO_KEY = CacheKey()
_MOST_SIBLINGS = 64
"""Children that are compared in search of a page with a common beginning; the newest are looked at first."""


class RadixNode:
    """A run of tokens, the pages that hold their keys and values, and what the policies know of them.

    Attributes:
        end: tokens on the path from the root to the end of this node.
        reach: the farthest `end` to which a sequence through this node got, even if that part is evicted by now.
        lock, pins: sequences (and pins) whose path goes through here; `pins` is the part of them that are pins.
        touched, created: ticks of the last use, and of the computation.
        hits: later requests that found it.
        priority: the highest of the requests that used it.
        next_use: the step in which a submitted graph is expected to need it; infinite when none is known to.
        dead: a released state left it, and nobody found it since.
    """

    __slots__ = (
        "children",
        "created",
        "dead",
        "end",
        "hits",
        "lock",
        "next_use",
        "pages",
        "parent",
        "pins",
        "priority",
        "reach",
        "stamp",
        "tokens",
        "touched",
    )

    def __init__(self, tokens: Tokens, pages: Tokens, parent: RadixNode | None) -> None:
        self.tokens = tokens
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, RadixNode] = {}
        self.end: int = len(tokens) + (parent.end if parent is not None else 0)
        self.reach = self.end
        self.lock = 0
        self.pins = 0
        self.touched = 0
        self.created = 0
        self.hits = 0
        self.priority = 0
        self.next_use = math.inf
        self.dead = False
        self.stamp = -1  # of its valid entry in the queue for eviction


class RadixTree:
    """Exact prefix matching in units of `page_size` tokens; at page size 1, to the token.

    Args:
        page_size: tokens per page.
        policy: the order of eviction.

    Example:
        >>> tree = RadixTree()
        >>> ids = np.array([5, 6, 7], dtype=np.int32)
        >>> node, pages, spare = tree.extend(tree.root(), ids, np.array([0, 1, 2], dtype=np.int32))
        >>> tree.match(tree.root(), np.array([5, 6, 9], dtype=np.int32))[1].tolist()
        [0, 1]
        >>> tree.num_cached, tree.num_locked
        (3, 0)
    """

    def __init__(self, page_size: int = 1, policy: EvictionPolicy | None = None) -> None:
        self.page_size = page_size
        self.policy = policy if policy is not None else Lru()
        self.num_cached = 0
        self.num_locked = 0
        self.num_pinned = 0
        self._roots: dict[CacheKey, RadixNode] = {}
        self._num_nodes = 0
        self._clock = count(1)
        self._stamps = count()
        self._leaves: list[tuple[Rank, int, RadixNode]] = []
        self._expected: list[RadixNode] = []

    # --- paths ---

    def root(self, key: CacheKey = _NO_KEY) -> RadixNode:
        """Where the paths of `key` begin. Valid until the next call that gives pages up, unless it is locked."""
        root = self._roots.get(key)
        if root is None:
            if len(self._roots) > 2 * self._num_nodes + 64:
                self._roots = {key: root for key, root in self._roots.items() if root.children or root.lock}
            empty = np.empty(0, dtype=np.int32)
            root = self._roots[key] = RadixNode(empty, empty, None)
        return root

    def holds(self, node: RadixNode) -> bool:
        """Whether `node` is in the tree still; a root counts as gone once it is empty."""
        return node.parent is not None or bool(node.children)

    def match(self, start: RadixNode, tokens: Tokens) -> tuple[RadixNode, Tokens]:
        """The longest path below `start` that `tokens` begins with, in whole pages.

        Returns:
            The node where the match ends (split there if it ended inside) and the pages of the matched tokens.
        """
        node = start
        found: list[Tokens] = []
        while len(tokens) >= self.page_size:
            child = node.children.get(self._key(tokens))
            if child is None:
                break
            same = self._common(child.tokens, tokens)
            if same < len(child.tokens):
                child = self._split(child, same)
            found.append(child.pages)
            tokens = tokens[same:]
            node = child
        return node, np.concatenate(found) if found else np.empty(0, dtype=np.int32)

    def goes_on(self, node: RadixNode, page_tokens: Tokens) -> bool:
        """Whether a path from `node` goes on with the page of these tokens."""
        return page_tokens.tobytes() in node.children

    def similar(self, node: RadixNode, tokens: Tokens) -> tuple[int, int]:
        """The page right below `node` that shares most of its beginning with `tokens`, and how many tokens.

        For copying part of a page; `(-1, 0)` when no page begins alike. Looks at the newest children only.
        """
        best, most = -1, 0
        for child in islice(reversed(node.children.values()), _MOST_SIBLINGS):
            same = _common_len(child.tokens[: self.page_size], tokens)
            if same > most:
                best, most = int(child.pages[0]), same
        return best, most

    def extend(self, start: RadixNode, tokens: Tokens, pages: Tokens) -> tuple[RadixNode, Tokens, list[int]]:
        """Add `tokens` (whole pages) below `start`; `pages` hold them.

        Where the tree has some of them already, its pages are the canonical ones.

        Returns:
            The node where `tokens` end, the canonical pages, and those of `pages` that the caller must free.
        """
        node, known = self.match(start, tokens)
        num_known = len(known)
        spare = [int(page) for page, kept in zip(pages[:num_known], known, strict=True) if page != kept]
        rest = tokens[num_known * self.page_size :]
        if len(rest):
            child = RadixNode(rest.copy(), pages[num_known:].copy(), node)
            child.touched = child.created = next(self._clock)
            node.children[self._key(rest)] = child
            self.num_cached += len(child.pages)
            self._num_nodes += 1
            node = child
            self._offer(node)
        return node, np.concatenate([known, pages[num_known:]]), spare

    # --- use ---

    def lock(self, node: RadixNode, priority: int = 0) -> None:
        """Keep everything from the root to `node`, for a request of `priority`."""
        now = next(self._clock)
        end = node.end
        for walk in _path(node):
            if walk.lock == 0:
                self.num_cached -= len(walk.pages)
                self.num_locked += len(walk.pages)
            walk.lock += 1
            walk.touched = now
            walk.reach = max(walk.reach, end)
            walk.priority = max(walk.priority, priority)

    def unlock(self, node: RadixNode) -> None:
        """Undo one `lock` of the same node."""
        now = next(self._clock)
        for walk in _path(node):
            if walk.lock == 0:
                raise InternalError("a radix node was unlocked more often than locked")
            walk.lock -= 1
            walk.touched = now
            if walk.lock == 0:
                self.num_locked -= len(walk.pages)
                self.num_cached += len(walk.pages)
                self._offer(walk)

    def pin(self, node: RadixNode) -> None:
        """Lock `node` for longer than a sequence lives."""
        self.lock(node)
        for walk in _path(node):
            if walk.pins == 0:
                self.num_pinned += len(walk.pages)
            walk.pins += 1

    def unpin(self, node: RadixNode) -> None:
        """Undo one `pin` of the same node."""
        for walk in _path(node):
            if walk.pins == 0:
                raise InternalError("a radix node was unpinned more often than pinned")
            walk.pins -= 1
            if walk.pins == 0:
                self.num_pinned -= len(walk.pages)
        self.unlock(node)

    def pinned_pages(self, key: CacheKey, tokens: Tokens) -> int:
        """How many pages at the beginning of `tokens` are pinned."""
        node, pages = self.root(key), 0
        while (child := node.children.get(self._key(tokens))) is not None and child.pins:
            same = self._common(child.tokens, tokens)
            pages += same // self.page_size
            if same < len(child.tokens):
                break
            node, tokens = child, tokens[same:]
        return pages

    def hit(self, node: RadixNode, start: RadixNode | None) -> None:
        """A later request found the nodes below `start`, down to `node`."""
        for walk in _path(node):
            if walk is start:
                break
            walk.hits += 1
            walk.dead = False

    def retire(self, node: RadixNode, num_tokens: int) -> None:
        """Nobody is expected to use what lies behind the first `num_tokens` tokens of the path to `node` again."""
        kept = -(-num_tokens // self.page_size) * self.page_size
        below: RadixNode | None = None
        while node.parent is not None and node.end > kept and not node.lock and not node.hits:
            if any(child is not below for child in node.children.values()):
                return  # another path goes on from here
            start = node.end - len(node.tokens)
            if start < kept:
                self._split(node, kept - start)
            node.dead = True
            self._offer(node)
            below, node = node, node.parent

    def expect(self, uses: Iterable[tuple[float, RadixNode]]) -> None:
        """Replace what is known of the future: (step, node) says that the path to `node` is needed in `step`."""
        changed = self._expected
        for node in changed:
            node.next_use = math.inf
        self._expected = []
        for step, node in sorted(uses, key=lambda use: use[0]):
            self._mark(node, step)
        for node in (*changed, *self._expected):
            self._offer(node)

    def expect_also(self, node: RadixNode, step: float) -> None:
        """Add to what is known of the future."""
        known = len(self._expected)
        self._mark(node, step)
        for changed in self._expected[known:]:
            self._offer(changed)

    def _mark(self, node: RadixNode, step: float) -> None:
        for walk in _path(node):
            if walk.next_use <= step:
                break  # and so are all above
            walk.next_use = step
            self._expected.append(walk)

    # --- giving pages up ---

    def evict(self, num_pages: int, not_before: float = -math.inf) -> list[int]:
        """Drop unlocked leaves in the policy's order until `num_pages` pages are free or none is left.

        A leaf larger than what is missing loses its tail only.

        Args:
            not_before: stop at leaves that are expected to be used before this step.
        """
        freed: list[int] = []
        while len(freed) < num_pages and self._leaves:
            entry = heapq.heappop(self._leaves)
            _, stamp, node = entry
            if stamp != node.stamp or not self._evictable(node):
                continue
            if node.next_use < not_before:
                heapq.heappush(self._leaves, entry)
                break
            missing = min(num_pages - len(freed), self.policy.portion(node))
            if missing < len(node.pages):
                freed.extend(self._trim(node, missing))
            else:
                freed.extend(self._remove(node))
        return freed

    def discard(self, node: RadixNode, num_tokens: int) -> list[int]:
        """Drop up to `num_tokens` tokens at the end of the path to `node`, as far as nobody uses them; their pages."""
        freed: list[int] = []
        while num_tokens > 0 and self._evictable(node):
            parent = node.parent
            num_tokens -= len(node.tokens)
            freed.extend(self._remove(node))
            if parent is None:
                break
            node = parent
        return freed

    def drop(self, key: CacheKey) -> list[int]:
        """Drop everything of a key that no sequence uses; its pages."""
        root = self._roots.pop(key, None)
        freed: list[int] = []
        for node in self._below(root) if root is not None else ():
            if node.lock:
                raise InternalError(f"{key} was dropped while in use")
            freed.extend(node.pages.tolist())
            self.num_cached -= len(node.pages)
            self._num_nodes -= 1
            node.parent = None
            node.children = {}
        return freed

    def nodes(self) -> Iterator[RadixNode]:
        """All nodes but the roots, for tests and pictures."""
        for root in self._roots.values():
            yield from self._below(root)

    # --- inside ---

    def _below(self, root: RadixNode) -> Iterator[RadixNode]:
        stack = list(root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _evictable(self, node: RadixNode) -> bool:
        return node.lock == 0 and not node.children and node.parent is not None

    def _offer(self, node: RadixNode) -> None:
        """Queue a leaf that may be evicted, by its rank of now; an entry without the node's newest stamp is void."""
        if self._evictable(node):
            node.stamp = next(self._stamps)
            heapq.heappush(self._leaves, (self.policy.rank(node), node.stamp, node))
        if len(self._leaves) > 2 * self._num_nodes + 64:
            self._leaves = [e for e in self._leaves if e[1] == e[2].stamp and self._evictable(e[2])]
            heapq.heapify(self._leaves)

    def _trim(self, node: RadixNode, num_pages: int) -> list[int]:
        """Take pages off the end of a leaf."""
        keep = len(node.pages) - num_pages
        freed: list[int] = node.pages[keep:].tolist()
        node.end -= len(node.tokens) - keep * self.page_size
        node.pages = node.pages[:keep]
        node.tokens = node.tokens[: keep * self.page_size]
        self.num_cached -= num_pages
        self._offer(node)
        return freed

    def _remove(self, node: RadixNode) -> list[int]:
        parent = node.parent
        if parent is None:
            raise InternalError("the root of the radix tree cannot be removed")
        del parent.children[self._key(node.tokens)]
        node.parent = None
        self._num_nodes -= 1
        self.num_cached -= len(node.pages)
        self._offer(parent)
        pages: list[int] = node.pages.tolist()
        return pages

    def _split(self, node: RadixNode, num_tokens: int) -> RadixNode:
        """Cut `node` after `num_tokens`; the new upper part. The lower part stays the same object."""
        parent = node.parent
        if parent is None:
            raise InternalError("the root of the radix tree cannot be split")
        num_pages = num_tokens // self.page_size
        upper = RadixNode(node.tokens[:num_tokens], node.pages[:num_pages], parent)
        for name in ("lock", "pins", "touched", "created", "hits", "priority", "reach", "next_use", "dead"):
            setattr(upper, name, getattr(node, name))
        if upper.next_use < math.inf:
            self._expected.append(upper)
        parent.children[self._key(node.tokens)] = upper
        node.tokens = node.tokens[num_tokens:]
        node.pages = node.pages[num_pages:]
        node.parent = upper
        self._num_nodes += 1
        upper.children[self._key(node.tokens)] = node
        return upper

    def _key(self, tokens: Tokens) -> bytes:
        return tokens[: self.page_size].tobytes()

    def _common(self, left: Tokens, right: Tokens) -> int:
        """Length of the common beginning, rounded down to whole pages."""
        same = _common_len(left, right)
        return same - same % self.page_size


def _path(node: RadixNode) -> Iterator[RadixNode]:
    """`node`, its parent, and so on to the root."""
    walk: RadixNode | None = node
    while walk is not None:
        yield walk
        walk = walk.parent


def _common_len(left: Tokens, right: Tokens) -> int:
    length = min(len(left), len(right))
    differing = np.flatnonzero(left[:length] != right[:length])
    return int(differing[0]) if len(differing) else length
