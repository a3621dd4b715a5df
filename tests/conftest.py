"""Fixtures that every tier shares, and the house rule that each test leaves the place as it found it.

Owns the engine fixtures and the check after every test: no child process, no non-daemon thread, and the memory and
counter laws of every shared engine. An engine fixture is shared (starting one costs seconds), so the processes that
exist when a test begins are its baseline; only what a test adds and leaves is a leak.
"""

from __future__ import annotations

import os
import threading
import time
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


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaks a process or thread, or after which a shared engine breaks a law."""
    # Shared engines start before the baseline is taken, whatever the order of a test's arguments.
    for name in ("dummy_engine", "smollm2"):
        if name in request.fixturenames:
            request.getfixturevalue(name)
    children, threads = set(child_processes()), lasting_threads()
    yield
    deadline = time.monotonic() + GRACE_S
    while True:
        new_children = {pid: line for pid, line in child_processes().items() if pid not in children}
        new_threads = lasting_threads() - threads
        if not (new_children or new_threads) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for engine in _shared:
        engine.check()
    if new_children or new_threads:
        pytest.fail(f"left behind: processes {new_children}, threads {sorted(t.name for t in new_threads)}")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture
def clean_env(tmp_path: Path) -> dict[str, str]:
    """An environment for subprocesses: a home of their own, no colours, nothing of the caller's `SGL_*`, `PYTHON*`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SGL_", "PYTHON"))}
    return {**kept, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "NO_COLOR": "1", "TERM": "dumb"}
