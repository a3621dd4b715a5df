"""Fixtures that every tier shares, and the house rule that each test leaves the place as it found it.

Owns the engine fixtures and the check after every test: no child process, no non-daemon thread, no open file, and the
memory and counter laws of every shared engine. An engine fixture is shared (starting one costs seconds), so what
exists when a test begins is its baseline; only what a test adds and leaves is a leak.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sgl.runtime.engine import Engine

# Cores that are shared with others: threads that spin at barriers for a descheduled neighbour make a step ten times
# slower. Has to be said before torch is imported; workers inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

ROOT = Path(__file__).resolve().parents[1]
GRACE_S = 5.0
"""How long a process or thread that was told to end may take to do so."""
LAZILY_OPENED = ("/dev/", "/proc/", "/sys/", sys.prefix + os.sep, sys.base_prefix + os.sep)
"""Where libraries open files of their own at first use, and keep them."""

_shared: list[Engine] = []


def _start(**fields: object) -> Iterator[Engine]:
    from sgl.runtime.engine import Engine

    engine = Engine(**fields)
    _shared.append(engine)
    try:
        yield engine
    finally:
        _shared.remove(engine)
        engine.shutdown()


@pytest.fixture(scope="session")
def dummy_engine() -> Iterator[Engine]:
    """An engine on the `dummy` model: random weights of a tiny shape, byte vocabulary, no download."""
    yield from _start(model_path="dummy", max_total_tokens=4096)


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Engine]:
    """An engine on the embedded default model in float32. The weights are fetched once into the user's cache."""
    yield from _start(model_path="smollm2-135m", dtype="float32")


def child_processes() -> dict[int, str]:
    """Direct children of this process: pid -> command line. Zombies count: somebody forgot to wait for them."""
    children: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        if int(parent) == os.getpid():
            children[int(entry.name)] = command or "zombie"
    return children


def lasting_threads() -> set[threading.Thread]:
    """Threads that would keep the interpreter from exiting."""
    return {thread for thread in threading.enumerate() if not thread.daemon}


def open_files() -> Counter[str]:
    """What this process holds open, by kind: each socket, pipe and file counts by its own name (`socket:[4711]`,
    `pipe:[4712]`, a path), eventfds, pidfds and the like by their number (`anon_inode:[eventfd]`: 3).

    Empty where a CUDA driver is: it opens pipes, sockets and eventfds of its own whenever it is first asked something.
    """
    targets: Counter[str] = Counter()
    if Path("/dev/nvidiactl").exists():
        return targets
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:  # closed meanwhile; the listing's own descriptor for one
            continue
        if target.startswith("/dev/shm/") or not target.startswith(LAZILY_OPENED):
            targets[target] += 1
    return targets


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaks a process, a thread or an open file, or after which a shared engine breaks a law."""
    # Shared engines start before the baseline is taken, whatever the order of a test's arguments.
    for name in ("dummy_engine", "smollm2"):
        if name in request.fixturenames:
            request.getfixturevalue(name)
    children, threads, files = set(child_processes()), lasting_threads(), open_files()
    yield
    deadline = time.monotonic() + GRACE_S
    while True:
        new_children = {pid: line for pid, line in child_processes().items() if pid not in children}
        new_threads = lasting_threads() - threads
        new_files = open_files() - files
        if not (new_children or new_threads or new_files) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for engine in _shared:
        engine.check()
    if new_children or new_threads or new_files:
        names = sorted(thread.name for thread in new_threads)
        pytest.fail(f"left behind: processes {new_children}, threads {names}, open files {dict(new_files)}")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture
def clean_env(tmp_path: Path) -> dict[str, str]:
    """An environment for subprocesses: a home of their own, no colours, nothing of the caller's `SGL_*`, `PYTHON*`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SGL_", "PYTHON"))}
    return {**kept, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "NO_COLOR": "1", "TERM": "dumb"}
