"""What type checkers know of programs: each line of `programs.py` that ends in `# reveals: T` or `# error: CODE` is
held to it, and no other line has an error. mypy runs strictly, on the package as users import it; pyright (as
basedpyright, whose wheel brings its own node) where it is installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs.py"
_LINE = re.compile(r"programs\.py:(?P<line>\d+): (?P<kind>error|note): (?P<text>.*?)(?:  \[(?P<code>[\w-]+)\])?$")


def test_mypy_knows_arguments_and_captures(root: Path) -> None:
    command = [sys.executable, "-m", "mypy", str(PROGRAMS)]  # with the options, and the cache, of `mypy -p sgl`
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    found: dict[int, list[str]] = {}
    for match in filter(None, map(_LINE.search, done.stdout.splitlines())):
        text = match["text"]
        if match["kind"] == "note":
            if not text.startswith("Revealed type is"):
                continue
            text = re.sub(r"\b(?:builtins|programs|typing|sgl(?:\.\w+)+)\.", "", text.split('"')[1]).replace("?", "")
            found.setdefault(int(match["line"]), []).append(f"reveals: {text}")
        else:
            found.setdefault(int(match["line"]), []).append(f"error: {match['code']}")
    assert found == wanted(), done.stdout + done.stderr


def wanted(*, codes: bool = True) -> dict[int, list[str]]:
    """Per line, what a checker has to say; without codes, of errors only that there is one."""
    marks = {
        number: re.findall(r"(?:reveals|error): [^;]+", line.partition("# ")[2])
        for number, line in enumerate(PROGRAMS.read_text().splitlines(), 1)
        if "# reveals:" in line or "# error:" in line
    }
    return marks if codes else {n: ["error" if m.startswith("error") else m for m in all] for n, all in marks.items()}


def test_pyright_knows_them_too(root: Path) -> None:
    pytest.importorskip("basedpyright", reason="basedpyright is not installed")
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, str(PROGRAMS)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    found: dict[int, list[str]] = {}
    for told in json.loads(done.stdout)["generalDiagnostics"]:
        line = told["range"]["start"]["line"] + 1
        if told["severity"] == "error":
            found.setdefault(line, []).append("error")
        elif told["severity"] == "information" and told["message"].startswith("Type of "):
            found.setdefault(line, []).append("reveals: " + told["message"].split('" is "')[1].rstrip('"'))
    assert found == wanted(codes=False), done.stdout[-4000:] + done.stderr
