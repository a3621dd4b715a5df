"""The radix tree and the page pool against plain dictionaries, with every eviction policy and page size."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from support.machines import walks

from sgl.errors import InternalError
from sgl.runtime.cache_key import CacheKey
from sgl.runtime.eviction import POLICIES, make_policy
from sgl.runtime.pool import PagePool
from sgl.runtime.radix import RadixNode, RadixTree

POOL = 48
TLRU = {"threshold": 6, "next_prompt_estimate": 2}
# A path is a list of blocks, each as long as a page; blocks of different numbers differ in their last token only.
blocks_of = st.lists(st.integers(0, 2), min_size=1, max_size=8)
keys = st.sampled_from([CacheKey(), CacheKey(salt="a")])


def array(values: list[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


class TreeMachine(RuleBasedStateMachine):
    """Walks of extend, match, lock, pin, expect, retire, evict, discard; `owner` says what each page stands for."""

    locked = Bundle("locked")

    def __init__(self) -> None:
        super().__init__()
        self.owner: dict[int, tuple[CacheKey, tuple[int, ...]]] = {}
        self.held: list[tuple[RadixNode, CacheKey, tuple[int, ...]]] = []
        self.pinned: list[tuple[RadixNode, CacheKey, tuple[int, ...]]] = []

    @initialize(page_size=st.sampled_from([1, 16, 64]), policy=st.sampled_from(list(POLICIES)))
    def start(self, page_size: int, policy: str) -> None:
        self.page_size = page_size
        self.pool = PagePool(POOL)
        self.tree = RadixTree(page_size, make_policy(policy, TLRU if policy == "tlru" else None))

    def _ids(self, blocks: list[int], tail: int = 0) -> np.ndarray:
        size = self.page_size
        return array([id for block in blocks for id in [7] * (size - 1) + [block]] + [7] * min(tail, size - 1))

    def _free(self, pages: list[int]) -> None:
        self.pool.free(pages)
        for page in pages:
            del self.owner[page]

    @rule(key=keys, blocks=blocks_of)
    def extend(self, key: CacheKey, blocks: list[int]) -> None:
        if self.pool.num_free < len(blocks):
            self._free(self.tree.evict(len(blocks) - self.pool.num_free))
        if self.pool.num_free < len(blocks):
            return
        own = self.pool.allocate(len(blocks))
        node, pages, spare = self.tree.extend(self.tree.root(key), self._ids(blocks), array(own))
        assert node.end == len(blocks) * self.page_size
        for i, page in enumerate(pages.tolist()):
            path = (key, tuple(blocks[: i + 1]))
            assert self.owner.setdefault(page, path) == path, "the canonical page is that of the path"
        self.pool.free(spare)
        assert set(own) - set(spare) <= set(pages.tolist())

    @rule(target=locked, key=keys, blocks=blocks_of, tail=st.integers(0, 63), priority=st.integers(0, 2))
    def match_and_lock(self, key: CacheKey, blocks: list[int], tail: int, priority: int) -> object:
        node, pages = self.tree.match(self.tree.root(key), self._ids(blocks, tail))
        for i, page in enumerate(pages.tolist()):
            assert self.owner[page] == (key, tuple(blocks[: i + 1]))
        known = [path for owner, path in self.owner.values() if owner == key and tuple(blocks[: len(path)]) == path]
        assert len(pages) == len(known), "the longest cached prefix is found"
        self.tree.lock(node, priority)
        self.tree.hit(node, None)
        entry = (node, key, tuple(blocks[: len(pages)]))
        self.held.append(entry)
        return entry

    @rule(entry=locked)
    def unlock(self, entry: tuple[RadixNode, CacheKey, tuple[int, ...]]) -> None:
        if entry in self.held:
            self.held.remove(entry)
            self.tree.unlock(entry[0])

    @rule(entry=locked)
    def pin(self, entry: tuple[RadixNode, CacheKey, tuple[int, ...]]) -> None:
        if entry in self.held and len(self.pinned) < 3:
            self.tree.pin(entry[0])
            self.pinned.append(entry)

    @rule(at=st.integers(0, 2))
    def unpin(self, at: int) -> None:
        if at < len(self.pinned):
            self.tree.unpin(self.pinned.pop(at)[0])

    @rule(num_pages=st.integers(1, 20))
    def evict(self, num_pages: int) -> None:
        before = self.tree.num_cached
        freed = self.tree.evict(num_pages)
        assert len(freed) == min(num_pages, before)
        self._free(freed)

    @rule(num_pages=st.integers(1, 20), step=st.integers(0, 10))
    def evict_what_is_needed_late(self, num_pages: int, step: int) -> None:
        needed = {page for node in self.tree.nodes() if node.next_use < step for page in node.pages.tolist()}
        freed = self.tree.evict(num_pages, not_before=step)
        assert not needed & set(freed)
        self._free(freed)

    @rule(key=keys, paths=st.lists(st.tuples(st.integers(0, 10), blocks_of), max_size=3))
    def expect(self, key: CacheKey, paths: list[tuple[int, list[int]]]) -> None:
        uses = [(step, self.tree.match(self.tree.root(key), self._ids(blocks))[0]) for step, blocks in paths]
        self.tree.expect(uses)
        for step, node in uses:
            assert node.next_use <= step
        assert all(math.isinf(node.next_use) for node in self.tree.nodes()) or uses

    @rule(key=keys, blocks=blocks_of, kept=st.integers(0, 8))
    def retire(self, key: CacheKey, blocks: list[int], kept: int) -> None:
        node, _ = self.tree.match(self.tree.root(key), self._ids(blocks))
        self.tree.retire(node, kept * self.page_size)

    @rule(key=keys, blocks=blocks_of, num=st.integers(1, 3))
    def discard(self, key: CacheKey, blocks: list[int], num: int) -> None:
        node, _ = self.tree.match(self.tree.root(key), self._ids(blocks))
        self._free(self.tree.discard(node, num * self.page_size))

    @invariant()
    def nothing_is_lost(self) -> None:
        tree = self.tree
        assert self.pool.num_free + tree.num_cached + tree.num_locked == POOL
        nodes = list(tree.nodes())
        assert sorted(page for node in nodes for page in node.pages.tolist()) == sorted(self.owner)
        assert tree.num_locked == sum(len(node.pages) for node in nodes if node.lock)
        assert tree.num_pinned == sum(len(node.pages) for node in nodes if node.pins)

    @invariant()
    def counts_follow_the_paths(self) -> None:
        for node in self.tree.nodes():
            below = sum(child.lock for child in node.children.values())
            assert node.lock >= below >= 0
            assert node.lock >= node.pins >= sum(child.pins for child in node.children.values())
            assert node.end == len(node.tokens) + (node.parent.end if node.parent is not None else 0)
            assert len(node.tokens) == len(node.pages) * self.page_size > 0

    @invariant()
    def locked_paths_stay(self) -> None:
        for node, key, blocks in (*self.held, *self.pinned):
            end, pages = self.tree.match(self.tree.root(key), self._ids(list(blocks)))
            assert len(pages) == len(blocks)
            assert not blocks or end is node, "whoever locked a node still ends at the same token"


class PoolMachine(RuleBasedStateMachine):
    """Allocations and frees against a set."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(POOL)
        self.used: set[int] = set()

    @rule(num=st.integers(0, 60))
    def allocate(self, num: int) -> None:
        if num > POOL - len(self.used):
            with pytest.raises(InternalError, match="allocation"):
                self.pool.allocate(num)
            return
        pages = self.pool.allocate(num)
        assert len(set(pages)) == num
        assert not self.used & set(pages)
        self.used |= set(pages)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(sorted(self.used)), unique=True)) if self.used else []
        self.pool.free(some)
        self.used -= set(some)

    @rule(page=st.integers(0, POOL - 1))
    def free_what_is_free(self, page: int) -> None:
        if page not in self.used:
            with pytest.raises(InternalError, match="while it was free"):
                self.pool.free([page])

    @invariant()
    def free_and_used_are_all(self) -> None:
        assert self.pool.num_free + len(self.used) == POOL


TestTree = TreeMachine.TestCase
TestTree.settings = walks(60, 40)
TestPool = PoolMachine.TestCase
TestPool.settings = walks(20, 30)


def test_the_queue_for_eviction_stays_small() -> None:
    tree = RadixTree()
    for _ in range(3):
        node, *_ = tree.extend(tree.root(), array([1]), array([0]))
        for _ in range(1000):
            tree.lock(node)
            tree.unlock(node)
    assert len(tree._leaves) < 200


def test_keys_share_nothing() -> None:
    tree = RadixTree()
    tree.extend(tree.root(CacheKey("a")), array([1, 2]), array([0, 1]))
    for other in (CacheKey("b"), CacheKey("a", adapter="x"), CacheKey("a", program=1), CacheKey()):
        assert len(tree.match(tree.root(other), array([1, 2]))[1]) == 0
    assert sorted(tree.drop(CacheKey("a"))) == [0, 1]
    assert tree.num_cached == 0


def test_keys_that_nobody_uses_are_forgotten() -> None:
    tree = RadixTree()
    for i in range(1000):
        tree.match(tree.root(CacheKey(salt=str(i))), array([1]))
    assert len(tree._roots) < 200
