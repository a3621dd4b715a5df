"""The leak check catches leaks: pytest runs on three tests of which two leave something behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = """
import subprocess, sys, threading

def test_leaves_a_process():
    test_leaves_a_process.child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

def test_leaves_a_thread():
    threading.Thread(target=threading.Event().wait, args=(2,), name="forgotten").start()

def test_leaves_nothing():
    subprocess.run([sys.executable, "-c", ""], check=True)
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
"""


def test_leak_check(tmp_path: Path, root: Path) -> None:
    conftest = (root / "tests" / "conftest.py").read_text(encoding="utf-8")
    (tmp_path / "conftest.py").write_text(conftest.replace("GRACE_S = 5.0", "GRACE_S = 0.2"))
    (tmp_path / "test_x.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        env={**os.environ, "COLUMNS": "400"},
    )
    errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR ")]
    assert len(errors) == 2, done.stdout
    assert any("test_leaves_a_process" in line and "input()" in line for line in errors), errors
    assert any("test_leaves_a_thread" in line and "forgotten" in line for line in errors), errors
