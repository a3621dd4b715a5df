"""What a step costs with ten thousand requests waiting: counted in comparisons of requests, not in seconds."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from support.scripted import Rig

from sgl.lang.graph import DoneEvent, Gen, Graph, LiteralText, ProgramOptions, Sampling, Text
from sgl.runtime import paging
from sgl.runtime import waiting as waiting_module
from sgl.runtime.alarms import Alarms
from sgl.runtime.cache_key import CacheKey
from sgl.runtime.sequence import ProgramInfo, Request, Sequence
from sgl.runtime.waiting import WaitingQueue

MANY = 10_000


def request(number: int) -> Request:
    made = Request(Sequence(number, CacheKey(), [1]), new_tokens=number % 7)
    made.program = ProgramInfo(number, "p")
    return made


@pytest.mark.parametrize("policy", ["program", "fcfs", "lof", "random"])
def test_admitting_from_a_long_queue_looks_at_few_keys(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: Counter[str] = Counter()

    def key_of(entry: tuple[object, Request]) -> object:
        looked["keys"] += 1
        return entry[0]

    queue = WaitingQueue(policy, lambda request: pytest.fail("looks nothing up"))  # type: ignore[arg-type]
    for number in range(MANY):
        queue.add(request(number))
    monkeypatch.setattr(waiting_module, "_key_of", key_of)
    for _ in range(100):
        (first,) = queue.first(1)
        queue.admit(first)
        first.last_step = 1
        queue.put_back(first)
        queue.remove(first)
    assert len(queue) == MANY - 100
    assert 0 < looked["keys"] < 100 * 12 * MANY.bit_length()


def test_alarms_of_what_ended_are_forgotten() -> None:
    alarms = Alarms()
    for number in range(MANY):
        alarms.set(number, 1e6 + number)
        if number % 100:
            alarms.drop(number)
    assert len(alarms._heap) < 3 * MANY // 100 + 64
    assert alarms.next() == 1e6
    assert alarms.due(1e6 + 250) == [0, 100, 200]
    assert alarms.due(1e6 + 250) == []


def test_a_full_pool_looks_into_the_future_of_many_states_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "_LOOKS_PER_STEP", 8)
    rig = Rig(num_pages=64, max_running_requests=4)
    outlook, looks = rig.core.scheduler.paging._outlook, []

    def counted() -> list[tuple[float, Sequence]]:
        found = list(outlook())
        looks.append((rig.core.scheduler.step, len(found)))
        return found

    rig.core.scheduler.paging._outlook = counted
    for program in range(60):
        rig.core.open(program, ProgramOptions())
        gen = Gen(id=1, name="x", sampling=Sampling(max_new_tokens=4, temperature=0.0, ignore_eos=True))
        graph = Graph(nodes=(Text(id=0, segments=(LiteralText(f"{program:02} and a prompt"),)), gen))
        rig.core.submit(program, graph, finish=True)
    rig.run()
    assert all(rig.of(program, DoneEvent) for program in range(60))
    assert len(looks) > 3
    for (before, num), (after, _) in pairwise(looks):
        assert (after - before) * 8 >= num, "an expensive look comes after as many steps as it costs"
