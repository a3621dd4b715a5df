"""Runs recorded, played back without a model, and branched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.suite import SUITE, Case, judge

import sgl
from sgl.errors import Cancelled, GenerationError, InvalidParameter, InvalidProgram
from sgl.lang.graph import Gen, TextEvent
from sgl.lang.replay import Recording
from sgl.runtime.text.template import ChatTemplate, template_clock

if TYPE_CHECKING:
    from sgl.runtime.engine import Engine


def record(path: Path, program: sgl.SglFunction, *args: object, backend: object, **options: object) -> sgl.ProgramState:
    with sgl.Recorder(path, backend) as recorder:
        return program.run(*args, backend=recorder, **options)


@pytest.mark.parametrize("case", [case for case in SUITE if len(case.rows) == 1], ids=lambda case: case.name)
def test_a_replay_says_the_same_without_a_model(case: Case, dummy_engine: Engine, tmp_path: Path):
    file = tmp_path / "run.json"
    with sgl.Recorder(file, dummy_engine) as recorder:
        real = case.program.run(backend=recorder, **case.rows[0])
    played = case.program.run(backend=sgl.Replay(file), **case.rows[0])
    assert played.text() == real.text()
    for name in ("answer", "detail", "note", "grade", "solution", "json"):
        if name in real:
            assert played[name] == real[name]


@sgl.function
def steps(s, word):
    s += "Say " + word + ": " + sgl.gen("one", max_tokens=3)
    if s["one"] == "1":
        s += " more: " + sgl.gen("two", max_tokens=3)
    s += " end " + s.text()[:3] + sgl.select("end", ["x", "y"])


def test_batches_streams_and_reads_of_states(tmp_path: Path):
    file = tmp_path / "run.json"
    with sgl.Recorder(file, sgl.MockBackend({"one": ["1", "0"], "two": "2"}, choices={"end": "y"})) as recorder:
        first = steps.run("a", backend=recorder, stream=True)
        pieces = list(first.text_iter())
        second = steps.run("b", backend=recorder)
    replay = sgl.Replay(file)
    played = steps.run_batch([["b"]], backend=replay)[0]  # found by what it sends, whatever the order
    assert played.text() == second.text() == "Say b: 0 end Sayy"
    streamed = steps.run("a", backend=replay, stream=True)
    assert list(streamed.text_iter()) == pieces
    with pytest.raises(InvalidProgram, match="no run of 'steps' is left"):
        steps.run("a", backend=replay)
    assert any(isinstance(e, TextEvent) for m in Recording.load(file).programs[0].messages for e in m.events)


def test_a_program_that_differs_is_told_where(tmp_path: Path):
    file = tmp_path / "run.json"
    record(file, steps, "a", backend=sgl.MockBackend({"one": "1", "two": "2"}))
    with pytest.raises(InvalidProgram, match=r"differs from its recording at node 0.*Say other") as caught:
        steps.run("other", backend=sgl.Replay(file))
    assert caught.value.location.function == "steps"


def test_failures_are_played_too(tmp_path: Path):
    file = tmp_path / "run.json"
    broken = sgl.MockBackend({"one": "1"}, errors={"two": GenerationError("no luck")})
    with pytest.raises(GenerationError):
        record(file, steps, "a", backend=broken)
    with pytest.raises(GenerationError, match="no luck"):
        steps.run("a", backend=sgl.Replay(file))
    state = steps.run("a", backend=sgl.Replay(file), stream=True)
    state.cancel()
    with pytest.raises((Cancelled, GenerationError)):
        state.sync()


def test_branching_executes_from_a_node_on(tmp_path: Path):
    file = tmp_path / "run.json"
    record(file, judge, "On tea.", backend=sgl.MockBackend({"note": ["n1", "n2", "n3"]}, choices={"grade": "A"}))
    nodes = [node for message in Recording.load(file).programs[0].messages for node in message.graph.nodes]
    grade = next(node.id for node in nodes if getattr(node, "name", "") == "grade")
    live = sgl.MockBackend(choices={"grade": "C"})
    branched = judge.run("On tea.", backend=sgl.Replay(file, until=grade, backend=live))
    assert (branched["note"], branched["grade"]) == (["n1", "n2", "n3"], "C")
    assert [name for name, _ in live.prompts] == ["grade"]
    assert "n1\nn2\nn3\nGrade:" in live.prompts[0][1]
    second = [node.id for node in nodes if isinstance(node, Gen)][1]
    live = sgl.MockBackend({"note": ["new2", "new3"]})
    assert judge.run("On tea.", backend=sgl.Replay(file, until=second, backend=live))["note"] == ["n1", "new2", "new3"]
    with pytest.raises(InvalidParameter, match="needs both"):
        sgl.Replay(file, until=3)


def test_templates_see_the_time_that_was_recorded(tmp_path: Path):
    file = tmp_path / "run.json"
    record(file, steps, "a", backend=sgl.MockBackend({"one": "0"}))
    now = Recording.load(file).programs[0].options.now
    assert now is not None
    seen: list[float | None] = []

    class Live(sgl.MockBackend):
        def open(self, sink, options):  # type: ignore[no-untyped-def]
            seen.append(options.now)
            return super().open(sink, options)

    steps.run("a", backend=sgl.Replay(file, until=1, backend=Live({"one": "0"})))
    assert seen == [now]
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}")
    assert template.render([], **template_clock(86400.0 * 365)) in ("1970-12-31", "1971-01-01")


def test_handles_of_the_engine_are_no_part_of_what_a_program_says(tmp_path: Path):
    file = tmp_path / "run.json"
    real = record(file, steps, "a", backend=sgl.MockBackend({"one": "1", "two": "2"}, choices={"end": "x"}))
    raw = json.loads(file.read_text())
    for message in raw["programs"][0]["messages"]:
        message["graph"]["handles"] = [["another", 0, 7]]  # as if it had been sent before the last one came
    file.write_text(json.dumps(raw))
    assert steps.run("a", backend=sgl.Replay(file)).text() == real.text()


def test_a_file_that_is_no_recording(tmp_path: Path):
    file = tmp_path / "run.json"
    file.write_text("{}")
    with pytest.raises(InvalidProgram, match="is no recording"):
        sgl.Replay(file)


def test_a_branch_goes_on_behind_the_answer_and_its_tokens(tmp_path: Path, dummy_engine: sgl.Engine):
    @sgl.function
    def thinks(s):
        s += "Q " + sgl.separate_reasoning(sgl.gen("x"), model_type="qwen3") + " then " + sgl.gen("y")

    with sgl.Recorder(tmp_path / "a.json", sgl.MockBackend(["<think>long</think>4", "5"])) as recorder:
        assert thinks.run(backend=recorder).text() == "Q 4 then 5"
    other = sgl.Replay(tmp_path / "a.json", until=3, backend=sgl.MockBackend({"y": "6"}))
    assert thinks.run(backend=other).text() == "Q 4 then 6"

    @sgl.function
    def two(s):
        s += "One " + sgl.gen("a", max_tokens=5, ignore_eos=True) + " two " + sgl.gen("b", max_tokens=3)
        return s._program.read_state(0).token_ids

    with sgl.Recorder(tmp_path / "b.json", dummy_engine) as recorder:
        recorded = two.run(backend=recorder, temperature=0).ret_value
    replay = sgl.Replay(tmp_path / "b.json", until=3, backend=dummy_engine)
    assert two.run(backend=replay, temperature=0).ret_value == recorded


def test_what_the_model_recommends_and_how_it_reasons_is_recorded(tmp_path: Path):
    class Recommending(sgl.MockBackend):
        def sampling_defaults(self):
            return {"temperature": 0.2}

        def server_info(self):
            return {**super().server_info(), "formats": {"reasoning": "qwen3", "tool": "hermes"}}

    @sgl.function
    def program(s):
        s += "Q " + sgl.separate_reasoning(sgl.gen("x"))

    with sgl.Recorder(tmp_path / "a.json", Recommending(["<think>long</think>4"])) as recorder:
        program.run(backend=recorder)
    state = program.run(backend=sgl.Replay(tmp_path / "a.json"))
    assert (state["x"], state["x_reasoning_content"]) == ("4", "long")
