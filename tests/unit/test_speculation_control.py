"""When rows wait to be guessed for, on the scripted model beside a device whose steps take invented seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest
from support.programs import start, text
from support.scripted import Rig, expected_greedy

from sgl.lang.graph import Gen, Sampling, ValueEvent
from sgl.runtime.device_clock import DeviceTime
from sgl.runtime.plan import StepPlan
from sgl.runtime.sequence import Request, Sampled
from sgl.runtime.speculation.control import adaptive_params
from sgl.runtime.speculation.drafter import Drafter
from sgl.runtime.speculation.proposer import Proposal


class Guesser:
    """Proposes what greedy decoding gives, or what it does not."""

    def __init__(self, *, right: bool) -> None:
        self.right = right

    def propose(self, request: Request, drafts: Sequence[int], room: int) -> Proposal:
        if not self.right:
            return Proposal([97] * min(room, 6), "guess", 3)
        context = [*request.sequence.token_ids, *drafts]
        return Proposal(expected_greedy(context, min(room, 6)), "guess", 3)

    def branches(self, request: Request, room: int) -> Sequence[Proposal]:
        return ()

    def prepare(self, rows: Sequence[tuple[Request, Sampled]], num_drafts: int) -> None:
        return

    def ended(self, request: Request) -> None:
        return


class Device:
    """A step that follows another takes 1 ms, one that is waited for 0.6 ms more, a token hardly anything.

    Attributes:
        slow: steps that are still to take 100 ms, as those do that are recorded.
        guessed: by step that decodes, whether it had drafts; `waited`: whether it was waited for.
    """

    def __init__(self, slow: int = 0) -> None:
        self.slow = slow
        self.guessed: list[bool] = []
        self.waited: list[bool] = []
        self._times: deque[DeviceTime] = deque()

    def ran(self, plan: StepPlan) -> None:
        decodes = all(chunk.sample is not None for chunk in plan.chunks) and plan.num_tokens < 100
        guesses = any(chunk.num_drafts for chunk in plan.chunks)
        waited = all(chunk.follows is None for chunk in plan.chunks)
        if decodes:
            self.guessed.append(guesses)
            self.waited.append(waited)
        is_usual = not (guesses and self.slow)
        self.slow -= not is_usual
        seconds = 1e-3 + 6e-4 * waited + 2e-6 * plan.num_tokens
        self._times.append(DeviceTime(seconds if is_usual else 0.1, 0.0, is_usual))

    def take(self) -> DeviceTime:
        return self._times.popleft()

    def rest(self) -> None:
        self._times.clear()


def decode(batch: int, *, right: bool, calls: int = 1, new_tokens: int = 150, slow: int = 0) -> tuple[Device, Rig]:
    """Programs of one node, so many together, call after call, guessed for as it pays."""
    device = Device(slow)
    drafter = Drafter(
        [Guesser(right=right)],
        most=7,
        most_of_step=256,
        adaptive=adaptive_params(None, 7),
        slope=0.01,
        most_of_row=16,
        most_tokens=256,
    )
    rig = Rig(
        device.ran,
        drafter=drafter,
        num_pages=6000,
        max_running_requests=batch,
        chunked_prefill_size=512,
        disable_overlap_schedule=False,
    )
    rig.core._device_clock = device  # type: ignore[assignment]
    node = Gen(id=1, name="x", sampling=Sampling(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True))
    for call in range(calls):
        for row in range(batch):
            start(rig, call * batch + row, text(0, f"row {call} {row} "), node)
        rig.run()
    for program in range(calls * batch):
        (value,) = rig.of(program, ValueEvent)
        assert len(value.token_ids) == new_tokens
    return device, rig


@pytest.mark.parametrize("batch", [1, 8, 24])
def test_guesses_that_are_wrong_are_hardly_ever_waited_for(batch: int) -> None:
    device, rig = decode(batch, right=False, calls=2)
    assert len(device.waited) >= 290
    assert sum(device.guessed) <= 16
    assert sum(device.waited) <= 27, "at the beginnings, and when it is tried again"
    first, second = (device.waited[i : i + 145] for i in (0, 150))
    assert sum(second) <= sum(first)
    assert rig.core.stats.forwards <= 304


@pytest.mark.parametrize("batch", [1, 8])
def test_guesses_that_are_right_are_waited_for(batch: int) -> None:
    device, rig = decode(batch, right=True)
    assert rig.core.stats.forwards < 60
    assert sum(device.guessed) > len(device.guessed) / 2


def test_steps_that_are_recorded_tell_nothing_of_others() -> None:
    """The first verifications take a hundred times as long as later ones: they go on all the same."""
    device, rig = decode(4, right=True, slow=5)
    assert device.slow == 0
    assert rig.core.stats.forwards < 60
    costs = rig.core.scheduler.drafter.costs  # type: ignore[union-attr]
    assert max(costs._seconds.values()) < 0.01


def test_all_rows_of_a_step_wait_or_none() -> None:
    device, rig = decode(8, right=True)
    for plan in rig.runner.plans:
        follows = {chunk.follows is not None for chunk in plan.chunks if chunk.sample is not None}
        assert len(follows) <= 1
    assert len(device.waited) < 100


def test_a_step_is_no_larger_than_what_is_recorded() -> None:
    _, rig = decode(8, right=True, new_tokens=60)
    guessing = [plan for plan in rig.runner.plans if any(chunk.num_drafts for chunk in plan.chunks)]
    assert guessing
    assert max(len(chunk.token_ids) for plan in guessing for chunk in plan.chunks) <= 16
    assert max(plan.num_tokens for plan in guessing) <= 256
