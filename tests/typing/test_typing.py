"""What type checkers know of programs: each line of `programs.py` that ends in `# reveals: T` or `# error: CODE` is
held to it, and no other line has an error. mypy runs strictly, on the package as users import it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs.py"
_LINE = re.compile(r"programs\.py:(?P<line>\d+): (?P<kind>error|note): (?P<text>.*?)(?:  \[(?P<code>[\w-]+)\])?$")


def test_checkers_know_arguments_and_captures(root: Path) -> None:
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
    wanted = {
        number: re.findall(r"(?:reveals|error): [^;]+", line.partition("# ")[2])
        for number, line in enumerate(PROGRAMS.read_text().splitlines(), 1)
        if "# reveals:" in line or "# error:" in line
    }
    assert found == wanted, done.stdout + done.stderr
