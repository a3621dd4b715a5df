"""The step timeline: what it says equals what the engine counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import sgl
from sgl.errors import ConfigError
from sgl.runtime.plan import StepPlan
from sgl.runtime.simulator import LatencyModel
from sgl.runtime.stats import Stats
from sgl.runtime.trace import Tracer


@sgl.function
def judge(s) -> None:  # type: ignore[no-untyped-def]
    s += "Essay: " + "words " * 20
    forks = s.fork(2)
    for index, fork in enumerate(forks):
        fork += f" aspect {index}: " + sgl.gen("note", max_tokens=8, ignore_eos=True)
    forks.join()
    s += " grade: " + sgl.select("grade", choices=["good", "bad"])


def test_the_timeline_of_a_program(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with sgl.Engine(model_path="dummy", max_total_tokens=2048, chunked_prefill_size=64, trace_file=str(path)) as engine:
        judge.run(backend=engine, temperature=0)
        stats = engine.stats()
        open_events = json.loads(path.read_text() + "]")  # readable while the engine runs
    events = json.loads(path.read_text())
    assert events == open_events
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names[(1, None)] == "judge #1"
    assert {names[(1, branch)] for branch in (0, 1, 2)} == {"branch 0", "branch 1", "branch 2"}
    slices = [e for e in events if e["ph"] == "X"]
    steps = [e for e in slices if e["pid"] == 0]
    assert len(steps) == stats["forwards"]
    # A generation's last token is drawn and never computed: each of the two computes one less than it draws.
    assert sum(e["args"]["tokens"] for e in steps) == stats["prefill_tokens"] + stats["decode_tokens"] - 2
    assert [e["ts"] for e in steps] == sorted(e["ts"] for e in steps)
    nodes = [e for e in slices if "node" in e["args"]]
    assert [e["name"] for e in nodes].count("note") == 2
    for node in nodes:
        inside = [
            e
            for e in slices
            if e["pid"] == 1
            and e["tid"] == node["tid"]
            and e["name"] in ("prefill", "decode")
            and node["ts"] <= e["ts"]
            and e["ts"] + e["dur"] <= node["ts"] + node["dur"] + 1
        ]
        assert inside, node
    pages = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "pages"]
    assert all(sum(each.values()) == 2048 for each in pages)
    fitted = LatencyModel.from_trace(path)
    assert fitted.step_s + fitted.token_s + fitted.pair_s > 0


def test_sgl_trace_runs_a_program_and_writes_the_file(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sgl\n"
        "@sgl.function\n"
        "def ask(s):\n"
        "    s += 'hello ' + sgl.gen('x', max_tokens=4, ignore_eos=True)\n"
        "print(len(ask.run()['x']) > 0)\n"
    )
    trace = tmp_path / "out.json"
    command = [sys.executable, "-m", "sgl.cli", "trace", "-o", str(trace), "--model-path", "dummy", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert "ui.perfetto.dev" in done.stderr
    assert any(event["name"] == "x" for event in json.loads(trace.read_text()) if event["ph"] == "X")

    command[command.index(str(trace))] = "/dev/full"
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "True\n"), done.stderr
    assert done.stderr.startswith("error: the timeline in /dev/full is not whole: "), "one error, and nothing else"
    assert "No space left" in done.stderr
    assert len(done.stderr.splitlines()) == 2


def test_a_file_that_cannot_be_written_is_told_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace_file"):
        Tracer(tmp_path / "missing" / "trace.json", lambda: 0.0)


def test_a_full_disk_ends_the_trace_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    tracer = Tracer("/dev/full", lambda: 0.0)
    plan = StepPlan(chunks=())
    phase = tracer.timed(lambda plan: None)
    for _ in range(3):
        phase(plan)
        phase(plan)
        tracer.step(plan, tracer.take_times(), [], Stats())
    tracer.close()
    assert [record.message.partition(":")[0] for record in caplog.records] == ["trace_file is switched off"]
