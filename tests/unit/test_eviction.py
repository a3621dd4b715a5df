"""Eviction policies: what goes first, what their parameters mean, and which parameters are refused."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from sgl.errors import ConfigError
from sgl.runtime.config import EngineConfig, Facts, ResolvedConfig, config_from_mapping
from sgl.runtime.eviction import POLICIES, make_policy, parse_parameters
from sgl.runtime.radix import RadixNode, RadixTree
from sgl.runtime.resolution import resolve

FACTS = Facts(
    cpu_count=4,
    available_bytes=2**33,
    model_context_len=512,
    num_layers=2,
    num_kv_heads=2,
    head_dim=16,
    num_parameters=10_000,
)


def resolved(**fields: object) -> ResolvedConfig:
    return resolve(EngineConfig(model_path="dummy", max_total_tokens=4096, **fields), FACTS)  # type: ignore[arg-type]


class Prompts:
    """A tree in which each letter is a prompt of its own, of four pages."""

    def __init__(self, policy: str, **parameters: int) -> None:
        self.tree = RadixTree(policy=make_policy(policy, parameters))
        self.nodes: dict[str, RadixNode] = {}

    def use(self, letters: str, priority: int = 0) -> None:
        """Compute what is new, and find what is not."""
        for letter in letters:
            ids = np.full(4, ord(letter), dtype=np.int32)
            known, pages = self.tree.match(self.tree.root(), ids)
            if len(pages) == len(ids):
                self.tree.lock(known, priority)
                self.tree.hit(known, None)
            else:
                own = np.arange(4, dtype=np.int32) + 10 * ord(letter)
                known, *_ = self.tree.extend(self.tree.root(), ids, own)
                self.tree.lock(known, priority)
            self.tree.unlock(known)
            self.nodes[letter] = known

    def order(self) -> str:
        """The letters in the order in which their last page goes."""
        gone = ""
        while pages := self.tree.evict(1):
            gone += chr(pages[0] // 10) if pages[0] % 10 == 0 else ""
        return gone


def test_lru() -> None:
    prompts = Prompts("lru")
    prompts.use("abca")
    assert prompts.order() == "bca"


def test_lfu() -> None:
    prompts = Prompts("lfu")
    prompts.use("abcaabc")  # found: a twice, b and c once
    prompts.use("d")
    assert prompts.order() == "dbca"


def test_slru_protects_what_was_found_often_enough() -> None:
    prompts = Prompts("slru")
    prompts.use("aaabbcd")  # found: a twice, b once
    assert prompts.order() == "bcda"
    higher = Prompts("slru", protected_threshold=4)
    higher.use("aaaabcd")  # found three times: probationary still
    assert higher.order() == "abcd"


def test_priority_is_the_highest_of_the_users() -> None:
    prompts = Prompts("priority")
    prompts.use("a", priority=2)
    prompts.use("b", priority=1)
    prompts.use("a")
    prompts.use("cd")
    assert prompts.order() == "cdba"


def test_priority_without_priorities_is_lru() -> None:
    prompts = Prompts("priority")
    prompts.use("abcab")
    assert prompts.order() == "cab"


def test_fifo() -> None:
    prompts = Prompts("fifo")
    prompts.use("abcaab")
    assert prompts.order() == "abc"


def test_tlru_gives_up_the_tails_that_it_can_spare() -> None:
    """A history of 4 tokens may lose 2 when a prompt may compute 5 tokens and a turn adds 3."""
    prompts = Prompts("tlru", threshold=5, next_prompt_estimate=3)
    prompts.use("ab")
    lost = [page for _ in range(4) for page in prompts.tree.evict(1)]
    assert lost == [973, 972, 983, 982], "two of each, before more of any"
    assert prompts.tree.evict(4) == [970, 971, 980, 981], "then as lru"


def test_tlru_remembers_how_long_a_history_was() -> None:
    """A history that lost its tail is not shorter: what is left is not spared another tail."""
    prompts = Prompts("tlru", threshold=4, next_prompt_estimate=2)
    prompts.use("a")
    assert prompts.tree.evict(2) == [972, 973]
    assert prompts.nodes["a"].reach == 4
    prompts.use("b")
    assert prompts.tree.evict(2) == [982, 983]


def test_program_order() -> None:
    """Dead states first, then what nothing is known to need, then what is needed last."""
    prompts = Prompts("program")
    prompts.use("abcdef")
    nodes = prompts.nodes
    prompts.tree.expect([(3, nodes["a"]), (9, nodes["b"]), (3, nodes["f"])])
    prompts.tree.retire(nodes["e"], 0)
    assert prompts.order() == "ecdbaf"


def test_what_is_needed_is_forgotten_when_it_is_not_needed_any_more() -> None:
    prompts = Prompts("program")
    prompts.use("abc")
    prompts.tree.expect([(3, prompts.nodes["a"])])
    prompts.tree.expect([(5, prompts.nodes["b"])])
    assert math.isinf(prompts.nodes["a"].next_use)
    assert prompts.order() == "acb"


def test_what_is_needed_before_a_step_stays() -> None:
    prompts = Prompts("program")
    prompts.use("ab")
    prompts.tree.expect([(3, prompts.nodes["a"]), (9, prompts.nodes["b"])])
    assert len(prompts.tree.evict(8, not_before=5)) == 4
    assert prompts.order() == "a"


def test_a_dead_state_that_is_found_is_alive() -> None:
    prompts = Prompts("program")
    prompts.use("ab")
    prompts.tree.retire(prompts.nodes["b"], 0)
    prompts.use("b")
    assert prompts.order() == "ab"


def test_only_what_a_state_added_is_dead() -> None:
    tree = RadixTree(policy=make_policy("program"))
    ids = np.arange(10, dtype=np.int32)
    node, *_ = tree.extend(tree.root(), ids, ids)
    tree.retire(node, 6)
    assert [(each.end, each.dead) for each in tree.nodes()] == [(6, False), (10, True)]
    tree.extend(tree.root(), ids[:2], ids[:2])
    sibling, *_ = tree.extend(tree.root(), np.array([0, 1, 7], dtype=np.int32), np.array([0, 1, 20], dtype=np.int32))
    tree.retire(sibling, 0)
    assert sibling.dead
    assert not tree.match(tree.root(), ids[:2])[0].dead, "others go on from there"


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("lruu", {}, r"unknown eviction policy 'lruu' \(did you mean"),
        ("slru", {"protected_treshold": 4}, "'slru' has no parameter 'protected_treshold'"),
        ("slru", {"protected_threshold": 0}, ">= 1"),
        ("slru", {"protected_threshold": "4"}, "Expected `int`"),
        ("lru", {"protected_threshold": 4}, r"'lru' has no parameter 'protected_threshold' \(it has none\)"),
        ("program", {"x": 1}, "'program' has no parameter 'x'"),
        ("tlru", {"threshold": 4096}, "next_prompt_estimate"),
        ("tlru", {"threshold": 512, "next_prompt_estimate": 512}, "nothing could be spared"),
    ],
)
def test_wrong_parameters_are_refused(name: str, parameters: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(name, parameters)


@pytest.mark.parametrize("text", ["{", "[1]", "4", '{"protected_threshold": 2'])
def test_parameters_are_a_json_object(text: str) -> None:
    with pytest.raises(ConfigError, match="radix_eviction_policy_config"):
        parse_parameters("slru", text)


def test_the_engine_refuses_them_at_its_start() -> None:
    assert resolved().radix_eviction_policy == "program"
    assert resolved(
        radix_eviction_policy="slru", radix_eviction_policy_config='{"protected_threshold": 4}'
    ).radix_eviction_policy_config == {"protected_threshold": 4}
    given = config_from_mapping({"radix_eviction_policy_config": {"protected_threshold": 4}})
    assert given.radix_eviction_policy_config == '{"protected_threshold":4}', "a mapping is taken as its text"
    for wrong in (3, {"a": object()}):
        with pytest.raises(ConfigError, match=r"^radix_eviction_policy_config is .*\(give .* a JSON object: a mapping"):
            config_from_mapping({"radix_eviction_policy_config": wrong})
    with pytest.raises(ConfigError, match="has no parameter"):
        resolved(radix_eviction_policy="lfu", radix_eviction_policy_config='{"protected_threshold": 4}')
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"radix_eviction_policy": "mru"}, EngineConfig)


def test_the_budget_of_pins_leaves_room() -> None:
    assert resolved().max_pinned_tokens == 1024
    assert resolved(max_pinned_tokens=0).max_pinned_tokens == 0
    with pytest.raises(ConfigError, match="max_pinned_tokens is 4096, but the pool holds 4096"):
        resolved(max_pinned_tokens=4096)


@pytest.mark.parametrize("name", list(POLICIES))
def test_eviction_is_not_a_scan(name: str) -> None:
    """Ranks asked for grow with the leaves, not with leaves times evictions."""
    asked = 0
    policy = make_policy(name, {"threshold": 3, "next_prompt_estimate": 1} if name == "tlru" else None)

    class Counting:
        looks_ahead = policy.looks_ahead

        def rank(self, node: RadixNode) -> tuple[float, ...]:
            nonlocal asked
            asked += 1
            return policy.rank(node)

        def portion(self, node: RadixNode) -> int:
            return policy.portion(node)

    tree = RadixTree(policy=Counting())
    for i in range(1000):
        tree.extend(tree.root(), np.array([i, i, i], dtype=np.int32), np.arange(3 * i, 3 * i + 3, dtype=np.int32))
    while tree.num_cached:
        tree.evict(1)
    assert asked <= 3 * 1000 + 10
