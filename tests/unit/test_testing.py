"""The pytest plugin that ships with the package, in a pytest of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TEST = """
import sgl

@sgl.function
def capital(s, country):
    s += f"The capital of {country} is " + sgl.gen("city", stop=".")

def test_capital(sgl_mock):
    mock = sgl_mock({"city": "Paris. And"})
    assert capital.run("France")["city"] == "Paris"
    assert mock.prompts == [("city", "The capital of France is ")]

def test_tokens_of_a_model(sgl_mock):
    sgl_mock(["Rome."], model="dummy")
    assert capital.run("Italy").get_meta_info("city")["prompt_tokens"] == len("The capital of Italy is ")
"""


def test_the_fixture(tmp_path: Path):
    (tmp_path / "test_program.py").write_text(TEST)
    # Named, in case the installed package is older than its entry point.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "sgl.testing", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
