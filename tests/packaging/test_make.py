"""The Makefile before anything is installed: what it would do, and what it says when Python does not fit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest


@pytest.fixture
def clone(root: Path, tmp_path: Path) -> Path:
    """The files that `make` reads, without an environment."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(root / name, tmp_path / name)
    shutil.copytree(root / ".ci", tmp_path / ".ci")
    return tmp_path


def outside_make() -> dict[str, str]:
    """This environment without what a make around the suite tells its children: its flags, its level, its targets."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}


def make(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *args], cwd=folder, capture_output=True, text=True, env=outside_make(), check=False)


def write_python(folder: Path, answer: int) -> Path:
    """A stand-in interpreter that answers the version check with `answer` and can do nothing else."""
    script = folder / "python-stand-in"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1 && exit 0\n[ "$1" = -c ] && exit {answer}\nexit 1\n'
    )
    script.chmod(0o755)
    return script


@pytest.mark.parametrize("target", ["demo", "test", "lint", "test-gpu"])
def test_every_target_sets_up_first(clone: Path, target: str) -> None:
    planned = make(clone, "--dry-run", target).stdout
    assert "venv" in planned
    assert "--constraint constraints.txt" in planned
    assert "--extra-index-url" not in planned


def test_torch_index_is_passed_on(clone: Path) -> None:
    planned = make(clone, "--dry-run", "demo", "TORCH_INDEX=https://example.org/cpu").stdout
    assert "--extra-index-url https://example.org/cpu" in planned


def test_old_python_is_refused_in_one_sentence(clone: Path) -> None:
    ended = make(clone, "demo", f"PYTHON={write_python(clone, 1)}")
    assert ended.returncode != 0
    assert "needs Python 3.11 or newer" in ended.stderr
    assert "Python 3.9.1" in ended.stderr
    assert "make PYTHON=" in ended.stderr


def test_python_without_venv_says_what_to_install(clone: Path) -> None:
    ended = make(clone, "demo", f"PYTHON={write_python(clone, 0)}")
    assert ended.returncode != 0
    assert "python3-venv" in ended.stderr
    assert not (clone / ".venv" / ".ready").exists()


def test_ci_runs_make_test_without_standard_input(clone: Path) -> None:
    (clone / "Makefile").write_text("test:\n\t@cat; echo ran in $$(basename $$PWD)\n")
    run = clone / ".ci" / "run"
    done = subprocess.run([run], cwd="/", capture_output=True, text=True, check=True, env=outside_make())
    assert done.stdout == f"ran in {clone.name}\n"


def test_constraints_pin_every_direct_dependency_within_its_range(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    minimum = dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", line).groups() for line in wanted)  # type: ignore[union-attr]
    lines = (root / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert pinned.keys() == minimum.keys()
    for name, version in pinned.items():
        numbers = [[int(part) for part in text.split(".")] for text in (version, minimum[name])]
        assert numbers[0] >= numbers[1], name
