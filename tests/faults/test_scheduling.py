"""Rows 46 to 52 of the fault table, and aborts: a full pool, requests that never fit, floods, starvation, leaks.

On the scripted model: every output is known in advance, so that "the others are unharmed" is an equality.
"""

from __future__ import annotations

import random

import pytest
from support.programs import gen, start, text
from support.scripted import Rig, expected_greedy

from sgl.errors import NeverFits, QueueFull, QueueTimeout, SglError
from sgl.lang.graph import (
    DoneEvent,
    FailedEvent,
    Fork,
    Join,
    Release,
    Select,
    ValueEvent,
)
from sgl.limits import Limits


def ask(rig: Rig, program: int, prompt: str, n: int, **options: object) -> None:
    start(rig, program, text(0, prompt), gen(1, n), **options)


def value(rig: Rig, program: int) -> str:
    (event,) = rig.of(program, ValueEvent)
    return str(event.value)


def greedy(prompt: str, n: int) -> str:
    return bytes(expected_greedy(list(prompt.encode()), n)).decode()


def failure(rig: Rig, program: int) -> SglError:
    (event,) = rig.of(program, FailedEvent)
    return SglError.from_info(event.error)


def limited(**limits: object) -> Rig:
    return Rig(num_pages=1024, limits=Limits(**limits))  # type: ignore[arg-type]


@pytest.mark.parametrize("page_size", [1, 16])
def test_row_46_what_can_never_fit_is_refused_at_the_door_and_blocks_nobody(page_size: int) -> None:
    rig = Rig(num_pages=64 // page_size, page_size=page_size, context_len=500)
    ask(rig, 1, "a" * 20, 10)
    ask(rig, 2, "b" * 40, 40)  # 80 tokens, the pool holds 64
    ask(rig, 3, "c" * 49, 16)  # 65 tokens: over by one, or by a part of a page
    ask(rig, 4, "d" * 48, 16)  # fits to the token
    ask(rig, 5, "e" * 5, 5)
    start(rig, 6, text(0, "f" * 70), Select(id=1, name="pick", choices=("left", "right")))
    assert "shorten the prompt" in failure(rig, 6).hint, "a select generates nothing that could be shorter"
    steps = rig.run()
    for program, needed in ((2, 80), (3, 65)):
        error = failure(rig, program)
        assert isinstance(error, NeverFits)
        assert (error.details["needed_tokens"], error.details["pool_tokens"]) == (needed, 64)
    for program, prompt, n in ((1, "a" * 20, 10), (4, "d" * 48, 16), (5, "e" * 5, 5)):
        assert value(rig, program) == greedy(prompt, n)
    assert steps < 60
    assert rig.core.stats.recomputed_tokens <= 64, "what waits for room is not prefilled over and over"


@pytest.mark.parametrize("retraction", ["latest", "length", "priority"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_row_47_a_pool_that_fills_up_while_decoding_retracts_and_everyone_ends_right(
    retraction: str, page_size: int
) -> None:
    rig = Rig(
        num_pages=200 // page_size,
        page_size=page_size,
        retraction_policy=retraction,
        schedule_conservativeness=0.01,  # admits everyone, so that the pool does fill up
    )
    for program in range(6):
        ask(rig, program, f"{program}" * 15, 35)
    rig.run()
    assert rig.core.snapshot().retractions > 0
    for program in range(6):
        assert value(rig, program) == greedy(f"{program}" * 15, 35)
    assert rig.core.snapshot().pages_held == 0


def test_row_48_a_burst_of_long_prompts_is_deferred() -> None:
    rig = Rig(num_pages=220, context_len=200)
    for program in range(10):
        ask(rig, program, f"{program}" * 150, 4)
    rig.run()
    for program in range(10):
        assert value(rig, program) == greedy(f"{program}" * 150, 4)
    stats = rig.core.snapshot()
    assert stats.retractions == 0
    assert stats.recomputed_tokens == 0
    assert stats.prefill_tokens == 10 * 150


def test_row_49_what_cannot_grow_alone_ends_at_once_with_an_error_and_never_spins() -> None:
    rig = Rig(num_pages=32, context_len=500)
    ask(rig, 1, "a" * 10, 100)
    assert isinstance(failure(rig, 1), NeverFits)
    assert rig.run() == 0
    # A program whose parts fit one by one, and whose last one does not: the error comes when it is known.
    start(rig, 2, text(0, "b" * 10), gen(1, 15, name="x"), text(2, "c" * 5), gen(3, 10, name="y"))
    assert rig.run() == 15
    assert rig.of(2, ValueEvent)[0].value == greedy("b" * 10, 15)
    assert isinstance(failure(rig, 2), NeverFits)
    ask(rig, 3, "d" * 10, 22)  # the pool is whole again
    rig.run()
    assert value(rig, 3) == greedy("d" * 10, 22)


@pytest.mark.parametrize("policy", ["program", "lpm"])
def test_row_50_a_large_request_is_not_skipped_for_small_ones(policy: str) -> None:
    """One prompt that needs most of the pool among a stream of small ones: it begins within 1.5 times strict order.

    Policies that prefer others for long are bounded by the age of a request (`test_policies`).
    """

    def steps_to_first(policy: str) -> int:
        rig = Rig(num_pages=256, max_running_requests=4, schedule_policy=policy, context_len=250)
        for program in range(1, 9):
            ask(rig, program, f"{program}" * 8, 24)
        ask(rig, 0, "L" * 180, 2)
        for step in range(2000):
            rig.core.step()
            if rig.of(0, ValueEvent):
                assert value(rig, 0) == greedy("L" * 180, 2)
                return step
            ask(rig, 9 + step, f"s{step} ", 24)
        raise AssertionError("the large request starves")

    assert steps_to_first(policy) <= 1.5 * steps_to_first("fcfs")


def test_row_51_the_queue_is_bounded_in_length_and_in_time() -> None:
    rig = limited(max_queue=5, max_queue_s=10.0)
    for program in range(20):
        ask(rig, program, f"{program:02}", 3)
    refused = [program for program in range(20) if rig.of(program, FailedEvent)]
    assert refused == list(range(5, 20))
    assert all(isinstance(failure(rig, program), QueueFull) for program in refused)
    rig.run()
    assert all(value(rig, program) == greedy(f"{program:02}", 3) for program in range(5))

    slow = limited(max_queue_s=10.0)
    for program in range(20, 60):
        ask(slow, program, f"{program}", 30)
    slow.core.step()
    slow.time = 11.0
    slow.run()
    ended = [program for program in range(20, 60) if slow.of(program, DoneEvent)]
    late = [program for program in range(20, 60) if slow.of(program, FailedEvent)]
    assert len(ended) == 16  # as many as had a row
    assert len(late) == 24
    assert all(isinstance(failure(slow, program), QueueTimeout) for program in late)


def test_row_51_the_queue_counts_programs_and_never_refuses_one_that_it_let_in() -> None:
    rig = limited(max_queue=1, max_queue_s=10.0)
    branches = tuple(range(1, 9))
    halves = [
        [text(0, "one"), gen(1, 2, name="a"), Fork(id=2, children=branches)],
        [gen(2 + child, 4, branch=child) for child in branches],
    ]
    start(rig, 1, *halves[0], *halves[1])
    start(rig, 2, text(0, "two"), gen(1, 2))
    assert isinstance(failure(rig, 2), QueueFull), "one waits for its first step already"
    rig.core.step()
    start(rig, 3, text(0, "three"), gen(1, 2))  # nobody is at the door
    start(rig, 4, text(0, "four"), gen(1, 2))
    assert isinstance(failure(rig, 4), QueueFull)
    for _ in range(3):
        rig.core.step()
    rig.time = 11.0  # branches of programs that have begun wait as long as it takes
    rig.run()
    assert len(rig.of(1, ValueEvent)) == 9
    assert rig.of(1, DoneEvent)
    assert rig.of(3, DoneEvent)


PHASES = ["waiting", "prefill", "decode", "select", "forked", "before a join"]


@pytest.mark.parametrize("phase", PHASES)
def test_an_abort_in_any_phase_frees_everything_within_two_steps(phase: str) -> None:
    rig = Rig(chunked_prefill_size=16, max_running_requests=4)
    ask(rig, 1, "neighbour", 30)
    rig.core.step()
    nodes: list[object] = [text(0, "z" * 60)]
    if phase == "select":
        nodes.append(Select(id=1, name="pick", choices=("left", "lean", "right")))
    elif phase in ("forked", "before a join"):
        nodes.append(Fork(id=1, children=(1, 2)))
        nodes += [gen(2, 4, branch=1), gen(3, 40, branch=2)]
        nodes.append(Join(id=4, children=(1, 2)))
    else:
        nodes.append(gen(1, 40))
    if phase == "waiting":
        for program in range(10, 14):
            ask(rig, program, "busy" * 5, 30)
    start(rig, 2, *nodes)
    for _ in range({"waiting": 1, "prefill": 2, "decode": 8, "select": 4, "forked": 7, "before a join": 13}[phase]):
        rig.core.step()
    num_programs = rig.core.snapshot().num_programs
    assert num_programs == (6 if phase == "waiting" else 2)
    rig.core.cancel(2)
    for _ in range(2):
        rig.core.step()
    after = rig.core.snapshot()
    after.check()
    sequences = {request.sequence.id for request in (*rig.core.scheduler.running, *rig.core.scheduler.waiting)}
    assert len(sequences) == after.num_programs == num_programs - 1
    assert failure(rig, 2).code == "cancelled"
    rig.run()
    assert value(rig, 1) == greedy("neighbour", 30)
    assert rig.core.snapshot().pages_held == 0


@pytest.mark.parametrize("seed", range(6))
def test_row_52_nothing_leaks_over_random_lives(seed: int) -> None:
    """Programs that start, fork, select, are cancelled, run out of time or of room; both laws after each step."""
    pick = random.Random(seed)
    page_size = pick.choice([1, 4])
    rig = Rig(
        num_pages=240 // page_size,
        page_size=page_size,
        chunked_prefill_size=32,
        max_running_requests=5,
        schedule_conservativeness=pick.choice([0.1, 1.0]),
        schedule_policy=pick.choice(["program", "lpm", "fcfs"]),
    )
    program = 0
    for _ in range(250):
        rig.time += pick.random()
        match pick.randrange(6):
            case 0:
                program += 1
                ask(rig, program, pick.choice("abc") * pick.randrange(1, 90), pick.randrange(1, 60))
            case 1:
                program += 1
                children = (1, 2, 3)
                nodes = [text(0, "p" * pick.randrange(1, 60)), Fork(id=1, children=children)]
                nodes += [gen(1 + child, pick.randrange(1, 20), branch=child, name=f"v{child}") for child in children]
                nodes += [Join(id=6, children=children)]
                nodes += [Release(id=6 + child, branch=child) for child in children]
                nodes += [text(10, "then"), Select(id=11, name="s", choices=("yes", "no", "yet"))]
                start(rig, program, *nodes, deadline_s=pick.choice([None, 5.0]))
            case 2 if program:
                rig.core.cancel(pick.randrange(1, program + 1))
            case _:
                rig.core.step()
                rig.core.snapshot().check()
    rig.run()
    stats = rig.core.snapshot()
    assert (stats.pages_held, stats.num_programs, stats.num_running, stats.num_waiting) == (0, 0, 0, 0)
    assert rig.core.flush_cache() == stats.pages_cached
    assert rig.core.snapshot().pages_free == 240 // page_size
    ends = [len(rig.of(each, DoneEvent)) + len(rig.of(each, FailedEvent)) for each in range(1, program + 1)]
    assert ends == [1] * program
