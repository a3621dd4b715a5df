"""The leak check catches leaks: pytest runs, with the suite's own settings, on tests that do and do not leave something
behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = """
import os, socket, subprocess, sys, tempfile, threading

kept = []

def test_leaves_a_process():
    kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

def test_leaves_a_thread():
    threading.Thread(target=threading.Event().wait, args=(2,), name="forgotten").start()

def test_leaves_a_socket():
    kept.append(socket.socket())

def test_leaves_a_pipe():
    kept.append(os.pipe())

def test_leaves_an_eventfd():
    kept.append(os.eventfd(0))

def test_leaves_another_eventfd():
    kept.append(os.eventfd(0))

def test_leaves_a_pidfd():
    kept.append(os.pidfd_open(os.getpid()))

def test_leaves_a_file(tmp_path):
    kept.append((tmp_path / "left.txt").open("w"))

def test_leaves_a_file_without_a_name():
    kept.append(tempfile.TemporaryFile())

def test_leaves_shared_memory():
    kept.append(tempfile.TemporaryFile(dir="/dev/shm"))

def test_raises_in_a_thread():
    thread = threading.Thread(target=int, args=("lost",))
    thread.start()
    thread.join()

def test_raises_in_a_finalizer():
    class Raises:
        def __del__(self):
            raise ValueError("lost")
    Raises()

def test_nothing_is_left_by_what_ends(tmp_path, capfd):
    subprocess.run([sys.executable, "-c", ""], check=True)
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    with socket.socket(), (tmp_path / "x").open("w"):
        pass

def test_nothing_is_left_by_what_libraries_open_once():
    kept.append(open("/dev/urandom", "rb"))
    kept.append(open(os.__file__))
"""
LEAKS = {
    "test_leaves_a_process": "input()",
    "test_leaves_a_thread": "forgotten",
    "test_leaves_a_socket": "socket:[",
    "test_leaves_a_pipe": "pipe:[",
    "test_leaves_an_eventfd": "'anon_inode:[eventfd]': 1",
    "test_leaves_another_eventfd": "'anon_inode:[eventfd]': 1",
    "test_leaves_a_pidfd": "'anon_inode:[pidfd]': 1",
    "test_leaves_a_file": "left.txt",
    "test_leaves_a_file_without_a_name": "(deleted)",
    "test_leaves_shared_memory": "/dev/shm/",
}


def test_leak_check(tmp_path: Path, root: Path) -> None:
    conftest = (root / "tests" / "conftest.py").read_text(encoding="utf-8")
    (tmp_path / "conftest.py").write_text(conftest.replace("GRACE_S = 5.0", "GRACE_S = 0.2"))
    (tmp_path / "test_x.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, "-c", str(root / "pyproject.toml"), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        env={**os.environ, "COLUMNS": "1000"},
    )
    lines = done.stdout.splitlines()
    errors = {line.partition("::")[2].split()[0]: line for line in lines if line.startswith("ERROR ")}
    assert errors.keys() == LEAKS.keys(), done.stdout
    for name, left in LEAKS.items():
        assert left in errors[name], name
    failures = {line.partition("::")[2].split()[0] for line in lines if line.startswith("FAILED ")}
    assert failures == {"test_raises_in_a_thread", "test_raises_in_a_finalizer"}, done.stdout
    assert sum("::test_nothing_is_left" in line for line in lines if line.startswith("PASSED ")) == 2, done.stdout
