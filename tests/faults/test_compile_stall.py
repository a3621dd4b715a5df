"""A constraint that takes long to compile holds up its own program, and nobody else's (row 29; 33 for the abort)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.scripted import Rig

from sgl.grammars.spec import Regex
from sgl.lang.graph import DoneEvent, FailedEvent, Gen, Graph, LiteralText, ProgramOptions, Sampling, Text, ValueEvent
from sgl.runtime.faults import parse_faults

NUM_PLAIN = 20
NEW_TOKENS = 8


class Stalled:
    """A rig whose jobs run in threads; what is compiled for program 0 takes until `release`."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.released, self.reached, self.woken = threading.Event(), threading.Event(), threading.Event()
        self.rig = Rig()
        core = self.rig.core
        core._executor, core._wake = pool, self.woken.set
        core.faults = parse_faults(
            '{"in_compile": {"action": "sleep", "program": "slow"}}', allowed=True, sleep=self.sleep
        )  # fmt: skip
        self.submit(0, "slow", Regex("[ab]{3}"))
        assert self.reached.wait(30)

    def sleep(self, seconds: float) -> None:
        self.reached.set()
        assert self.released.wait(60)

    def submit(self, program: int, name: str, constraint: Regex | None = None) -> None:
        node = Gen(
            id=1, name="x", constraint=constraint, sampling=Sampling(max_new_tokens=NEW_TOKENS, temperature=0.0)
        )  # fmt: skip
        self.rig.core.open(program, ProgramOptions(name=name))
        text = Text(id=0, segments=(LiteralText(f"{program:02}:"),))
        self.rig.core.submit(program, Graph(nodes=(text, node)), finish=True)


@pytest.fixture
def stalled() -> Iterator[Stalled]:
    with ThreadPoolExecutor(2) as pool:
        stalled = Stalled(pool)
        yield stalled
        stalled.released.set()


def test_twenty_plain_requests_take_as_many_steps_as_without(stalled: Stalled) -> None:
    undisturbed = Rig(max_running_requests=32)
    rig = stalled.rig
    rig.core.apply(undisturbed.core.config, rig.core.limits)
    for program in range(1, NUM_PLAIN + 1):
        stalled.submit(program, "plain")
        node = Gen(id=1, name="x", sampling=Sampling(max_new_tokens=NEW_TOKENS, temperature=0.0))
        undisturbed.core.open(program, ProgramOptions())
        text = Text(id=0, segments=(LiteralText(f"{program:02}:"),))
        undisturbed.core.submit(program, Graph(nodes=(text, node)), finish=True)
    assert rig.run() == undisturbed.run()
    assert not stalled.released.is_set()
    for program in range(1, NUM_PLAIN + 1):
        assert [e.value for e in rig.of(program, ValueEvent)] == [e.value for e in undisturbed.of(program, ValueEvent)]
        assert len(rig.of(program, DoneEvent)) == 1
    assert not rig.events.get(0)

    stalled.released.set()
    assert stalled.woken.wait(30)
    rig.core.finish_jobs()
    rig.run()
    assert [len(event.value) for event in rig.of(0, ValueEvent)] == [3]


def test_another_constraint_compiles_meanwhile(stalled: Stalled) -> None:
    stalled.submit(1, "quick", Regex("[cd]{2}"))
    assert stalled.woken.wait(30)
    stalled.rig.core.finish_jobs()
    stalled.rig.run()
    assert [len(event.value) for event in stalled.rig.of(1, ValueEvent)] == [2]
    assert not stalled.rig.events.get(0)


def test_a_program_that_is_cancelled_while_it_compiles_computes_nothing(stalled: Stalled) -> None:
    rig = stalled.rig
    rig.core.cancel(0)
    assert [event.error.code for event in rig.of(0, FailedEvent)] == ["cancelled"]
    stalled.released.set()
    assert stalled.woken.wait(30)
    rig.core.finish_jobs()
    assert rig.run() == 0
    stats = rig.core.snapshot()
    assert (stats.requests, stats.prefill_tokens, stats.pages_held, stats.num_programs) == (0, 0, 0, 0)
