"""`sgl explain FILE`: the first run of a file, before it is made; all of them, with `--run`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from sgl.cli import main

PROGRAM = """
import sgl
import sys

backend = sgl.MockBackend({{"tool": "<b>", "answer": "yes"}})

@sgl.function
def ask(s, question):
    s += "Answer in a word. " + question + " " + sgl.gen("answer", max_tokens=3)
    if s["answer"] == "yes":
        s += " Why? " + sgl.gen("why", max_tokens=5)

{runs}
"""


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGL_MODEL_PATH", "dummy")  # the command writes it; afterwards it is as before
    monkeypatch.setattr(sys, "argv", ["sgl"])
    monkeypatch.setattr(sys, "path", list(sys.path))


def explain(tmp_path: Path, runs: str, *flags: str) -> int:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(runs=runs))
    with pytest.raises(SystemExit) as ended:
        main(["explain", "--model-path", "dummy", *flags, str(file)])
    return int(ended.value.code or 0)


def test_the_first_run_is_explained_and_the_file_ends_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = "ask.run_batch([['a'], ['b']], backend=backend)\nprint('made')"
    assert explain(tmp_path, runs, "--json", "--save", str(tmp_path / "plan.json")) == 0
    out = capsys.readouterr().out
    (plan,) = json.loads(out)
    assert (plan["rows"], plan["complete"], plan["predicted"]["requests"]) == (2, False, 2)
    assert "made" not in out
    assert json.loads((tmp_path / "plan.json").read_text()) == [plan]


def test_assumed_values_and_measured_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = "state = ask.run('a', backend=backend)\nprint('made', state['answer'])\nask.run('b', backend=backend)"
    page = tmp_path / "page.html"
    assert explain(tmp_path, runs, "--run", "--assume", "answer=yes", "--html", "-o", str(page)) == 0
    out = capsys.readouterr().out
    assert "made yes" in out
    assert out.count("measured") == 2
    assert "generations and selects                    2           2" in out
    assert page.read_text().count("<h1>Plan of ask</h1>") == 2


@pytest.mark.parametrize(
    "run",
    [
        "asyncio.run(ask.run_async('a', backend=backend))",
        "list(ask.batch([['a']], backend=backend))",
        "asyncio.run(started())",
    ],
)
def test_no_way_to_run_a_program_is_missed(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = f"import asyncio\nasync def started():\n    ask.start_async('a', backend=backend)\n{run}\nprint('made')"
    assert explain(tmp_path, runs, "--json") == 0
    out = capsys.readouterr().out
    assert json.loads(out)[0]["rows"] == 1
    assert "made" not in out


def test_a_flag_of_the_command_behind_the_file_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(runs=""))
    with pytest.raises(SystemExit):
        main(["explain", "--model-path", "dummy", str(file), "--run", "other"])
    told = [line for line in capsys.readouterr().err.splitlines() if "argument of the program" in line]
    assert len(told) == 1
    assert told[0].startswith("--run behind program.py")


def test_an_async_run_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = "import asyncio\nstate = asyncio.run(ask.run_async('a', backend=backend))\nprint('made', state['answer'])"
    assert explain(tmp_path, runs, "--run", "--assume", "answer=yes") == 0
    out = capsys.readouterr().out
    assert "made yes" in out
    assert out.count("measured") == 1


def test_a_compiled_run_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = "@sgl.function\ndef x(s):\n    s += 'x' + sgl.gen('y')\nx.compile().run(backend=backend)\nprint('made')"
    assert explain(tmp_path, runs) != 0
    assert "made" not in capsys.readouterr().out


def test_a_file_without_runs_has_its_programs_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert explain(tmp_path, "") == 0
    assert "arguments without a value count as their names: question" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("runs", "flags", "status", "message"),
    [
        ("del ask", (), 2, "has no program"),
        ("", ("--assume", "answer"), 2, "expected NAME=TEXT"),
        ("ask.run(quest='x', backend=backend)", (), 1, "row 0.*missing a required argument"),
        ("1 / 0", (), 1, "ZeroDivisionError"),
    ],
)
def test_what_goes_wrong_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], runs: str, flags: tuple[str, ...], status: int, message: str
):
    assert explain(tmp_path, runs, *flags) == status
    assert re.search(message, capsys.readouterr().err)
