"""The leak check catches leaks: pytest runs, with the suite's own settings, on tests that do and do not leave something
behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = """
import os, socket, subprocess, sys, tempfile, threading
from concurrent.futures import Future

from sgl.errors import InternalError
from sgl.lang.graph import Gen, Graph, LiteralText, ProgramOptions, Sampling, Text
from sgl.runtime import client
from sgl.runtime.engine import Engine
from support.scripted import Rig

kept = []

class BrokenClient:
    \"\"\"What the check sees of an engine whose worker finds a law broken.\"\"\"
    alive, info, _sinks, _futures = True, {"model": "x"}, {}, {}

    def ask(self, make):
        answer = Future()
        answer.set_exception(InternalError("memory law broken in the worker"))
        return answer

def test_breaks_the_memory_law():
    kept.append(Rig())
    kept[-1].core.stats.pages_total += 1

def test_breaks_the_counter_law():
    kept.append(Rig())
    kept[-1].core.stats.prompt_tokens += 1

def test_breaks_a_law_in_the_worker():
    kept.append(BrokenClient())
    client._clients.add(kept[-1])

def test_nothing_is_left_by_a_client_that_is_gone():
    client._clients.discard(kept[-1])

def test_leaves_a_program(dummy_engine):
    nodes = (Text(id=0, segments=(LiteralText("x"),)), Gen(id=1, name="x", sampling=Sampling(max_new_tokens=2)))
    kept.append(dummy_engine.open(kept.append, ProgramOptions()))
    kept[-1].submit(Graph(nodes=nodes))

def test_nothing_is_left_by_a_program_that_ends(dummy_engine):
    session = next(each for each in kept if hasattr(each, "cancel"))
    session.cancel()
    dummy_engine.generate("x", {"max_new_tokens": 2})

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
    "test_breaks_the_memory_law": "memory law broken: 256 free + 0 cached + 0 held is not 257 pages",
    "test_breaks_the_counter_law": "counter law broken: 1 prompt tokens",
    "test_breaks_a_law_in_the_worker": "memory law broken in the worker",
    "test_leaves_a_program": "an engine is not idle: {'num_programs': 1",
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
        env={**os.environ, "COLUMNS": "1000", "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"},
    )
    lines = done.stdout.splitlines()
    errors = {line.partition("::")[2].split()[0]: line for line in lines if line.startswith("ERROR ")}
    assert errors.keys() == LEAKS.keys(), done.stdout
    for name, left in LEAKS.items():
        assert left in errors[name], name
    failures = {line.partition("::")[2].split()[0] for line in lines if line.startswith("FAILED ")}
    assert failures == {"test_raises_in_a_thread", "test_raises_in_a_finalizer"}, done.stdout
    assert sum("::test_nothing_is_left" in line for line in lines if line.startswith("PASSED ")) == 4, done.stdout
