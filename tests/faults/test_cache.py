"""Rows 53 to 56 of the fault table: locks of the tree, partial pages, collisions of hashes, and salts.

On the scripted model: it reads the ids that the pages really hold, so a page that was shared wrongly changes an output.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.programs import gen, start, text
from support.scripted import Rig, expected_greedy

from sgl.errors import InternalError
from sgl.lang.graph import Fork, Usage, ValueEvent
from sgl.runtime.cache_key import CacheKey, MediaIds
from sgl.runtime.eviction import POLICIES, make_policy
from sgl.runtime.radix import RadixTree


def array(values: list[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def ask(rig: Rig, program: int, prompt: str, n: int, **options: object) -> None:
    start(rig, program, text(0, prompt), gen(1, n), **options)


def value(rig: Rig, program: int) -> str:
    (event,) = rig.of(program, ValueEvent)
    return str(event.value)


def usage(rig: Rig, program: int) -> Usage:
    (event,) = rig.of(program, ValueEvent)
    found: Usage = event.usage
    return found


def greedy(prompt: str, n: int) -> str:
    return bytes(expected_greedy(list(prompt.encode()), n)).decode()


# --- row 53: locks ---


@pytest.mark.parametrize("policy", list(POLICIES))
def test_what_is_locked_is_never_evicted(policy: str) -> None:
    """The walks of tests/property do this at random; here the steps that went wrong elsewhere, one by one."""
    parameters = {"threshold": 4, "next_prompt_estimate": 1} if policy == "tlru" else None
    tree = RadixTree(policy=make_policy(policy, parameters))
    held, *_ = tree.extend(tree.root(), array([1, 2, 3, 4]), array([0, 1, 2, 3]))
    tree.lock(held)
    # A split above the lock, a sibling below it, and a duplicate of what is there.
    other, _, spare = tree.extend(tree.root(), array([1, 2, 9]), array([10, 11, 12]))
    assert (spare, other.pages.tolist()) == ([10, 11], [12])
    _, pages, spare = tree.extend(tree.root(), array([1, 2, 3, 4]), array([20, 21, 22, 23]))
    assert pages.tolist() == [0, 1, 2, 3], "the page table follows the canonical node"
    assert spare == [20, 21, 22, 23]
    assert tree.evict(100) == [12]
    assert tree.match(tree.root(), array([1, 2, 3, 4]))[1].tolist() == [0, 1, 2, 3]
    tree.unlock(held)
    assert sorted(tree.evict(100)) == [0, 1, 2, 3]
    assert (tree.num_cached, tree.num_locked) == (0, 0)


def test_a_count_never_gets_negative() -> None:
    tree = RadixTree()
    node, *_ = tree.extend(tree.root(), array([1]), array([0]))
    with pytest.raises(InternalError, match="more often than locked"):
        tree.unlock(node)
    tree.lock(node)
    with pytest.raises(InternalError, match="more often than pinned"):
        tree.unpin(node)


def test_what_a_split_leaves_is_still_unlocked_by_its_sequence() -> None:
    tree = RadixTree()
    node, *_ = tree.extend(tree.root(), array([1, 2, 3, 4]), array([0, 1, 2, 3]))
    tree.lock(node)
    upper, _ = tree.match(tree.root(), array([1, 2]))
    assert (upper.lock, node.lock, node.parent) == (1, 1, upper)
    tree.unlock(node)
    assert (upper.lock, node.lock) == (0, 0)


# --- row 54: partial pages ---


@pytest.mark.parametrize("page_size", [16, 64])
def test_two_requests_part_inside_a_page(page_size: int) -> None:
    """Each writes to a page of its own; the second copies what it shares of the first one's."""
    rig = Rig(num_pages=1024 // page_size, page_size=page_size)
    prefix = "p" * (page_size + 10)
    ask(rig, 1, prefix + "left " + "l" * page_size, 8)
    rig.core.step()
    rig.core.step()
    ask(rig, 2, prefix + "right", 8)
    rig.run()
    assert value(rig, 1) == greedy(prefix + "left " + "l" * page_size, 8)
    assert value(rig, 2) == greedy(prefix + "right", 8)
    assert usage(rig, 2).cached_tokens == len(prefix)
    assert rig.core.snapshot().copied_tokens == 10


def test_forks_copy_the_partial_page_of_their_parent() -> None:
    rig = Rig(num_pages=64, page_size=16)
    nodes = [text(0, "s" * 20), gen(1, 5), Fork(id=2, children=(1, 2, 3))]
    for child in (1, 2, 3):
        nodes += [text(10 * child, f"{child}?", child), gen(10 * child + 1, 6, child, f"v{child}")]
    start(rig, 1, *nodes)
    rig.run()
    root = greedy("s" * 20, 5)
    got = {event.name: event for event in rig.of(1, ValueEvent)}
    for child in (1, 2, 3):
        event = got[f"v{child}"]
        assert event.value == greedy("s" * 20 + root + f"{child}?", 6)
        # All that was computed of the parent: 20 of the prompt and 4 of the output.
        assert event.usage.cached_tokens == 24
    assert rig.core.snapshot().copied_tokens == 3 * 8


def test_what_the_same_step_writes_is_not_copied() -> None:
    rig = Rig(num_pages=64, page_size=16, chunked_prefill_size=256)
    for program in (1, 2, 3):
        ask(rig, program, "q" * 24 + str(program), 4)
    rig.run()
    for program in (1, 2, 3):
        assert value(rig, program) == greedy("q" * 24 + str(program), 4)
    assert not any(plan.copies for plan in rig.runner.plans[:1])
    assert usage(rig, 2).cached_tokens == 16, "the whole page is shared in the same step"


def test_copies_survive_a_pool_that_is_full() -> None:
    """The source of a copy may be evicted, or given to somebody else, by the plan that copies it."""
    rig = Rig(num_pages=12, page_size=16, chunked_prefill_size=64)
    prompts = [("a" * 24 if i % 2 else "b" * 40) + f"{i}" * (i % 5 + 1) for i in range(16)]
    for i, prompt in enumerate(prompts):
        ask(rig, i + 1, prompt, 6 + i % 7)
        rig.core.step()
    rig.run()
    for i, prompt in enumerate(prompts):
        assert value(rig, i + 1) == greedy(prompt, 6 + i % 7)
    assert rig.core.snapshot().copied_tokens > 0


# --- row 55: collisions ---


def test_no_hash_stands_for_tokens() -> None:
    """Children are found by the bytes of their first page, so a dictionary's collision is settled by comparing these;
    what follows in a node is compared token by token."""
    tree = RadixTree(page_size=2)
    tree.extend(tree.root(), array([1, 2, 3, 4]), array([0, 1]))
    (key,) = tree.root().children
    assert key == array([1, 2]).tobytes()
    for other in ([1, 3, 3, 4], [2, 1, 3, 4], [1, 2, 4, 3]):
        assert len(tree.match(tree.root(), array(other))[1]) == (1 if other[:2] == [1, 2] else 0)


class _Colliding(bytes):
    """A page whose hash is that of every other page."""

    def __hash__(self) -> int:
        return 1


def test_colliding_hashes_serve_no_other_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RadixTree, "_key", lambda tree, tokens: _Colliding(tokens[: tree.page_size].tobytes()))
    monkeypatch.setattr(
        RadixTree, "goes_on", lambda tree, node, page_tokens: _Colliding(page_tokens.tobytes()) in node.children
    )
    rig = Rig()
    prompts = ["same hash", "some hash", "hash same", "same hush"]
    for i, prompt in enumerate(prompts):
        ask(rig, i + 1, prompt, 5)
        rig.run()
        assert value(rig, i + 1) == greedy(prompt, 5)
    assert usage(rig, 4).cached_tokens == len("same h")


def test_media_with_digests_that_look_alike_have_ids_of_their_own() -> None:
    media = MediaIds()
    digests = [bytes([i]) + b"\0" * 31 for i in range(100)] + [b"\0" * 31 + bytes([i]) for i in range(1, 100)]
    ids = [media.ids(digest, 4) for digest in digests]
    assert len({id for run in ids for id in run}) == len(digests)
    assert all(id < 0 for run in ids for id in run), "no text has such ids"
    assert [media.ids(digest, 4) for digest in digests] == ids
    tree = RadixTree()
    tree.extend(tree.root(), array([5, *ids[0], 6]), np.arange(6, dtype=np.int32))
    assert len(tree.match(tree.root(), array([5, *ids[1], 6]))[1]) == 1


# --- row 56: salts ---


def test_salts_share_nothing_and_nothing_shows_it() -> None:
    """What a tenant can see of its own requests is the same whether another one sent the same prompt before or not."""
    prompt = "a secret that both know " * 3
    shared, alone = Rig(), Rig()
    ask(shared, 1, prompt, 5, cache_salt="tenant a")
    shared.run()
    steps = {}
    for rig in (shared, alone):
        ask(rig, 2, prompt, 5, cache_salt="tenant b")
        steps[rig] = rig.run()
    assert usage(shared, 2) == usage(alone, 2)
    assert usage(shared, 2).cached_tokens == 0
    assert steps[shared] == steps[alone], "not by its time either"
    ask(shared, 3, prompt, 5, cache_salt="tenant b")
    ask(shared, 4, prompt, 5)
    shared.run()
    assert usage(shared, 3).cached_tokens == len(prompt) - 1, "with itself a tenant shares"
    assert usage(shared, 4).cached_tokens == 0, "no salt is a salt like any other"


def test_a_salt_is_not_an_adapter() -> None:
    assert len({CacheKey(salt="x"), CacheKey(adapter="x"), CacheKey(), CacheKey(program=0)}) == 4
