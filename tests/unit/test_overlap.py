"""Steps that overlap, beside steps one after another: scripted model, fake clock. `test_core.py` runs on both."""

from __future__ import annotations

import msgspec
from support.programs import start, text
from support.scripted import Rig, expected_greedy

from sgl.errors import Cancelled, InternalError, SglError
from sgl.grammars.spec import Regex
from sgl.lang.graph import FailedEvent, Fork, Gen, Join, Node, Sampling, Select, ValueEvent


def gen(id: int, branch: int = 0, n: int = 6, name: str = "x", **sampling: object) -> Gen:
    fields = {"max_new_tokens": n, "temperature": 0.0, **sampling}
    return Gen(id=id, branch=branch, name=name, sampling=Sampling(**fields))


def values(rig: Rig, program: int) -> list[str]:
    return [event.value for event in rig.of(program, ValueEvent)]


def greedy(prompt: str, n: int) -> str:
    return bytes(expected_greedy(list(prompt.encode()), n)).decode()


def failure(rig: Rig, program: int) -> SglError:
    (event,) = rig.of(program, FailedEvent)
    return SglError.from_info(event.error)


def both(*nodes: Node, programs: int = 3, **changes: object) -> tuple[Rig, Rig]:
    """The same programs on a rig whose steps overlap, and on one whose steps do not."""
    rigs = Rig(disable_overlap_schedule=False, **changes), Rig(disable_overlap_schedule=True, **changes)
    for rig in rigs:
        for program in range(programs):
            start(rig, program, text(0, "row " * (program + 1)), *nodes)
        rig.run()
    return rigs


def test_overlap_changes_no_outcome_and_no_counter() -> None:
    """Forks, selects, constraints with forced tokens, budgets that steer, log-probabilities, penalties, seeds."""
    nodes = (
        Fork(id=1, children=(1, 2)),
        gen(2, branch=1, n=9, name="a", temperature=1.0, seed=5, return_logprob=True, top_logprobs_num=2),
        gen(3, branch=2, n=9, name="b", frequency_penalty=1.5, min_new_tokens=4),
        Join(id=4, children=(1, 2)),
        Gen(
            id=5,
            name="c",
            constraint=Regex(pattern='\\{"name": "[a-z]{1,9}", "age": [0-9]+\\}'),
            sampling=Sampling(max_new_tokens=30, temperature=1.0, return_logprob=True),
        ),
        Select(id=6, name="d", choices=("yes", "yet", "no")),
        gen(7, n=5, name="e"),
    )
    overlapped, plain = both(*nodes, num_pages=700)
    for program in range(3):
        ours, others = overlapped.of(program, ValueEvent), plain.of(program, ValueEvent)
        by_name = {event.name: msgspec.structs.replace(event, latency_s=0.0, first_s=0.0) for event in others}
        assert {event.name: msgspec.structs.replace(event, latency_s=0.0, first_s=0.0) for event in ours} == by_name
        assert by_name["c"].usage.forced_tokens > 0
    stats, expected = (msgspec.structs.asdict(rig.core.snapshot()) for rig in (overlapped, plain))
    assert stats.pop("forwards") != expected.pop("forwards")
    assert stats == expected
    assert any(chunk.follows is not None for plan in overlapped.runner.plans for chunk in plan.chunks)


def test_a_row_that_ends_is_computed_once_more_and_its_slot_given_back() -> None:
    prompt = "stop here"
    output = expected_greedy(list(prompt.encode()), 12)
    stop = output[6]
    assert stop not in output[:6]
    for overlaps, forwards in ((False, 7), (True, 8)):
        rig = Rig(disable_overlap_schedule=not overlaps)
        start(rig, 1, text(0, prompt), gen(1, n=12, stop_token_ids=(stop,)), finish=False)
        rig.run()
        assert (rig.core.snapshot().forwards, len(rig.runner.plans)) == (7, forwards)
        (sequence,) = (branch.sequence for branch in rig.core._programs[1]._branches.values())
        assert len(sequence) == len(prompt) + 6
        assert sequence.num_computed == len(sequence.pages) == len(sequence)


def test_a_length_that_is_known_costs_no_forward() -> None:
    rig = Rig(disable_overlap_schedule=False)
    start(rig, 1, text(0, "hello"), gen(1, n=6))
    rig.run()
    assert len(rig.runner.plans) == 6


def test_what_is_cancelled_in_flight_leaves_nothing() -> None:
    """At every moment, in prefill and in decoding, alone and beside others; its pages are given to others at once."""
    for at in range(1, 12):
        rig = Rig(disable_overlap_schedule=False, num_pages=150, chunked_prefill_size=24)
        start(rig, 1, text(0, "k" * 50), gen(1, n=20))
        start(rig, 2, text(0, "other"), gen(1, n=20))
        rig.run(most_steps=at, to_end=False)
        rig.core.cancel(1)
        rig.core.snapshot().check()
        start(rig, 3, text(0, "n" * 60), gen(1, n=20))
        rig.run()
        assert values(rig, 2) == [greedy("other", 20)]
        assert values(rig, 3) == [greedy("n" * 60, 20)]
        assert isinstance(failure(rig, 1), Cancelled)
        assert rig.core.snapshot().pages_held == 0


def test_a_forward_that_fails_does_not_take_the_step_before_with_it() -> None:
    """The first program has drawn its last token when the forward of the others raises."""
    rig = Rig(disable_overlap_schedule=False, faults={"in_forward": {"action": "raise", "at": 5}})
    start(rig, 1, text(0, "first"), gen(1, n=4))
    start(rig, 2, text(0, "second"), gen(1, n=9))
    rig.run()
    assert values(rig, 1) == [greedy("first", 4)]
    assert isinstance(failure(rig, 2), InternalError)
    start(rig, 3, text(0, "third"), gen(1, n=4))
    rig.run()
    assert values(rig, 3) == [greedy("third", 4)]


def test_overlap_can_be_switched_while_the_engine_runs() -> None:
    rig = Rig(disable_overlap_schedule=False)
    start(rig, 1, text(0, "hello"), gen(1, n=30))
    for step in range(30):
        switched = msgspec.structs.replace(rig.core.config, disable_overlap_schedule=step % 3 == 0)
        rig.core.apply(switched, rig.core.limits)
        rig.core.step()
        rig.core.snapshot().check()
    rig.run()
    assert values(rig, 1) == [greedy("hello", 30)]
