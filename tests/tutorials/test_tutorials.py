"""Every tutorial and the README's program run as a reader would run them, and print what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted((ROOT / "tutorials").glob("*.py"))


def run(file: Path, cwd: Path) -> str:
    """What `sgl run FILE` prints; it has to end well and say nothing on standard error."""
    command = [sys.executable, "-m", "sgl.cli", "run", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, stdin=subprocess.DEVNULL, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_there_are_tutorials() -> None:
    assert TUTORIALS


@pytest.mark.parametrize("file", TUTORIALS, ids=lambda file: file.stem)
def test_tutorial(file: Path, tmp_path: Path) -> None:
    printed = run(file, tmp_path)
    titles = re.findall(r'^title\("(.+)"\)', file.read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"^== (.+)", printed, re.MULTILINE) == titles
    counted = {name: int(number) for name, number in re.findall(r"^(\w+) +(\d+)$", printed, re.MULTILINE)}
    assert counted["prompt_tokens"] == counted["cached_tokens"] + counted["prefill_tokens"]
    assert counted["cached_tokens"] > 0


def test_program_of_the_readme(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [program] = re.findall(r"```python\n(.+?)```", readme, re.DOTALL)
    [promised] = re.findall(r"this prints `(.+?)`", readme)
    (tmp_path / "program.py").write_text(program)
    assert run(tmp_path / "program.py", tmp_path).strip() == promised
