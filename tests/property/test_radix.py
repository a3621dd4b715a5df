"""The radix tree against a plain dictionary of paths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from sgl.errors import InternalError
from sgl.runtime.cache_key import CacheKey
from sgl.runtime.pool import PagePool
from sgl.runtime.radix import RadixTree

POOL = 48
ids_of = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def array(values: list[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


class TreeMachine(RuleBasedStateMachine):
    """Walks of extend, match, lock, unlock, evict; `owner` says which prefix each page of the tree stands for."""

    locked = Bundle("locked")
    page_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(POOL)
        self.tree = RadixTree(self.page_size)
        self.owner: dict[int, tuple[int, ...]] = {}
        self.held: list[tuple[object, tuple[int, ...]]] = []

    def _free(self, pages: list[int]) -> None:
        self.pool.free(pages)
        for page in pages:
            self.owner.pop(page, None)

    @rule(ids=ids_of)
    def extend(self, ids: list[int]) -> None:
        ids = ids[: len(ids) - len(ids) % self.page_size]
        num_pages = len(ids) // self.page_size
        if self.pool.num_free < num_pages:
            self._free(self.tree.evict(num_pages - self.pool.num_free))
        if not ids or self.pool.num_free < num_pages:
            return
        own = self.pool.allocate(num_pages)
        _, pages, spare = self.tree.extend(self.tree.root(), array(ids), array(own))
        for i, page in enumerate(pages.tolist()):
            prefix = tuple(ids[: (i + 1) * self.page_size])
            assert self.owner.setdefault(page, prefix) == prefix
        self.pool.free(spare)
        assert set(own) - set(spare) <= set(pages.tolist())

    @rule(target=locked, ids=ids_of)
    def match_and_lock(self, ids: list[int]) -> object:
        node, pages = self.tree.match(self.tree.root(), array(ids))
        for i, page in enumerate(pages.tolist()):
            assert self.owner[page] == tuple(ids[: (i + 1) * self.page_size])
        known = {prefix for prefix in self.owner.values() if tuple(ids[: len(prefix)]) == prefix}
        assert len(pages) == len(known), "the longest cached prefix is found"
        self.tree.lock(node)
        entry = (node, tuple(ids[: len(pages) * self.page_size]))
        self.held.append(entry)
        return entry

    @rule(entry=locked)
    def unlock(self, entry: object) -> None:
        if entry in self.held:
            self.held.remove(entry)
            self.tree.unlock(entry[0])

    @rule(num_pages=st.integers(1, 20))
    def evict(self, num_pages: int) -> None:
        before = self.tree.num_cached
        freed = self.tree.evict(num_pages)
        assert len(freed) == min(num_pages, before)
        self._free(freed)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.pool.num_free + self.tree.num_cached + self.tree.num_locked == POOL
        pages = [page for node in self.tree.nodes() for page in node.pages.tolist()]
        assert sorted(pages) == sorted(self.owner)
        assert self.tree.num_locked == sum(len(node.pages) for node in self.tree.nodes() if node.lock)

    @invariant()
    def locked_paths_stay(self) -> None:
        for _, prefix in self.held:
            _, pages = self.tree.match(self.tree.root(), array(list(prefix)))
            assert len(pages) * self.page_size == len(prefix)


class PagedTreeMachine(TreeMachine):
    page_size = 3


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPagedTree = PagedTreeMachine.TestCase
TestPagedTree.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_pool_refuses_double_free() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(InternalError, match="freed while it was free"):
        pool.free(pages)


def test_least_recently_used_leaf_goes_first() -> None:
    tree = RadixTree()
    first, *_ = tree.extend(tree.root(), array([1, 1]), array([0, 1]))
    tree.extend(tree.root(), array([2, 2]), array([2, 3]))
    tree.lock(first)
    tree.unlock(first)
    assert sorted(tree.evict(2)) == [2, 3]


def test_the_queue_for_eviction_stays_small() -> None:
    tree = RadixTree()
    for _ in range(3):
        node, *_ = tree.extend(tree.root(), array([1]), array([0]))
        for _ in range(1000):
            tree.lock(node)
            tree.unlock(node)
    assert len(tree._leaves) < 200


def test_namespaces_share_nothing() -> None:
    tree = RadixTree()
    tree.extend(tree.root(CacheKey("a")), array([1, 2]), array([0, 1]))
    assert len(tree.match(tree.root(CacheKey("b")), array([1, 2]))[1]) == 0
    assert sorted(tree.drop(CacheKey("a"))) == [0, 1]
    assert tree.num_cached == 0
