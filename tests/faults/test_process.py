"""Life and death of an engine's processes: who is told what, who ends, and what is left. Tests are named by their row
of the fault table where they have one."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import pickle
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import zmq
from support.child import Child, gone

import sgl
from sgl.errors import ConfigError, EngineDead, InternalError, SglError, Unsupported
from sgl.lang.graph import Event, Gen, Graph, LiteralText, ProgramOptions, Sampling, Text
from sgl.runtime import rendezvous
from sgl.runtime.engine import Engine
from sgl.runtime.messages import Unpin
from sgl.runtime.watchdog import Watchdog

GREEDY = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
LONG = {"max_new_tokens": 1900, "temperature": 0, "ignore_eos": True}


def collect(errors: list[BaseException], call: object, *args: object, **kwargs: object) -> threading.Thread:
    """Run `call` on a thread of its own and keep what it raises."""

    def run() -> None:
        try:
            call(*args, **kwargs)  # type: ignore[operator]
        except SglError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def until_running(engine: Engine, number: int) -> None:
    while engine.stats()["num_running"] < number:
        time.sleep(0.01)


# --- the worker dies ------------------------------------------------------------------------------------------------


@sgl.function
def endless(s: sgl.ProgramState) -> None:
    s += "x" + sgl.gen("x", max_tokens=1900, ignore_eos=True)


def test_row_62_worker_killed_in_the_middle_of_everything() -> None:
    """Every open program is told, of whatever kind it is, and the next call says what to do."""
    with Engine(model_path="dummy", max_total_tokens=8192) as engine:
        assert (engine.alive, engine.ready) == (True, True)
        errors: list[BaseException] = []
        calls = [
            (engine.generate, "one", LONG),
            (engine.generate, ["two", "three"], LONG),
            (lambda: list(engine.generate("four", LONG, stream=True)),),
            (lambda: asyncio.run(engine.async_generate("five", LONG)),),
            (lambda: endless.run(backend=engine)["x"],),
            (lambda: endless.run_batch([{}, {}], backend=engine),),
        ]
        threads = [collect(errors, *call) for call in calls]
        until_running(engine, 8)
        os.kill(engine.worker_pid, signal.SIGKILL)
        for thread in threads:
            thread.join(timeout=60)
        assert [type(error) for error in errors] == [EngineDead] * len(calls)
        assert all("killed by SIGKILL" in str(error) for error in errors)
        health = engine.health()
        assert (engine.alive, engine.ready, health.live, health.ready) == (False, False, False, False)
        assert "ended unexpectedly" in health.reason
        with pytest.raises(EngineDead, match="create a new engine"):
            engine.generate("x", GREEDY)
        with pytest.raises(EngineDead):
            engine.stats()


def test_row_58_a_model_that_always_fails_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each program is told a code and an id; what happened is in the log (row 71)."""
    monkeypatch.setenv("SGL_TEST_FAULTS", "1")
    faults = json.dumps({"in_forward": {"action": "raise", "times": 0}})
    with Engine(model_path="dummy", max_total_tokens=512, fault_points=faults) as engine:
        errors = []
        for _ in range(3):
            with pytest.raises(SglError) as caught:
                engine.generate("x", GREEDY)
            errors.append(caught.value)
        assert [type(error) for error in errors] == [InternalError, InternalError, EngineDead]
        assert not engine.ready
        assert gone(engine.worker_pid)
        assert engine._client._process is not None
        assert engine._client._process.returncode == 1
    logged = caplog.text
    for error in errors:
        assert error.message.startswith("a model step failed: InjectedFault, error id ")
        assert error.message.rpartition(" ")[2] in logged
        assert "0x" not in str(error)
        assert "/" not in str(error)
    assert "fault at in_forward in <frame at 0x" in logged


def test_fault_points_need_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGL_TEST_FAULTS", raising=False)
    with pytest.raises(ConfigError, match="SGL_TEST_FAULTS=1"):
        Engine(model_path="dummy", fault_points='{"in_forward": {"action": "raise"}}')


# --- the worker hangs -----------------------------------------------------------------------------------------------


def test_row_59_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """No alarm while idle or while a constraint compiles for longer than the limit; then a hang, and everyone knows."""
    monkeypatch.setenv("SGL_TEST_FAULTS", "1")
    for timeout in (2.5, 10, 40):  # the shortest in which this machine starts and does a first step
        faults = {
            "in_compile": {"action": "sleep", "seconds": 2 * timeout},
            "in_forward": {"action": "sleep", "seconds": 6000, "program": "endless"},
        }
        fields = {"max_total_tokens": 4096, "watchdog_timeout": timeout, "fault_points": json.dumps(faults)}
        try:
            engine = Engine(model_path="dummy", **fields)
        except EngineDead:
            continue
        if engine.ready:
            break
        engine.shutdown()
    with engine:
        caplog.clear()
        slow = engine.generate("x", {**GREEDY, "regex": "[a-z]{6}"})
        assert slow["meta_info"]["completion_tokens"] == 6
        errors: list[BaseException] = []
        threads = [collect(errors, endless.run, backend=engine) for _ in range(2)]
        while engine.health(0.2).ready:
            time.sleep(0.02)
        health = engine.health(0.2)
        assert health.live or not engine.alive
        for thread in threads:
            thread.join(timeout=120)
        assert [type(error) for error in errors] == [EngineDead] * 2
        assert all("no progress within watchdog_timeout" in str(error) for error in errors)
        assert "watchdog_timeout" in engine.health().reason
        assert not engine.alive
    logged = caplog.text
    assert "Timeout (0:00:" in logged
    assert "in step" in logged, "the stack of the thread that hangs"
    assert "sgl-parent" in logged or logged.count("Thread 0x") >= 2, "and those of the others"


def test_row_59_a_start_that_hangs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A call of the system that does not come back, here to open a pipe that nobody reads."""
    os.mkfifo(tmp_path / "trace")
    with pytest.raises(EngineDead, match="no progress within watchdog_timeout"):
        Engine(model_path="dummy", trace_file=str(tmp_path / "trace"), watchdog_timeout=2)
    assert "in build_core" in caplog.text


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("dog.busy(); time.sleep(60)", 1),
        ("dog.busy(); dog.idle(); time.sleep(0.5)", 0),
        ("[(dog.busy(), time.sleep(0.02)) for _ in range(30)]", 0),
        ("dog.busy(); dog.idle(); dog.busy(); time.sleep(60)", 1),
        ("dog = Watchdog(0, stacks); dog.busy(); time.sleep(0.5)", 0),
    ],
)
def test_watchdog(code: str, status: int, tmp_path: Path) -> None:
    file = tmp_path / "stacks"
    head = f"import time; from sgl.runtime.watchdog import Watchdog; stacks = open({str(file)!r}, 'wb', buffering=0); "
    done = subprocess.run([sys.executable, "-c", f"{head}dog = Watchdog(0.2, stacks); {code}"], check=False)
    assert done.returncode == status
    assert file.read_text().startswith("Timeout (") == (status == 1)


def test_watchdog_alarms_are_not_set_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    alarms = []
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *args, **kwargs: alarms.append(args))
    dog = Watchdog(1000.0, sys.stderr.buffer)
    for _ in range(100):
        dog.busy()
    assert alarms == [(1250.0,)]


def test_row_60_health_tells_a_stopped_worker_and_probes_do_not_collide(dummy_engine: Engine) -> None:
    answers = []
    probes = [threading.Thread(target=lambda: answers.append(dummy_engine.health())) for _ in range(8)]
    for probe in probes:
        probe.start()
    for probe in probes:
        probe.join()
    assert [(health.live, health.ready) for health in answers] == [(True, True)] * 8
    os.kill(dummy_engine.worker_pid, signal.SIGSTOP)
    try:
        health = dummy_engine.health(0.2)
    finally:
        os.kill(dummy_engine.worker_pid, signal.SIGCONT)
    assert (health.live, health.ready) == (True, False)
    assert "no answer in 0.2 s" in health.reason
    assert dummy_engine.ready


# --- the parent dies, or ends ---------------------------------------------------------------------------------------


def test_row_61_parent_killed(tmp_path: Path) -> None:
    code = """
        engine = start(fault_points=SLOW)
        threading.Thread(target=engine.generate, args=("x", LONG), daemon=True).start()
        until(lambda: engine.stats()["num_running"])
        say(engine.worker_pid)
        say(engine._client._folder)
        time.sleep(600)
    """
    with Child(code, tmp_path) as child:
        worker, folder = int(child.line()), child.line()
        child.process.kill()
        assert gone(worker, within_s=2 if os.getloadavg()[0] < 1 else 30)
        assert not Path(folder).exists(), "nobody else could have removed it"


def test_engines_left_open_at_exit(tmp_path: Path) -> None:
    """Exit handlers registered before and after the engine was made may use it; programs that are open, on daemon
    threads too, hold nothing up; the exit status stays. The folder for temporary files has a long name meanwhile."""
    code = """
        import atexit

        def tokens():
            return engine.generate("x", SHORT)["meta_info"]["completion_tokens"]

        def quiet():
            try:
                engine.generate("x", LONG)
            except EngineDead:
                pass

        atexit.register(lambda: say("registered before:", tokens()))
        engine = start(fault_points=SLOW)
        atexit.register(lambda: say("registered after:", tokens()))
        say(engine._client._folder)
        say(engine.worker_pid)
        threading.Thread(target=quiet, daemon=True).start()
        state = program.run(stream=True, backend=engine)
        stream = engine.generate("y", LONG, stream=True)
        next(stream)
        until(lambda: engine.stats()["num_running"] == 3)
        sys.exit(3)
    """
    long = tmp_path / ("long" * 30)
    long.mkdir()
    with Child(code, tmp_path, environment={"TMPDIR": str(long)}) as child:
        folder, worker = child.line(), int(child.line())
        assert child.end() == (3, "registered after: 2\nregistered before: 2\n")
        assert child.errors == ""
    assert gone(worker)
    assert not Path(folder).exists()
    assert list(long.iterdir()) == []


def test_row_64_sigterm_ends_sgl_run(tmp_path: Path) -> None:
    code = """
        say(sgl.default_backend().worker_pid)
        try:
            for piece in program.run(stream=True).text_iter():
                say("piece")
        finally:
            say("cleaned up")
    """
    command = (sys.executable, "-m", "sgl.cli", "run", "--model-path", "dummy", "--max-total-tokens", "4096")
    with Child(code, tmp_path, command=command) as child:
        worker = int(child.line())
        child.expect("piece")
        child.process.send_signal(signal.SIGTERM)
        status, out = child.end()
        assert (status, out.splitlines()[-1], child.errors) == (143, "cleaned up", "")
    assert gone(worker)


# --- Ctrl-C ---------------------------------------------------------------------------------------------------------


def test_row_64_ctrl_c_while_blocked(tmp_path: Path) -> None:
    """It arrives in every kind of wait, cancels what was waited for, and leaves an engine that works."""
    code = """
        engine = start(fault_points=SLOW)

        def interrupted(name, running, call):
            def announce():
                until(lambda: engine.stats()["num_running"] == running)
                say(name)
            threading.Thread(target=announce, daemon=True).start()
            try:
                call()
            except KeyboardInterrupt:
                say("interrupted")
            until(lambda: not engine.stats()["num_programs"])
            engine.check()

        interrupted("generate", 1, lambda: engine.generate("x", LONG))
        interrupted("generate many", 2, lambda: engine.generate(["x", "y"], LONG))
        interrupted("stream", 1, lambda: list(engine.generate("x", LONG, stream=True)))
        interrupted("async", 1, lambda: asyncio.run(engine.async_generate("x", LONG)))
        interrupted("read", 1, lambda: program.run(backend=engine))
        interrupted("text", 1, lambda: list(program.run(stream=True, backend=engine).text_iter()))
        interrupted("batch", 3, lambda: program.run_batch([{"i": i} for i in range(3)], backend=engine))
        os.kill(engine.worker_pid, signal.SIGINT)
        say(engine.generate("x", SHORT)["meta_info"]["completion_tokens"])
    """
    with Child(code, tmp_path) as child:
        for name in ("generate", "generate many", "stream", "async", "read", "text", "batch"):
            child.expect(name)
            child.interrupt()
            child.expect("interrupted")
        child.expect("2")
        assert child.end() == (0, "")
        assert child.errors == "", "the worker had nothing to say"


def test_row_64_ctrl_c_in_start_up_and_again_in_shutdown(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace")
    code = f"""
        def children():
            with open(f"/proc/self/task/{{os.getpid()}}/children") as file:
                return file.read().split()

        def announce():
            until(children)
            say("started", *children())
        threading.Thread(target=announce, daemon=True).start()
        try:
            start(trace_file={str(tmp_path / "trace")!r})
        except KeyboardInterrupt:
            say("interrupted")

        engine = start(fault_points='{{"in_forward": {{"action": "sleep", "seconds": 600}}}}')
        def call():
            try:
                engine.generate("x", LONG)
            except EngineDead as error:
                say(error.message)
        thread = threading.Thread(target=call)
        thread.start()
        until(lambda: not engine.health(0.2).ready)
        while engine.alive:
            try:
                say("closing")
                engine._client.close(timeout_s=600)
            except KeyboardInterrupt:
                pass  # perhaps before it was in close
        thread.join()
        say("ended")
    """
    with Child(code, tmp_path) as child:
        started = child.line()
        assert started.startswith("started ")
        child.interrupt()
        child.expect("interrupted")
        while (line := child.line()) == "closing":
            child.interrupt()
        assert line == "the engine's worker was shut down"
        child.expect("ended")
        assert child.end() == (0, "")
        assert child.errors == ""
    assert gone(int(started.split()[1]))


# --- running loops and forks ----------------------------------------------------------------------------------------


def test_inside_a_running_loop(dummy_engine: Engine) -> None:
    """As in a notebook, whose cells run inside a loop: plain calls, programs, and awaited calls."""

    @sgl.function
    def short(s: sgl.ProgramState) -> None:
        s += "x" + sgl.gen("x", max_tokens=6, temperature=0, ignore_eos=True)

    async def cell() -> list[object]:
        plain = dummy_engine.generate("x", GREEDY)["text"]
        streamed = list(dummy_engine.generate("x", GREEDY, stream=True))[-1]["text"]
        awaited = (await dummy_engine.async_generate("x", GREEDY))["text"]
        rows = short.run_batch([{}, {}], backend=dummy_engine)
        return [plain, streamed, awaited, short.run(backend=dummy_engine)["x"], *(row["x"] for row in rows)]

    for _ in range(2):
        assert asyncio.run(cell()) == [dummy_engine.generate("x", GREEDY)["text"]] * 6


NOTEBOOK = """
from jupyter_client.manager import start_new_kernel

CELL = '''
from sgl import Engine
engine = Engine(model_path="dummy", max_total_tokens=512)
params = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}
ids = engine.generate("x", params)["output_ids"]
assert ids == (await engine.async_generate("x", params))["output_ids"]
engine.shutdown()
print("ids", len(ids))
'''
manager, client = start_new_kernel()
try:
    reply = client.execute_interactive(CELL, timeout=120)
    print(reply["content"]["status"])
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=True)
"""


def test_in_a_real_notebook_kernel() -> None:
    """In a process of its own: the kernel's client leaves sockets open."""
    done = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, text=True, timeout=180, check=False)
    assert done.stdout == "ids 3\nok\n", done.stderr


def test_forks_and_spawned_processes(tmp_path: Path) -> None:
    """A fork is told, with programs of its parent open too; a spawned process has an engine of its own."""
    code = """
        import multiprocessing, pickle

        def told(what, call):
            try:
                say(what, call())
            except SglError as error:
                say(what, type(error).__name__, "|", error.hint)

        def forked():
            told("generate", lambda: engine.generate("x", SHORT))
            told("stats", lambda: engine.stats())
            told("open program", lambda: state["x"])
            told("health", lambda: engine.health().ready)
            engine.shutdown()

        def spawned():
            own = start()
            say("spawned", own.generate("x", SHORT)["meta_info"]["completion_tokens"])

        if __name__ == "__main__":
            engine = start(fault_points=SLOW)
            state = program.run(stream=True, backend=engine)
            until(lambda: engine.stats()["num_running"])
            told("pickle", lambda: pickle.dumps(engine))
            for method, target in (("fork", forked), ("spawn", spawned)):
                process = multiprocessing.get_context(method).Process(target=target)
                process.start()
                process.join()
                say(method, process.exitcode)
            say("parent", engine.generate("x", SHORT)["meta_info"]["completion_tokens"])
    """
    each = "EngineDead | create an engine in each process"
    with Child(code, tmp_path) as child:
        child.expect("pickle Unsupported | create an engine in each process")
        child.expect(f"generate {each}", f"stats {each}", f"open program {each}", "health False", "fork 0")
        child.expect("spawned 2", "spawn 0", "parent 2")
        assert child.end() == (0, "")
        assert child.errors == ""


def test_an_engine_is_not_pickled(dummy_engine: Engine) -> None:
    with pytest.raises(Unsupported, match="create an engine in each process"):
        pickle.dumps(dummy_engine)


# --- the socket -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> zmq.Socket[bytes]:  # type: ignore[misc]
    context = zmq.Context()
    bound = context.socket(zmq.PAIR)
    yield bound
    bound.close()
    context.term()


def test_the_socket_is_in_a_private_folder(pair: zmq.Socket[bytes], tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = Path(rendezvous.bind(pair))
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [entry.name for entry in folder.iterdir()] == [rendezvous.SOCKET]


@pytest.mark.parametrize("fault", ["long", "missing", "full", "open to others", "not ours"])
def test_another_place_is_found(
    fault: str, pair: zmq.Socket[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    second.mkdir()
    if fault == "long":
        first = tmp_path / ("x" * 120)
    if fault != "missing":
        first.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(first))
    monkeypatch.setattr(rendezvous, "_ELSEWHERE", (str(second),))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    make = tempfile.mkdtemp

    def mkdtemp(prefix: str, dir: str) -> str:
        if fault == "full" and dir == str(first):
            raise OSError(28, "No space left on device")
        made = make(prefix=prefix, dir=dir)
        if fault == "open to others" and dir == str(first):
            os.chmod(made, 0o755)
        return made

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    if fault == "not ours":
        users = iter([os.geteuid() + 1, os.geteuid()])
        monkeypatch.setattr(os, "geteuid", lambda: next(users))
    assert Path(rendezvous.bind(pair)).parent == second
    assert not first.exists() or list(first.iterdir()) == []


def test_no_place_at_all(pair: zmq.Socket[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    monkeypatch.setattr(rendezvous, "_ELSEWHERE", (str(tmp_path / "neither"),))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with pytest.raises(ConfigError, match=r"missing \(No such file or directory\), .*neither.*set TMPDIR"):
        rendezvous.bind(pair)


@pytest.mark.parametrize(
    "frame", [pickle.dumps({"program": 1}), b"", b"\xc1" * 70, b"\x93\x01\x02", b"GET / HTTP/1.1\r\n\r\n"]
)
def test_row_65_frames_that_are_no_messages_are_refused(dummy_engine: Engine, frame: bytes) -> None:
    before = dummy_engine.generate("x", GREEDY)["output_ids"]
    client = dummy_engine._client
    with client._lock:
        client._out.append(frame)
        client._wake()
    assert dummy_engine.generate("x", GREEDY)["output_ids"] == before
    assert dummy_engine.ready


def test_row_65_a_stranger_finds_no_door(dummy_engine: Engine) -> None:
    """From when the worker has come: a connection to a listening socket stays open in it for as long as it likes."""
    path = Path(dummy_engine._client._folder) / rendezvous.SOCKET
    assert path.parent.is_dir()
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as stranger, pytest.raises(FileNotFoundError):
        stranger.connect(str(path))
    assert dummy_engine.generate("x", GREEDY)["output_ids"]


def test_logging_stays_quiet_when_all_is_well(dummy_engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="sgl"):
        dummy_engine.generate("x", GREEDY)
        dummy_engine.check()
    assert caplog.records == []


def test_a_full_pipe_of_wakes_blocks_nobody(dummy_engine: Engine) -> None:
    """A sink runs on the thread that drains the pipe, which takes the lock that senders hold while they wake it."""
    client = dummy_engine._client
    held, go_on = threading.Event(), threading.Event()

    def sink(event: Event) -> None:
        held.set()
        go_on.wait(30)

    session = dummy_engine.open(sink, ProgramOptions(stream=True))
    gen = Gen(id=1, name="x", sampling=Sampling(max_new_tokens=2))
    session.submit(Graph(nodes=(Text(id=0, segments=(LiteralText("hello"),)), gen)), finish=True)
    assert held.wait(30)
    room = fcntl.fcntl(client._wake_write, fcntl.F_SETPIPE_SZ, 4096)

    def many() -> None:
        for number in range(room + 10):
            client.send(Unpin(-1 - number))
        go_on.set()

    sender = threading.Thread(target=many)
    sender.start()
    assert go_on.wait(30), "the sender waits for the thread, which waits for the sender"
    sender.join()
    assert dummy_engine.health().ready
