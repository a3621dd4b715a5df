"""Fixtures that every tier shares, and the house rule that each test leaves the place as it found it.

Owns the engine fixtures and the check after every test: no child process, no non-daemon thread, no open file; every
engine of the process keeps the memory and counter laws and is idle, with nothing waiting for it; one that a test closes
keeps the laws until then; and so does every hand-driven core (`support.scripted.Rig`). An engine fixture is shared
(starting one costs seconds), so what exists when a test begins is its baseline; only what a test adds and leaves is a
leak.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sgl.errors import SglError
from sgl.runtime import client as engine_client
from sgl.runtime.messages import GetStats

if TYPE_CHECKING:
    from sgl.runtime.engine import Engine

# Cores that are shared with others: threads that spin at barriers for a descheduled neighbour make a step ten times
# slower. Has to be said before torch is imported; workers inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Without a GPU Triton's kernels are interpreted, which has to be said before they are defined.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parents[1]
GRACE_S = 5.0
"""How long a process or thread that was told to end may take to do so."""
ANSWER_S = 30.0
"""How long a worker on a busy machine may take to answer between two steps."""
LAZILY_OPENED = ("/dev/", "/proc/", "/sys/", sys.prefix + os.sep, sys.base_prefix + os.sep)
"""Where libraries open files of their own at first use, and keep them."""

GAUGES = ("num_programs", "num_running", "num_waiting", "pages_held")
"""What is 0 on an engine with which nobody has anything open."""

_broken_at_close: list[str] = []
_close = engine_client.WorkerClient.close


def _checked_close(client: engine_client.WorkerClient, *args: float, **kwargs: float) -> None:
    """`WorkerClient.close`, which first asks for the laws; a worker that hangs has nothing to say."""
    if client.alive and client.info:
        try:
            client.ask(lambda request: GetStats(request, check=True)).result(ANSWER_S)
        except (TimeoutError, engine_client.EngineDead):
            pass
        except SglError as error:
            _broken_at_close.append(error.message)
    _close(client, *args, **kwargs)


engine_client.WorkerClient.close = _checked_close  # type: ignore[method-assign]


def _start(**fields: object) -> Iterator[Engine]:
    from sgl.runtime.engine import Engine

    with Engine(**fields) as engine:
        yield engine


@pytest.fixture(scope="session")
def dummy_engine() -> Iterator[Engine]:
    """An engine on the `dummy` model: random weights of a tiny shape, byte vocabulary, no download."""
    yield from _start(model_path="dummy", max_total_tokens=4096, num_threads=1)


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Engine]:
    """An engine on the embedded default model as users have it. The weights are fetched once into the user's cache."""
    yield from _start(model_path="smollm2-135m")


@pytest.fixture(scope="session")
def exact_smollm2() -> Iterator[Engine]:
    """The same model on torch in float32, to compare with transformers."""
    yield from _start(model_path="smollm2-135m", dtype="float32", kernels="torch")


def child_processes() -> dict[int, str]:
    """Direct children of this process: pid -> command line. Zombies count: somebody forgot to wait for them."""
    children: dict[int, str] = {}
    own = b"%d" % os.getpid()
    for pid in os.listdir("/proc"):
        if not pid.isdigit():
            continue
        try:
            if _read(f"/proc/{pid}/stat").rpartition(b")")[2].split(None, 2)[1] == own:
                command = _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace")
                children[int(pid)] = command or "zombie"
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    return children


def _read(path: str) -> bytes:
    """What a file of `/proc` says, in as few calls as can be: before and after each test there are hundreds."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 65536)
    finally:
        os.close(descriptor)


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


def engine_faults() -> list[str]:
    """What is wrong with the engines of this process: a broken law, or something left open."""
    faults = []
    for client in engine_client.live_clients():
        if not client.alive:
            continue
        try:
            stats = client.ask(lambda request: GetStats(request, check=True)).result(ANSWER_S)
        except (SglError, TimeoutError) as error:
            faults.append(f"an engine says: {error or 'nothing'}")
            continue
        left = {name: stats[name] for name in GAUGES if stats[name]}
        if client._sinks or client._futures:
            left["waiting for an answer"] = len(client._sinks) + len(client._futures)
        if left:
            faults.append(f"an engine is not idle: {left}")
    return faults


def rig_faults() -> list[str]:
    """The laws that hand-driven engine cores break."""
    scripted = sys.modules.get("support.scripted")
    faults = []
    for rig in list(scripted.Rig.alive) if scripted is not None else ():
        try:
            rig.core.snapshot().check()
        except SglError as error:
            faults.append(error.message)
        scripted.Rig.alive.discard(rig)
    return faults


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaks a process, a thread, an open file or a program, or after which an engine breaks a law."""
    # Shared engines start before the baseline is taken, whatever the order of a test's arguments.
    for name in ("dummy_engine", "smollm2", "exact_smollm2"):
        if name in request.fixturenames:
            request.getfixturevalue(name)
    children, threads, files = set(child_processes()), lasting_threads(), open_files()
    yield
    if (compiler := getattr(request.module, "COMPILER", None)) is not None:
        compiler.close()  # shared by the tests of a file; it starts again what it needs
    deadline = time.monotonic() + GRACE_S
    while True:
        new_children = {pid: line for pid, line in child_processes().items() if pid not in children}
        new_threads = lasting_threads() - threads
        new_files = open_files() - files
        engines = engine_faults()
        if not (new_children or new_threads or new_files or engines) or time.monotonic() > deadline:
            break
        gc.collect()  # a program ends with the last reference to its state, which may be in a cycle
        time.sleep(0.05)
    laws = [*engines, *rig_faults(), *_broken_at_close]
    _broken_at_close.clear()
    if new_children or new_threads or new_files:
        names = sorted(thread.name for thread in new_threads)
        pytest.fail(f"left behind: processes {new_children}, threads {names}, open files {dict(new_files)}; {laws}")
    if laws:
        pytest.fail("; ".join(laws))


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture
def clean_env(tmp_path: Path) -> dict[str, str]:
    """An environment for subprocesses: a home of their own, no colours, nothing of the caller's `SGL_*`, `PYTHON*`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SGL_", "PYTHON"))}
    return {**kept, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "NO_COLOR": "1", "TERM": "dumb"}
