"""Pages of live states, by hand: next uses, copies, pins and flushes, on the scripted model."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from support.programs import gen, start, text
from support.scripted import Rig, expected_greedy

from sgl.errors import EngineBusy, InvalidParameter, PinBudgetExceeded, SglError, Unsupported
from sgl.lang.graph import (
    DoneEvent,
    Fork,
    Graph,
    Join,
    LiteralText,
    Release,
    Select,
    Text,
    ValueEvent,
    Var,
)
from sgl.runtime.next_use import Lane, next_uses


def greedy(prompt: str, n: int) -> str:
    return bytes(expected_greedy(list(prompt.encode()), n)).decode()


def cached(rig: Rig, program: int) -> list[int]:
    return [event.usage.cached_tokens for event in rig.of(program, ValueEvent)]


# --- next uses ---


def test_next_uses_of_a_fork_and_a_join() -> None:
    children = (1, 2)
    main = Lane((Fork(id=1, children=children), Join(id=2, children=children), gen(3, 5, name="end")), 4)
    unborn = {1: (gen(4, 10, 1, "a"),), 2: (gen(5, 30, 2, "b"), Release(id=6, branch=2))}
    uses = next_uses({0: main}, unborn, {}, {1: 0, 2: 0})
    assert uses == {0: 4, 1: 4, 2: 4}
    after = Lane((Join(id=2, children=children), gen(3, 5, name="end")))
    assert next_uses({0: after, 1: Lane((), 10), 2: Lane((), 30)}, {}, {}, {1: 0, 2: 0}) == {0: 30}


def test_next_uses_wait_for_values() -> None:
    reads = Text(id=1, segments=(Var("x", 1),))
    main = Lane((reads, gen(2, 5)))
    lanes = {0: main, 1: Lane((Select(id=3, branch=1, name="y", choices=("a", "b")), gen(4, 7, 1)), 2)}
    assert next_uses(lanes, {}, {}, {1: 0}) == {0: 10, 1: 2}
    assert next_uses({0: main}, {}, {(1, "x"): 0}, {1: 0}) == {0: 0}
    assert next_uses({0: main}, {}, {}, {}) == {}, "what never comes has no time"


def test_a_program_foresees_its_states() -> None:
    rig = Rig()
    children = (1, 2)
    nodes = [text(0, "r"), gen(1, 3), Fork(id=2, children=children), gen(3, 20, 1, "a"), gen(4, 5, 2, "b")]
    start(rig, 1, *nodes, Join(id=5, children=children), text(6, "!"), gen(7, 2, name="end"))
    while len(rig.of(1, ValueEvent)) < 2:
        rig.core.step()
    run = rig.core._programs[1]
    states = {id: branch.sequence for id, branch in run._branches.items()}
    foreseen = {id: run.next_use(sequence) for id, sequence in states.items()}
    now = rig.core.scheduler.step
    left = 20 - run._work[states[1].id].request.completion_tokens
    assert foreseen[0] == now + 1 + left, "after the join"
    assert foreseen[2] == math.inf, "nothing reads its pages again"
    rig.run()
    assert rig.of(1, DoneEvent)


def test_states_give_up_their_pages_in_the_order_of_their_next_use() -> None:
    """Two states rest while their programs' other branches generate: the one that is needed later makes room."""
    rig = Rig(num_pages=128, context_len=128)
    for program, wait in ((1, 10), (2, 60)):
        nodes = [text(0, f"{program}" * 40), gen(1, 1), Fork(id=2, children=(1,)), gen(3, wait, 1, "w")]
        reads = Text(id=4, segments=(Var("w", 1), LiteralText("+")))
        start(rig, program, *nodes, reads, gen(5, 2, name="y"))
    rig.core.step()
    rig.core.step()
    start(rig, 3, text(0, "3" * 40), gen(1, 30))
    rig.run()
    for program, wait in ((1, 10), (2, 60)):
        root = f"{program}" * 40 + greedy(f"{program}" * 40, 1)
        w = greedy(root, wait)
        got = {event.name: event.value for event in rig.of(program, ValueEvent)}
        assert got["y"] == greedy(root + w + "+", 2)


def test_the_prefix_of_waiting_requests_is_kept() -> None:
    """A stream of other prompts fills the pool while rows with one prefix wait: it is computed once all the same."""
    prefix = "common " * 8

    def prefilled(policy: str) -> int:
        rig = Rig(num_pages=120, max_running_requests=1, radix_eviction_policy=policy, schedule_policy="fcfs")
        number = 0
        for _ in range(5):
            for prompt in (prefix + "row", *("x" * 30, "y" * 30, "z" * 30)):
                number += 1
                start(rig, number, text(0, prompt + str(number)), gen(1, 2))
        rig.run()
        return rig.core.snapshot().prefill_tokens

    assert prefilled("program") < prefilled("lru")


# --- pins ---


@pytest.fixture
def pinning() -> Iterator[Rig]:
    """An engine with a budget of 100 of its 256 tokens; whatever a test does, both laws hold at its end."""
    rig = Rig(max_pinned_tokens=100)
    yield rig
    rig.run()
    rig.core.snapshot().check()


class Answers(list[tuple[int, SglError | None]]):
    """What a `done` was called with."""

    def __call__(self, number: int, error: SglError | None) -> None:
        self.append((number, error))


def test_a_pinned_prefix_stays(pinning: Rig) -> None:
    rig, answers = pinning, Answers()
    rig.core.cache.pin(1, "p" * 60, None, "", answers)
    rig.run()
    assert answers == [(60, None)]
    for program in range(1, 12):
        start(rig, program, text(0, f"{program}" * 70), gen(1, 2))
        rig.run()
    assert rig.core.snapshot().pages_pinned == 60
    start(rig, 20, text(0, "p" * 60 + "q"), gen(1, 2))
    rig.run()
    assert cached(rig, 20) == [60]
    rig.core.flush_cache()
    assert rig.core.snapshot().pages_pinned == 60
    rig.core.cache.unpin(1)
    rig.core.cache.unpin(1)
    assert rig.core.snapshot().pages_held == 0
    rig.core.flush_cache()
    assert rig.core.snapshot().pages_free == 256


def test_pins_share_what_they_have_in_common(pinning: Rig) -> None:
    rig, answers = pinning, Answers()
    for number in range(3):
        rig.core.cache.pin(number, "p" * 80 + str(number), None, "", answers)
        rig.run()
    assert [number for number, _ in answers] == [81] * 3
    assert rig.core.snapshot().pages_pinned == 83
    rig.core.cache.unpin(0)
    assert rig.core.snapshot().pages_pinned == 82


def test_over_the_budget_both_numbers_are_told(pinning: Rig) -> None:
    rig, answers = pinning, Answers()
    rig.core.cache.pin(1, "p" * 60, None, "", answers)
    rig.core.cache.pin(2, "q" * 60, None, "", answers)
    (error,) = [error for _, error in answers if error is not None]
    assert isinstance(error, PinBudgetExceeded)
    assert "60 tokens" in str(error)
    assert "at most 100" in str(error)
    rig.run()
    assert answers[-1] == (60, None)


def test_a_pin_leaves_room_for_what_was_admitted(pinning: Rig) -> None:
    rig, answers = pinning, Answers()
    start(rig, 1, text(0, "r" * 150), gen(1, 45))
    rig.core.cache.pin(1, "p" * 70, None, "", answers)
    assert isinstance(answers[0][1], PinBudgetExceeded)
    rig.core.cache.pin(2, "p" * 61, None, "", answers)
    start(rig, 2, text(0, "s" * 150), gen(1, 46))
    rig.run()
    assert answers[1] == (61, None)
    assert [event.value for event in rig.of(1, ValueEvent)] == [greedy("r" * 150, 45)]
    assert not rig.of(2, ValueEvent), "it can never fit beside what is pinned"
    start(rig, 3, text(0, "p" * 61 + "s" * 90), gen(1, 46))
    rig.run()
    assert rig.of(3, ValueEvent), "on top of what is pinned it fits"


def test_a_pin_ends_by_itself(pinning: Rig) -> None:
    rig, answers = pinning, Answers()
    rig.core.cache.pin(1, "p" * 20, 5.0, "", answers)
    rig.run()
    assert rig.core.next_deadline() == 5.0
    rig.time = 5.0
    rig.core.step()
    assert rig.core.snapshot().pages_pinned == 0
    assert rig.core.next_deadline() is None


def test_unpinned_before_it_is_computed(pinning: Rig) -> None:
    rig, answers = pinning, Answers()
    rig.core.cache.pin(1, "p" * 90, None, "", answers)
    rig.core.step()
    rig.core.cache.unpin(1)
    ((number, error),) = answers
    assert number == 0
    assert error is not None
    assert error.code == "cancelled"
    assert not rig.core.has_work


def test_a_failed_step_computes_pins_again() -> None:
    failing = {"now": False}

    def hook(plan: object) -> None:
        if failing.pop("now", False):
            raise RuntimeError("kernel said no")

    rig, answers = Rig(hook, max_pinned_tokens=100), Answers()
    rig.core.cache.pin(1, "p" * 60, None, "", answers)
    rig.run()
    failing["now"] = True
    start(rig, 1, text(0, "x"), gen(1, 2))
    rig.run()
    assert rig.core.snapshot().pages_pinned == 60
    start(rig, 2, text(0, "p" * 60 + "q"), gen(1, 3))
    rig.run()
    assert cached(rig, 2) == [60]
    assert [event.value for event in rig.of(2, ValueEvent)] == [greedy("p" * 60 + "q", 3)]
    assert answers == [(60, None)]


def test_what_cannot_be_pinned() -> None:
    rig, answers = Rig(page_size=16, num_pages=16, max_pinned_tokens=128), Answers()
    rig.core.cache.pin(1, "", None, "", answers)
    rig.core.cache.pin(2, [1, 100_000], None, "", answers)
    rig.core.cache.pin(3, "short", None, "", answers)
    assert [error.code for _, error in answers if error is not None] == [
        "empty_prompt",
        "invalid_parameter",
        "invalid_parameter",
    ]
    assert isinstance(answers[-1][1], InvalidParameter)
    rig.core.cache.pin(4, "l" * 40, None, "", answers)
    rig.run()
    assert answers[-1] == (32, None), "whole pages"
    Rig(disable_radix_cache=True).core.cache.pin(1, "p" * 20, None, "", answers)
    assert isinstance(answers[-1][1], Unsupported), "it would be computed, and found by nobody"


# --- flushes ---


def test_a_busy_engine_refuses_to_flush() -> None:
    rig, answers = Rig(), Answers()
    start(rig, 1, text(0, "busy"), gen(1, 5))
    with pytest.raises(EngineBusy, match="0 requests run and 1 wait"):
        rig.core.flush_cache()
    rig.core.step()
    rig.core.cache.flush(0.0, answers)
    assert isinstance(answers[0][1], EngineBusy)
    rig.run()
    rig.core.cache.flush(0.0, answers)
    assert answers[1] == (4 + 4, None)


def test_a_flush_waits_for_an_idle_engine() -> None:
    rig, answers = Rig(), Answers()
    start(rig, 1, text(0, "busy"), gen(1, 5))
    rig.core.cache.flush(10.0, answers)
    rig.core.step()
    assert not answers
    assert rig.core.next_deadline() == 10.0
    rig.run()
    assert answers == [(8, None)], "at the end of the last step, without waiting for another one"


def test_a_flush_does_not_wait_for_ever() -> None:
    rig, answers = Rig(), Answers()
    start(rig, 1, text(0, "busy"), gen(1, 50))
    rig.core.cache.flush(10.0, answers)
    rig.core.step()
    rig.time = 10.0
    rig.core.step()
    assert isinstance(answers[0][1], EngineBusy)
    rig.run()


def test_a_flush_leaves_live_states_alone() -> None:
    rig = Rig()
    start(rig, 1, text(0, "kept"), gen(1, 5), finish=False)
    start(rig, 2, text(0, "gone"), gen(1, 5))
    rig.run()
    assert rig.core.flush_cache() == 8
    rig.core.submit(1, Graph(nodes=(gen(2, 3, name="y"),)), finish=True)
    rig.run()
    assert cached(rig, 1)[1] == 8


# --- what is dead, and what is hit ---


def test_what_a_released_fork_added_goes_before_older_prompts() -> None:
    rig = Rig()
    start(rig, 1, text(0, "old" * 10), gen(1, 2))
    rig.run()
    children = (1, 2)
    nodes = [text(0, "new" * 10), Fork(id=1, children=children)]
    for child in children:
        nodes += [text(10 * child, f"{child}" * 20, child), gen(10 * child + 1, 2, child, f"v{child}")]
    start(rig, 2, *nodes, Join(id=50, children=children), text(51, "end"), gen(52, 2))
    rig.run()
    tree = rig.core.scheduler.paging.tree
    assert sum(len(node.tokens) for node in tree.nodes() if node.dead) == 2 * 21
    rig.core.scheduler.paging.pool.free(tree.evict(42))
    for program, prompt in ((3, "old" * 10), (4, "new" * 10)):
        start(rig, program, text(0, prompt + "?"), gen(1, 1))
        rig.run()
        assert cached(rig, program) == [30]


def test_hits_are_counted_for_later_requests_only() -> None:
    rig = Rig(chunked_prefill_size=16)
    start(rig, 1, text(0, "h" * 60), gen(1, 4))
    rig.run()
    nodes = list(rig.core.scheduler.paging.tree.nodes())
    assert [node.hits for node in nodes] == [0] * len(nodes), "not for the chunks of the one that computes it"
    start(rig, 2, text(0, "h" * 60), gen(1, 4))
    rig.core.step()
    running = rig.core.scheduler.running[0]
    rig.core.scheduler._put_back(running)
    rig.run()
    assert max(node.hits for node in rig.core.scheduler.paging.tree.nodes()) == 1, "once, although it was put back"
