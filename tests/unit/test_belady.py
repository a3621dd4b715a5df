"""The offline optimum against exhaustive search, LRU against a plain simulation, and the bounds between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl.bench.belady import Access, PrefixTree
from sgl.errors import InvalidParameter

Node = tuple[int, ...]
"""A token of the trie: the path to it."""


def access(prompt: Sequence[int], output: Sequence[int] = ()) -> Access:
    return Access(np.array([*prompt, *output], dtype=np.int32), max(0, len(prompt) - 1))


def path_of(one: Access) -> list[Node]:
    ids = one.tokens.tolist()
    return [tuple(ids[: length + 1]) for length in range(len(ids))]


def closed_subsets(nodes: frozenset[Node], must: frozenset[Node], most: int) -> Iterable[frozenset[Node]]:
    """Subsets of `nodes` that hold `must` and every ancestor of what they hold, of at most `most` nodes."""
    if len(must) > most:
        return
    found, stack = {must}, [must]
    while stack:
        one = stack.pop()
        yield one
        if len(one) == most:
            continue
        for node in nodes - one:
            if node[:-1] in one or len(node) == 1:
                larger = one | {node}
                if larger not in found:
                    found.add(larger)
                    stack.append(larger)


def exhaustive(accesses: Sequence[Access], capacity: int) -> int:
    """Most hits over every choice of what to keep after each access, by the prefix rule."""
    best: dict[frozenset[Node], int] = {frozenset(): 0}
    for one in accesses:
        path = path_of(one)
        following: dict[frozenset[Node], int] = {}
        for kept, hits in best.items():
            now = hits + sum(node in kept for node in path[: one.num_reusable])
            for state in closed_subsets(kept | frozenset(path), frozenset(path), capacity):
                if following.get(state, -1) < now:
                    following[state] = now
        best = following
    return max(best.values())


def plain_lru(accesses: Sequence[Access], capacity: int) -> int:
    last: dict[Node, int] = {}
    hits = 0
    for index, one in enumerate(accesses):
        path = path_of(one)
        hits += sum(node in last for node in path[: one.num_reusable])
        last.update(dict.fromkeys(path, index))
        while len(last) > capacity:
            del last[min(last, key=lambda node: (last[node], -len(node)))]
    return hits


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=4)
unique_outputs = st.lists(st.tuples(prompts, st.integers(0, 2)), min_size=1, max_size=6).map(
    lambda rows: [access(prompt, [100 + 10 * i + k for k in range(n)]) for i, (prompt, n) in enumerate(rows)]
)
any_outputs = st.lists(st.tuples(prompts, st.lists(st.integers(0, 1), max_size=2)), min_size=1, max_size=6).map(
    lambda rows: [access(prompt, output) for prompt, output in rows]
)


def is_exact(accesses: Sequence[Access]) -> bool:
    """Whether no request uses, without being able to hit it, an earlier one's token that has descendants."""
    seen: set[Node] = set()
    for one in accesses:
        path = path_of(one)
        if any(node in seen and any(other[:-1] == node for other in seen) for node in path[one.num_reusable :]):
            return False
        seen.update(path)
    return True


@settings(max_examples=60, deadline=None)
@given(unique_outputs.filter(is_exact), st.integers(0, 4))
def test_equal_to_exhaustive_search(accesses: list[Access], spare: int) -> None:
    tree = PrefixTree(accesses)
    capacity = tree.longest + spare
    assert tree.hits_belady(capacity) == exhaustive(accesses, capacity)


@settings(max_examples=60, deadline=None)
@given(any_outputs, st.integers(0, 4))
def test_never_below_exhaustive_search_whatever_is_repeated(accesses: list[Access], spare: int) -> None:
    tree = PrefixTree(accesses)
    capacity = tree.longest + spare
    assert tree.hits_belady(capacity) >= exhaustive(accesses, capacity)


@settings(max_examples=60, deadline=None)
@given(any_outputs, st.integers(0, 6))
def test_lru_and_the_bounds(accesses: list[Access], spare: int) -> None:
    tree = PrefixTree(accesses)
    capacity = tree.longest + spare
    assert tree.hits_lru(capacity) == plain_lru(accesses, capacity)
    assert tree.hits_lru(capacity) <= tree.hits_belady(capacity) <= tree.hits_forever()
    assert tree.hits_belady(tree.num_tokens) == tree.hits_forever() == plain_lru(accesses, 10**6)
    assert tree.num_tokens == len({node for one in accesses for node in path_of(one)})


def test_the_bound_exceeds_the_prefix_rule_only_where_it_says() -> None:
    """The second prompt ends inside the first one: its token is computed anew, and the bound drops it meanwhile."""
    accesses = [access([0, 0, 1]), access([1]), access([0]), access([0, 0, 1])]
    assert not is_exact(accesses)
    assert PrefixTree(accesses).hits_belady(3) >= exhaustive(accesses, 3)


def test_a_cycle_is_where_lru_hits_nothing() -> None:
    """Three prompts in turn and room for two: LRU drops each just before its use, MIN keeps part of them."""
    turns = [access([group] * 10) for _ in range(4) for group in (1, 2, 3)]
    tree = PrefixTree(turns)
    assert (tree.hits_lru(20), tree.hits_belady(20), tree.hits_forever()) == (0, 49, 81)


def test_what_is_computed_in_any_case_is_no_hit() -> None:
    same = [access([1, 2, 3], [4]), access([1, 2, 3], [4]), access([1, 2, 3, 4, 5])]
    assert PrefixTree(same).hits_forever() == 0 + 2 + 4
    uncounted = [access([1, 2, 3]), Access(np.array([1, 2, 3], dtype=np.int32), 0)]
    assert PrefixTree(uncounted).hits_forever() == 0


def test_namespaces_share_nothing() -> None:
    ids = np.array([1, 2, 3], dtype=np.int32)
    tree = PrefixTree([Access(ids, 2, "a"), Access(ids, 2, "b"), Access(ids, 2, "a")])
    assert (tree.num_tokens, tree.hits_forever()) == (6, 2)


def test_impossible_questions_are_refused() -> None:
    tree = PrefixTree([access([1, 2, 3])])
    with pytest.raises(InvalidParameter, match="one access alone needs 3"):
        tree.hits_belady(2)
    with pytest.raises(InvalidParameter, match="at least one token"):
        PrefixTree([Access(np.empty(0, dtype=np.int32), 0)])
