"""The prefix cache: a radix tree from token ids to pages.

Owns every page that more than one sequence may read: pages enter by `extend` and leave by `evict`, `discard` or `drop`.
Does not own pages that one sequence alone uses, nor the free list. Only the scheduler calls it.

A node holds a run of tokens (a multiple of the page size) and its pages. A lock counts the sequences whose path goes
through a node; locked nodes are never evicted, and an ancestor is locked at least as often as each descendant.
Splitting a node keeps the lower part's identity, so that whoever locks a node still ends at the same token. Each
namespace (salt, adapter) has a root of its own: nothing is shared between namespaces.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

import numpy as np
import numpy.typing as npt

from sgl.errors import InternalError

Tokens = npt.NDArray[np.int32]


class RadixNode:
    """A run of tokens, the pages that hold their keys and values, and how many sequences stand on it."""

    __slots__ = ("children", "lock", "pages", "parent", "tokens", "touched")

    def __init__(self, tokens: Tokens, pages: Tokens, parent: RadixNode | None) -> None:
        self.tokens = tokens
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, RadixNode] = {}
        self.lock = 0
        self.touched = 0


class RadixTree:
    """Exact prefix matching in units of `page_size` tokens; at page size 1, to the token.

    Example:
        >>> tree = RadixTree()
        >>> ids = np.array([5, 6, 7], dtype=np.int32)
        >>> node, pages, spare = tree.extend(tree.root(), ids, np.array([0, 1, 2], dtype=np.int32))
        >>> tree.match(tree.root(), np.array([5, 6, 9], dtype=np.int32))[1].tolist()
        [0, 1]
        >>> tree.num_cached, tree.num_locked
        (3, 0)
    """

    def __init__(self, page_size: int = 1) -> None:
        self.page_size = page_size
        self.num_cached = 0
        self.num_locked = 0
        self._roots: dict[str, RadixNode] = {}
        self._num_nodes = 0
        self._clock = count(1)
        self._leaves: list[tuple[int, int, RadixNode]] = []
        self._order = count()

    def root(self, namespace: str = "") -> RadixNode:
        """Where the paths of `namespace` begin."""
        if namespace not in self._roots:
            empty = np.empty(0, dtype=np.int32)
            self._roots[namespace] = RadixNode(empty, empty, None)
        return self._roots[namespace]

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
            if same < self.page_size:
                break
        return node, np.concatenate(found) if found else np.empty(0, dtype=np.int32)

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
            child.touched = next(self._clock)
            node.children[self._key(rest)] = child
            self.num_cached += len(child.pages)
            self._num_nodes += 1
            node = child
            self._offer(node)
        return node, np.concatenate([known, pages[num_known:]]), spare

    def lock(self, node: RadixNode) -> None:
        """Keep everything from the root to `node`."""
        now = next(self._clock)
        walk: RadixNode | None = node
        while walk is not None:
            if walk.lock == 0:
                self.num_cached -= len(walk.pages)
                self.num_locked += len(walk.pages)
            walk.lock += 1
            walk.touched = now
            walk = walk.parent

    def unlock(self, node: RadixNode) -> None:
        """Undo one `lock` of the same node."""
        now = next(self._clock)
        walk: RadixNode | None = node
        while walk is not None:
            if walk.lock == 0:
                raise InternalError("a radix node was unlocked more often than locked")
            walk.lock -= 1
            walk.touched = now
            if walk.lock == 0:
                self.num_locked -= len(walk.pages)
                self.num_cached += len(walk.pages)
                self._offer(walk)
            walk = walk.parent

    def evict(self, num_pages: int) -> list[int]:
        """Drop unlocked leaves, least recently used first, until `num_pages` pages are free or none is left.

        A leaf larger than what is missing loses its tail only.
        """
        freed: list[int] = []
        while len(freed) < num_pages and self._leaves:
            touched, _, node = heapq.heappop(self._leaves)
            if touched != node.touched or not self._evictable(node):
                continue
            missing = num_pages - len(freed)
            if missing < len(node.pages):
                keep = len(node.pages) - missing
                freed.extend(node.pages[keep:].tolist())
                node.pages = node.pages[:keep]
                node.tokens = node.tokens[: keep * self.page_size]
                self.num_cached -= missing
                self._offer(node)
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

    def drop(self, namespace: str) -> list[int]:
        """Drop a namespace that no sequence uses; its pages."""
        root = self._roots.pop(namespace, None)
        freed: list[int] = []
        for node in self._below(root) if root is not None else ():
            if node.lock:
                raise InternalError(f"namespace {namespace!r} was dropped while in use")
            freed.extend(node.pages.tolist())
            self.num_cached -= len(node.pages)
            self._num_nodes -= 1
            node.parent = None
        return freed

    def nodes(self) -> Iterator[RadixNode]:
        """All nodes but the roots, for tests and pictures."""
        for root in self._roots.values():
            yield from self._below(root)

    def _below(self, root: RadixNode) -> Iterator[RadixNode]:
        stack = list(root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _evictable(self, node: RadixNode) -> bool:
        return node.lock == 0 and not node.children and node.parent is not None

    def _offer(self, node: RadixNode) -> None:
        """Note a leaf that may be evicted; an entry whose time is no longer the node's is void."""
        if self._evictable(node):
            heapq.heappush(self._leaves, (node.touched, next(self._order), node))
        if len(self._leaves) > 2 * self._num_nodes + 64:
            leaves = [leaf for leaf in self.nodes() if self._evictable(leaf)]
            self._leaves = [(leaf.touched, next(self._order), leaf) for leaf in leaves]
            heapq.heapify(self._leaves)

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
        upper.lock = node.lock
        upper.touched = node.touched
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
        length = min(len(left), len(right))
        differing = np.flatnonzero(left[:length] != right[:length])
        same = int(differing[0]) if len(differing) else length
        return same - same % self.page_size
