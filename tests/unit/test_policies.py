"""Order of admission, preemption, retraction and the learned reserve: on the scripted model, by counting."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from support.scripted import Rig

from sgl.lang.graph import DoneEvent, Gen, Graph, LiteralText, ProgramOptions, Sampling, Text, ValueEvent
from sgl.runtime.cache_key import CacheKey
from sgl.runtime.estimate import OutputEstimate
from sgl.runtime.policies import MAX_SKIPS, Match, QueuePolicyName, victim
from sgl.runtime.radix import RadixNode, RadixTree
from sgl.runtime.sequence import ProgramInfo, Request, Sequence
from sgl.runtime.waiting import WaitingQueue


def request(number: int, *, new_tokens: int = 8, priority: int = 0, prompt: str = "") -> Request:
    return Request(Sequence(number, CacheKey(), list(prompt.encode())), new_tokens=new_tokens, priority=priority)


def queue_of(policy: QueuePolicyName, waiting: list[Request], match: Match | None, seed: int) -> WaitingQueue:
    queue = WaitingQueue(policy, match or no_match, seed=seed)
    for each in waiting:
        queue.add(each)
    return queue


def order(policy: QueuePolicyName, waiting: list[Request], match: Match | None = None, seed: int = 0) -> list[int]:
    return numbers(queue_of(policy, waiting, match, seed).first(len(waiting)))


def numbers(requests: Iterable[Request]) -> list[int]:
    return [each.sequence.id for each in requests]


def no_match(request: Request) -> tuple[RadixNode, int]:
    raise AssertionError("this policy looks nothing up")


def test_arrival_order_and_priority() -> None:
    waiting = [request(1), request(2, priority=1), request(3), request(4, priority=1)]
    assert order("fcfs", waiting) == [2, 4, 1, 3]
    queue = queue_of("fcfs", waiting, None, 0)
    assert queue.most_urgent.priority == 1
    queue.remove(waiting[1])
    assert numbers(queue.first(2)) == [4, 1]
    assert len(queue) == 3


def test_longest_output_first() -> None:
    waiting = [request(1, new_tokens=5), request(2, new_tokens=9), request(3, new_tokens=7)]
    assert order("lof", waiting) == [2, 3, 1]


def test_started_programs_first_and_the_longest_path_first_within_one() -> None:
    old, young = ProgramInfo(1, "old"), ProgramInfo(2, "young")
    waiting = [request(i) for i in range(1, 7)]
    of = (old, young, old, young, old, young)
    for each, program, path in zip(waiting, of, (5, 9, 7, 3, 6, 1), strict=True):
        each.program, each.path_len = program, path
    queue = queue_of("program", waiting, None, 0)
    assert numbers(queue.first(6)) == [3, 5, 1, 2, 4, 6]
    queue.admit(waiting[3])
    assert queue.is_at_door(young), "nothing of it is computed yet"
    queue.start(young, 0)
    assert not queue.is_at_door(young)
    assert numbers(queue.first(6)) == [2, 6, 3, 5, 1]
    for each in (waiting[1], waiting[4], waiting[5]):  # under the keys that they have now
        queue.remove(each)
    assert numbers(queue.first(6)) == [3, 1]


def test_overdue_and_put_back_requests_come_first() -> None:
    waiting = [request(1, new_tokens=1), request(2, new_tokens=9), request(3, new_tokens=2)]
    queue = queue_of("lof", waiting, None, 0)
    queue.admit(waiting[2])
    waiting[2].last_step = 7
    queue.put_back(waiting[2])
    assert numbers(queue.first(3)) == [3, 2, 1]
    for i in range(MAX_SKIPS - 2):  # with the one above one less than what may pass the first
        queue.add(later := request(10 + i, new_tokens=5))
        queue.admit(later)
    assert numbers(queue.first(3)) == [3, 2, 1]
    queue.add(later := request(9))
    queue.admit(later)
    assert numbers(queue.first(3)) == [1, 3, 2]


def test_programs_are_at_the_door_until_a_step_computes_anything_of_them() -> None:
    waiting = [request(i, new_tokens=i) for i in range(6)]
    first, second, third = (ProgramInfo(i, "p") for i in range(3))
    for each, program in zip(waiting, (None, first, second, second, third, third), strict=True):
        each.program = program
    queue = queue_of("lof", waiting, None, 0)
    assert queue.num_at_door == 3, "branches of a program are not counted, nor what belongs to none"
    assert queue.oldest_at_door is waiting[1], "the first belongs to no program: it has all the time it needs"
    queue.admit(waiting[1])
    queue.start(first, 0)
    queue.admit(waiting[2])
    assert queue.oldest_at_door is waiting[3]
    queue.remove(waiting[3])
    assert queue.oldest_at_door is waiting[4]
    queue.put_back(waiting[2])
    assert queue.oldest_at_door is waiting[2], "there was no room for its first step"
    queue.put_back(waiting[1])
    assert queue.oldest_at_door is waiting[2], "it had its first step"
    assert queue.num_at_door == 2
    queue.start(third, 0)
    assert not queue.is_at_door(third), "all of its branches are let in"
    assert queue.num_at_door == 1


@pytest.mark.parametrize("policy", ["program", "fcfs", "lof", "random"])
def test_the_queue_stays_sorted_whatever_comes_and_goes(policy: QueuePolicyName) -> None:
    pick = random.Random(3)
    programs = [ProgramInfo(i, "p") for i in range(8)]
    queue = queue_of(policy, [], None, 0)
    running: list[Request] = []
    for number in range(3000):
        match pick.randrange(4):
            case 0 | 1:
                made = request(number, new_tokens=pick.randrange(9))
                made.program = pick.choice(programs)
                made.priority = made.program.number % 2
                queue.add(made)
            case 2 if len(queue):
                (chosen,) = queue.first(1)
                queue.admit(chosen)
                if chosen.program is not None and not chosen.program.started:
                    queue.start(chosen.program, chosen.priority)
                running.append(chosen)
            case 3 if running:
                chosen = running.pop(pick.randrange(len(running)))
                chosen.last_step = number
                queue.put_back(chosen)
            case _:
                continue
        front = list(queue.first(len(queue)))
        assert len(front) == len(set(front)) == len(queue)
        assert front == sorted(front, key=lambda each: -each.priority)
        if policy == "program":
            fresh = [each for each in front if not each.last_step and each in queue._fresh]
            wanted = [(-each.priority, not each.program.started, each.program.number) for each in fresh if each.program]
            assert wanted == sorted(wanted)


def tree_of(*texts: str) -> RadixTree:
    import numpy as np

    tree = RadixTree()
    page = 0
    for each in texts:
        ids = np.frombuffer(each.encode(), dtype=np.uint8).astype(np.int32)
        tree.extend(tree.root(), ids, np.arange(page, page + len(ids), dtype=np.int32))
        page += len(ids)
    return tree


def matcher(tree: RadixTree):  # type: ignore[no-untyped-def]
    import numpy as np

    def match(each: Request) -> tuple[RadixNode, int]:
        node, pages = tree.match(tree.root(), np.array(each.sequence.token_ids, dtype=np.int32))
        return node, len(pages)

    return match


def test_longest_prefix_first() -> None:
    match = matcher(tree_of("abcdef"))
    waiting = [request(1, prompt="xyz"), request(2, prompt="abz"), request(3, prompt="abcd"), request(4, prompt="a")]
    assert order("lpm", waiting, match) == [3, 2, 4, 1]
    assert numbers(queue_of("lpm", waiting, match, 0).first(2)) == [3, 2]


def test_depth_first_keeps_subtrees_together_and_takes_the_heaviest_first() -> None:
    match = matcher(tree_of("aab", "aac", "b"))
    prompts = ["b1", "aab1", "aac1", "b2", "aac2", "aac3", "z"]
    waiting = [request(i, prompt=prompt) for i, prompt in enumerate(prompts, 1)]
    # The subtree under "aa" has four requests, "b" two, and the root itself one.
    assert order("dfs-weight", waiting, match) == [7, 3, 5, 6, 2, 1, 4]


def test_random_is_a_permutation_by_seed() -> None:
    waiting = [request(i) for i in range(50)]
    one, two, other = (order("random", waiting, seed=seed) for seed in (1, 1, 2))
    assert one == two != other
    assert sorted(one) == list(range(50)) != one


def test_victims() -> None:
    running = [request(i, prompt="p" * i, priority=i % 2) for i in range(1, 6)]
    for each, done in zip(running, (0, 5, 2, 2, 9), strict=True):
        each.completion_tokens = done
    assert victim("latest", running, []) is running[4]
    assert victim("latest", running, [5]) is running[3]
    assert victim("length", running, []) is running[3]  # two tokens lost, and the longer prompt of the two
    assert victim("priority", running, []) is running[3]
    assert victim("length", running[:1], []) is None  # the first admitted never gives way
    assert victim("length", running, [2, 3, 4, 5]) is None


def test_estimate_learns_forgets_and_is_raised_by_retraction() -> None:
    estimate = OutputEstimate()
    assert estimate.remaining(0, 1000) == 500
    for _ in range(300):
        estimate.ended(20)
    assert estimate.remaining(0, 1000) == 20
    assert estimate.remaining(0, 5) == 5  # never more than is allowed
    estimate.retracted()
    assert estimate.remaining(0, 1000) == 30
    for _ in range(300):
        estimate.ended(40)
    assert estimate.remaining(0, 1000) == 40  # the old lengths and the raised factor are gone
    assert OutputEstimate(2.0).remaining(0, 100) == 100


# --- in the engine --------------------------------------------------------------------------------------------------


def start(rig: Rig, program: int, prompt: str, n: int, **options: object) -> None:
    rig.core.open(program, ProgramOptions(**options))  # type: ignore[arg-type]
    nodes = (
        Text(id=0, segments=(LiteralText(prompt),)),
        Gen(id=1, name="x", sampling=Sampling(max_new_tokens=n, temperature=0.0, ignore_eos=True)),
    )
    rig.core.submit(program, Graph(nodes=nodes), finish=True)


def order_of_ends(rig: Rig, programs: range, most_steps: int = 5000) -> list[int]:
    ended: list[int] = []
    for _ in range(most_steps):
        if not rig.core.has_work:
            return ended
        rig.core.step()
        rig.core.snapshot().check()
        ended += [p for p in programs if p not in ended and rig.of(p, DoneEvent)]
    raise AssertionError("the engine makes no progress")


def test_an_urgent_request_displaces_the_least_urgent_one_and_both_end_right() -> None:
    def outputs(**changes: object) -> tuple[list[str], list[int], int]:
        rig = Rig(max_running_requests=1, **changes)
        start(rig, 1, "slow", 40)
        for _ in range(5):
            rig.core.step()
        start(rig, 2, "urgent", 4, priority=10)
        ended = order_of_ends(rig, range(1, 3))
        values = [event.value for program in (1, 2) for event in rig.of(program, ValueEvent)]
        return values, ended, rig.core.snapshot().preemptions

    displaced = outputs()
    waited = outputs(preemption_threshold=None)
    assert displaced[0] == waited[0]
    assert (displaced[1], displaced[2]) == ([2, 1], 1)
    assert (waited[1], waited[2]) == ([1, 2], 0)
    assert outputs(preemption_threshold=11)[2] == 0


def test_a_request_that_is_passed_over_is_served_in_bounded_time() -> None:
    """Longest output first starves short ones by itself; the age bound does not let it."""
    rig = Rig(max_running_requests=1, schedule_policy="lof", num_pages=512)
    start(rig, 0, "first", 3)
    rig.core.step()
    start(rig, 1, "short", 1)
    served_before = 0
    for program in range(2, MAX_SKIPS + 400):
        start(rig, program, "long", 2)
        while not rig.of(program, DoneEvent) and not rig.of(1, DoneEvent):
            rig.core.step()
        if rig.of(1, DoneEvent):
            break
        served_before += 1
    assert rig.of(1, DoneEvent)
    assert MAX_SKIPS - 2 <= served_before <= MAX_SKIPS + 2


@pytest.mark.parametrize("policy", ["program", "fcfs", "lpm", "dfs-weight", "lof", "random"])
@pytest.mark.parametrize("retraction", ["latest", "length", "priority"])
def test_every_policy_ends_everything_under_pressure_with_the_same_output(policy: str, retraction: str) -> None:
    calm = Rig(num_pages=4096, chunked_prefill_size=512)
    tight = Rig(num_pages=150, schedule_policy=policy, retraction_policy=retraction)
    for rig in (calm, tight):
        for program in range(12):
            start(rig, program, "shared prefix " + str(program % 3) * 20, 40 + program, priority=program % 2)
        order_of_ends(rig, range(12))
    for program in range(12):
        assert [e.value for e in tight.of(program, ValueEvent)] == [e.value for e in calm.of(program, ValueEvent)]
    assert tight.core.snapshot().retractions > 0


def test_room_is_reserved_as_generations_turn_out_to_be_short() -> None:
    """Generations that may be long but are short: once that is known, more of them run side by side."""

    def most_running(conservativeness: float) -> tuple[int, int]:
        rig = Rig(num_pages=220, schedule_conservativeness=conservativeness)
        eos = "~"
        for program in range(40):
            rig.core.open(program, ProgramOptions())
            nodes = (
                Text(id=0, segments=(LiteralText(f"{program:02}"),)),
                Gen(id=1, name="x", sampling=Sampling(max_new_tokens=100, temperature=0.0, stop=(eos,))),
            )
            rig.core.submit(program, Graph(nodes=nodes), finish=True)
        most = 0
        while rig.core.has_work:
            rig.core.step()
            most = max(most, rig.core.snapshot().num_running)
        return most, rig.core.snapshot().retractions

    bold, careful = most_running(0.2), most_running(4.0)
    assert bold[0] > careful[0]
    assert careful[1] <= bold[1]
