"""Each fault point on a hand-driven engine: the program that is hit fails with a typed error, its neighbours get the
tokens of an undisturbed run, and both laws hold afterwards."""

from __future__ import annotations

import logging
import re

import pytest
from support.scripted import Rig, expected_greedy

from sgl.errors import ConfigError, DeadlineExceeded, SglError
from sgl.grammars.spec import Regex
from sgl.lang.graph import (
    DoneEvent,
    FailedEvent,
    Gen,
    Graph,
    LiteralText,
    ProgramOptions,
    Sampling,
    Select,
    Text,
    ValueEvent,
)
from sgl.runtime import program_run
from sgl.runtime.faults import parse_faults

VICTIM = 2
PROMPTS = {1: "first of four", 2: "second, the bad one", 3: "first of fours", 4: "fourth"}
INTERNALS = re.compile(r"0x[0-9a-f]{6,}|/[\w.-]+/|\.py\b|Traceback")
"""What no error for the outside may have: addresses, paths, file names."""


def submit(rig: Rig, program: int, *, finish: bool = True) -> None:
    nodes = (
        Text(id=0, segments=(LiteralText(PROMPTS[program]),)),
        Gen(id=1, name="x", sampling=Sampling(max_new_tokens=8, temperature=0.0)),
        Text(id=2, segments=(LiteralText("!"),)),
        Gen(id=3, name="y", sampling=Sampling(max_new_tokens=4, temperature=0.0), constraint=Regex("[a-z]{2,9}")),
        Select(id=4, name="z", choices=("yes", "no")),
    )
    rig.core.open(program, ProgramOptions(name=f"p{program}", stream=True))
    rig.core.submit(program, Graph(nodes=nodes), finish=finish)


def outcome(rig: Rig, program: int) -> list[tuple[str, tuple[int, ...]]]:
    return [(event.value, event.token_ids) for event in rig.of(program, ValueEvent)]


def failure(rig: Rig, program: int) -> SglError:
    (event,) = rig.of(program, FailedEvent)
    return SglError.from_info(event.error)


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, list[tuple[str, tuple[int, ...]]]]:
    rig = Rig()
    for program in PROMPTS:
        submit(rig, program)
    rig.run()
    assert bytes(outcome(rig, 1)[0][1]) == bytes(expected_greedy(PROMPTS[1].encode(), 8))
    return {program: outcome(rig, program) for program in PROMPTS}


def nothing_is_left(rig: Rig) -> None:
    stats = rig.core.snapshot()
    stats.check()
    assert (stats.num_programs, stats.num_running, stats.num_waiting, stats.pages_held) == (0, 0, 0, 0)
    assert rig.core.flush_cache() == stats.pages_cached
    assert rig.core.snapshot().pages_free == stats.pages_total


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("point", ["before_admit", "in_compile", "before_emit", "in_detok"])
def test_a_program_that_is_hit_fails_alone(
    point: str, at: int, undisturbed: dict[int, list[object]], caplog: pytest.LogCaptureFixture
) -> None:
    if point == "in_compile":
        at = 1  # the program has one constraint
    rig = Rig(faults={point: {"action": "raise", "program": f"p{VICTIM}", "at": at}})
    for program in PROMPTS:
        submit(rig, program)
    with caplog.at_level(logging.ERROR, logger="sgl"):
        rig.run()
    error = failure(rig, VICTIM)
    assert error.code == "internal_error"
    assert "InjectedFault" in str(error)
    assert not INTERNALS.search(str(error)), "row 71: no internals in error text"
    (error_id,) = re.findall("error id ([0-9a-f]{12})", error.message)
    assert error_id in caplog.text
    assert f"fault at {point} in <frame at 0x" in caplog.text, "the log has what the error has not"
    assert {p: outcome(rig, p) for p in PROMPTS if p != VICTIM} == {p: undisturbed[p] for p in PROMPTS if p != VICTIM}
    nothing_is_left(rig)
    submit(rig, VICTIM)  # the fault was for once: the same program runs now
    rig.run()
    assert outcome(rig, VICTIM)[-3:] == undisturbed[VICTIM]
    nothing_is_left(rig)


def test_a_program_that_cannot_be_started_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(now: float | None) -> dict[str, object]:
        raise OverflowError("timestamp out of range")

    rig = Rig()
    with monkeypatch.context() as patched:
        patched.setattr(program_run, "template_clock", broken)
        submit(rig, VICTIM)
    error = failure(rig, VICTIM)
    assert (error.code, "OverflowError" in error.message) == ("internal_error", True)
    submit(rig, 1)
    rig.run()
    assert outcome(rig, 1)
    nothing_is_left(rig)


def test_failing_to_free_harms_nobody(undisturbed: dict[int, list[object]], caplog: pytest.LogCaptureFixture) -> None:
    """The program's own result stands; the books are begun anew, and programs under way compute again what they had."""
    rig = Rig(faults={"on_free": {"action": "raise", "times": 0}})
    submit(rig, 1)
    rig.run(most_steps=3, to_end=False)
    for program in (2, 3, 4):
        submit(rig, program)
    rig.run()
    assert {program: outcome(rig, program) for program in PROMPTS} == undisturbed
    assert all(len(rig.of(program, DoneEvent)) == 1 for program in PROMPTS)
    assert caplog.text.count("could not be freed") == 4
    nothing_is_left(rig)


def test_a_cancelled_program_that_cannot_be_freed_leaves_nothing(undisturbed: dict[int, list[object]]) -> None:
    rig = Rig(faults={"on_free": {"action": "raise", "program": "p2"}})
    for program in PROMPTS:
        submit(rig, program)
    rig.run(most_steps=2, to_end=False)
    rig.core.cancel(VICTIM)
    assert failure(rig, VICTIM).code == "cancelled"
    rig.run()
    assert all(outcome(rig, program) == undisturbed[program] for program in (1, 3, 4))
    nothing_is_left(rig)


def test_row_57_nan_in_one_row_fails_that_row(undisturbed: dict[int, list[object]]) -> None:
    """A batch of four, NaN at the third step: that program gets a typed error, what it computed is not kept."""
    rig = Rig(faults={"in_forward": {"action": "nan", "program": f"p{VICTIM}", "at": 3}})
    for program in PROMPTS:
        submit(rig, program)
    rig.run()
    error = failure(rig, VICTIM)
    assert (error.code, error.status) == ("invalid_logits", 500)
    assert all(outcome(rig, program) == undisturbed[program] for program in (1, 3, 4))
    assert len(rig.runner.plans[0].chunks) == 4
    nothing_is_left(rig)


def test_row_58_a_step_that_raises_once_ends_its_batch(undisturbed: dict[int, list[object]]) -> None:
    rig = Rig(faults={"in_forward": {"action": "raise", "at": 4}})
    submit(rig, 1)
    submit(rig, 2)
    rig.run()
    for program in (1, 2):
        error = failure(rig, program)
        assert error.message.startswith("a model step failed: InjectedFault, error id ")
        assert not INTERNALS.search(str(error))
    submit(rig, 3)
    submit(rig, 4)
    rig.run()
    assert all(outcome(rig, program) == undisturbed[program] for program in (3, 4))
    nothing_is_left(rig)


def test_row_58_steps_that_always_raise_end_the_engine() -> None:
    rig = Rig(faults={"in_forward": {"action": "raise", "times": 0}})
    for program in (1, 2):
        submit(rig, program)
        rig.core.step()
        assert failure(rig, program).code == "internal_error"
    submit(rig, 3)
    with pytest.raises(SglError, match="a model step failed"):
        rig.core.step()


def test_a_slow_step_runs_into_the_deadline() -> None:
    rig = Rig(faults={"in_forward": {"action": "sleep", "seconds": 9, "at": 2}})
    rig.core.open(1, ProgramOptions(name="p1", deadline_s=5))
    nodes = (Text(id=0, segments=(LiteralText("x"),)), Gen(id=1, name="x", sampling=Sampling(max_new_tokens=50)))
    rig.core.submit(1, Graph(nodes=nodes), finish=True)
    rig.run()
    assert len(rig.runner.plans) == 2
    assert isinstance(failure(rig, 1), DeadlineExceeded)
    nothing_is_left(rig)


def test_stalled_seconds_are_of_the_work_not_of_the_pause() -> None:
    rig = Rig(faults={"in_forward": {"action": "sleep", "seconds": 7, "at": 2}})
    rig.advance(100)
    assert rig.core.stalled_s == 0
    submit(rig, 1)
    assert rig.core.stalled_s == 0
    rig.advance(3)
    assert rig.core.stalled_s == 3
    rig.core.step()
    assert rig.core.stalled_s == 0
    rig.run()
    assert rig.core.stalled_s == 0


def test_points_are_refused_without_the_switch() -> None:
    given = '{"in_forward": {"action": "raise"}}'
    with pytest.raises(ConfigError, match="SGL_TEST_FAULTS=1"):
        parse_faults(given, allowed=False)
    parse_faults(given, allowed=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("not json", "fault_points"),
        ('{"in_sampler": {"action": "raise"}}', "in_sampler"),
        ('{"in_forward": {"action": "explode"}}', "explode"),
        ('{"in_forward": {"action": "raise", "at": 0}}', ">= 1"),
        ('{"in_forward": {"action": "raise", "when": 1}}', "when"),
        ('{"in_detok": {"action": "nan"}}', "no logits"),
    ],
)
def test_wrong_points_are_told(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_faults(given, allowed=True)
