"""The client half of an engine: starts the worker process and speaks with it.

Owns the worker process, the folder of its socket and one thread that alone touches the socket. Other threads hand it
frames and get answers through futures and sinks. No torch here.

Ways to end, each within a second: `close` (asks the worker to end, then ends it), the worker's death (every open
session gets `FailedEvent` with `EngineDead`, every open future fails), the interpreter's exit (`close_all` runs at
exit). A client does not survive a fork of its process: in the child every call raises `EngineDead`, and so does every
read of a program that was open. Ctrl-C reaches this process alone, since the worker has a process group of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import zmq

from sgl import environment
from sgl.errors import EngineDead, SglError
from sgl.lang.graph import DoneEvent, Event, FailedEvent, StateText
from sgl.runtime import rendezvous, watchdog
from sgl.runtime.config import RuntimeOverride
from sgl.runtime.failures import internal_error
from sgl.runtime.logs import deliver
from sgl.runtime.messages import (
    Cancel,
    EncodeReply,
    Events,
    Failed,
    FlushReply,
    Hello,
    Log,
    OverrideReply,
    Ping,
    PinReply,
    Pong,
    ProfileReply,
    Progress,
    Ready,
    Shutdown,
    StateReply,
    StatsReply,
    ToClient,
    ToWorker,
    check_types,
    pack,
    unpack_to_client,
)

EventSink = Callable[[Event], None]

log = logging.getLogger("sgl.client")

_START = (
    "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given['path']; "
    "from sgl.runtime.worker import main; main(given['folder'], given['pipe'])"
)


class Health(msgspec.Struct, frozen=True):
    """How an engine is.

    Attributes:
        live: its worker process exists.
        ready: it answers, and is idle or completed a step not long ago.
        reason: why it is not ready.
    """

    live: bool
    ready: bool
    reason: str = ""


class WorkerClient:
    """A running worker.

    Args:
        config: the engine's fields, as given.
        on_progress: receives a line for each phase of starting up.

    Raises:
        SglError: what the worker could not start for.
        EngineDead: it ended without a reason.
    """

    def __init__(self, config: dict[str, Any], on_progress: Callable[[str], None] | None = None) -> None:
        self.info: dict[str, Any] = {}
        self._on_progress = on_progress
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._out: deque[bytes] = deque()
        self._sinks: dict[int, EventSink] = {}
        self._futures: dict[int, Future[Any]] = {}
        self._numbers = count(1)
        self._dead: SglError | None = None
        self._closing = False
        self._ended = threading.Event()
        self._closing_once = threading.Lock()
        self._closed = False
        self._freed = False
        self._started: Future[None] = Future()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._held = ExitStack()
        """What is given back at the end, in the order opposite to that of taking it."""
        try:
            self._launch()
            self.send(Hello(config))
            self._started.result()
        except BaseException:
            self.close()
            raise

    def _launch(self) -> None:
        """Start the worker and the thread. What was taken when this is interrupted is in `_held`."""
        self._context = zmq.Context()
        self._held.callback(self._context.term)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._held.callback(self._socket.close)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._folder = rendezvous.bind(self._socket)
        self._held.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self._wake_read, self._wake_write = self._pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        worker_end, self._life = os.pipe()
        # Closed before anything else, also when the process could not be noted down: it ends the worker.
        self._held.callback(os.close, self._life)
        _clients.add(self)
        # The worker imports what this process imports, but never from the current folder on its own account.
        given = {"path": [path for path in sys.path if path], "folder": self._folder, "pipe": worker_end}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, json.dumps(given)],
                stdin=subprocess.DEVNULL,
                pass_fds=(worker_end,),
                # Ctrl-C and Ctrl-Z are for this process; it cancels and closes as its program says.
                process_group=0,
                # Threads that spin while they wait make every step many times slower as soon as the cores are shared.
                env=environment.inherited(default={"OMP_WAIT_POLICY": "PASSIVE"}),
            )
        finally:
            os.close(worker_end)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._held.callback(os.close, self._pidfd)
        self._thread = threading.Thread(target=self._serve, name="sgl-engine", daemon=True)
        self._thread.start()

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        for end in ends:
            self._held.callback(os.close, end)
        return ends

    @property
    def pid(self) -> int:
        """Of the worker process."""
        return self._worker.pid

    @property
    def _worker(self) -> subprocess.Popen[bytes]:
        """The worker process, which there is once the constructor is through."""
        if self._process is None:
            raise EngineDead("the engine's worker was never started", hint="create a new engine")
        return self._process

    @property
    def alive(self) -> bool:
        """Whether the worker serves."""
        return self._dead is None and not self._closing and self._owner == os.getpid()

    def health(self, timeout_s: float) -> Health:
        """How the engine is now; waits at most `timeout_s` for an answer. Several may ask at the same time."""
        answer = self.ask(Ping)
        futures.wait([answer], timeout_s)
        return self._health(answer, timeout_s)

    async def async_health(self, timeout_s: float) -> Health:
        """`health` for asyncio."""
        answer = self.ask(Ping)
        with suppress(SglError, TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(answer), timeout_s)
        return self._health(answer, timeout_s)

    def _health(self, answer: Future[Pong], waited_s: float) -> Health:
        live = self.alive
        if not answer.done():
            return Health(live=live, ready=False, reason=f"no answer in {waited_s:g} s: a step hangs, or is that long")
        try:
            stalled_s = answer.result().stalled_s
        except SglError as error:
            return Health(live=live, ready=False, reason=error.message)
        if stalled_s > waited_s:
            return Health(live=live, ready=False, reason=f"no step succeeded in the last {stalled_s:.0f} s")
        return Health(live=live, ready=live)

    def send(self, message: ToWorker) -> None:
        """Queue a message.

        Raises:
            EngineDead: the worker is gone, or this process is a fork of the one that started it.
        """
        frame = pack(message)
        with self._lock:
            if self._dead is not None:
                raise EngineDead(self._dead.message, hint=self._dead.hint)
            self._out.append(frame)
            self._wake()

    def open(self, sink: EventSink) -> int:
        """A number for a new program whose events go to `sink`."""
        number = next(self._numbers)
        with self._lock:
            self._sinks[number] = sink
        return number

    def ask(self, make: Callable[[int], ToWorker]) -> Future[Any]:
        """Send the message that `make` builds for a request number; the answer's future."""
        number = next(self._numbers)
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # a caller that gives up must not make its answer an error here
        with self._lock:
            self._futures[number] = future
        try:
            message = make(number)
            check_types(message)
            self.send(message)
        except SglError as error:
            with self._lock:
                waiting = self._futures.pop(number, None)
            if waiting is not None:  # else it was failed with everyone else's
                waiting.set_exception(error)
        return future

    def close(self, timeout_s: float = 10.0) -> None:
        """End the worker and free everything; idempotent. Open sessions fail with `EngineDead`.

        An interrupt in here (a second Ctrl-C) takes the worker's time to end in peace; it is raised at the end.
        """
        interrupt: BaseException | None = None
        while not self._freed and self._owner == os.getpid():
            try:
                self._close(timeout_s)
            except (KeyboardInterrupt, SystemExit) as error:
                interrupt, timeout_s = error, 0.0
        if interrupt is not None:
            raise interrupt

    def _close(self, timeout_s: float) -> None:
        """May be interrupted anywhere, and called again: each of its steps may be done twice."""
        self._closing = True
        thread = self._thread if self._thread is not None and self._thread.ident is not None else None
        if thread is not None:
            with self._lock:
                self._out.append(pack(Shutdown()))
                self._wake()
            # While it loads a model the worker reads no messages.
            self._ended.wait(timeout_s if self._started.done() else 0.0)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if thread is not None:
            self._ended.wait()  # not `join`, which takes a thread for ended once Ctrl-C came while it waited
        with self._closing_once:
            with self._lock:
                self._closed = True
            self._held.close()
            self._freed = True
        _clients.discard(self)

    # --- the thread ---

    def _serve(self) -> None:
        """The thread: whatever it cannot handle ends the engine, and everyone is told."""
        try:
            self._exchange()
        except Exception as error:  # noqa: BLE001 - everyone who waits is told
            failure = internal_error("the connection to the engine's worker broke", error)
            self._worker.kill()
            self._worker.wait()
            self._fail_all(EngineDead(failure.message, hint="create a new engine"))
        finally:
            self._ended.set()

    def _exchange(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        poller.register(self._pidfd, zmq.POLLIN)
        while True:
            # A send would block without a worker at the other end: one that has not connected yet, or is gone.
            poller.modify(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._out else 0))
            ready = dict(poller.poll())
            try:
                os.read(self._wake_read, 4096)
            except BlockingIOError:
                pass
            while self._out and self._socket.poll(0, zmq.POLLOUT):
                self._socket.send(self._out.popleft())
            while self._socket.poll(0):
                self._receive(unpack_to_client(self._socket.recv()))
            if self._pidfd in ready:
                break
        status = self._worker.wait()
        while self._socket.poll(50):
            self._receive(unpack_to_client(self._socket.recv()))
        self._fail_all(self._obituary(status))

    def _obituary(self, status: int) -> EngineDead:
        """Why the worker ended. Stacks that it left go to the log: they are nothing for who reads an error."""
        try:
            stacks = (Path(self._folder) / rendezvous.STACKS).read_text(errors="replace")
        except OSError:  # it ended before it made the file
            stacks = ""
        if stacks:
            deliver(Log(logging.ERROR, "sgl.worker", f"stacks of its threads, as it left them:\n{stacks}"))
        if stacks.startswith(watchdog.MARK):
            return EngineDead(
                "the engine's worker made no progress within watchdog_timeout and was ended",
                hint="the log has the stacks of its threads; raise watchdog_timeout if a step may take that long",
            )
        if self._closing:
            return EngineDead("the engine's worker was shut down", hint="create a new engine")
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        hint = "; SIGKILL is what the system sends when memory runs out" if status == -signal.SIGKILL else ""
        return EngineDead(f"the engine's worker ended unexpectedly ({how})", hint=f"create a new engine{hint}")

    def _receive(self, message: ToClient) -> None:
        match message:
            case Events():
                for program, event in message.events:
                    sink = self._sinks.get(program)
                    if isinstance(event, (DoneEvent, FailedEvent)):
                        self._sinks.pop(program, None)
                    if sink is not None:
                        self._deliver(program, sink, event)
            case StateReply():
                self._answer(message.request, message.state, message.error)
            case StatsReply():
                self._answer(message.request, message.stats, message.error)
            case Pong():
                self._answer(message.request, message, None)
            case FlushReply():
                self._answer(message.request, message.pages, message.error)
            case PinReply():
                self._answer(message.request, message.num_tokens, message.error)
            case ProfileReply():
                self._answer(message.request, message.path, message.error)
            case EncodeReply():
                self._answer(message.request, message, message.error)
            case OverrideReply():
                if message.overrides:
                    known = [*self.info.get("overrides", ()), *msgspec.to_builtins(message.overrides)]
                    self.info = {**self.info, "overrides": known}
                self._answer(message.request, message.overrides, message.error)
            case Log():
                deliver(message)
            case Progress():
                if self._on_progress is not None:
                    try:
                        self._on_progress(message.text)
                    except OSError:  # the terminal is gone; the engine is not
                        self._on_progress = None
            case Ready():
                rendezvous.shut(self._folder)
                self.info = {**message.info, "epoch": message.epoch}
                self._started.set_result(None)
            case Failed():
                self._fail_all(SglError.from_info(message.error))

    def _answer(
        self,
        request: int,
        result: StateText | Pong | EncodeReply | tuple[RuntimeOverride, ...] | dict[str, Any] | int | str | None,
        error: Any,
    ) -> None:
        with self._lock:
            future = self._futures.pop(request, None)
        if future is None:
            return
        if error is not None:
            future.set_exception(SglError.from_info(error))
        else:
            future.set_result(result)

    def _fail_all(self, error: SglError) -> None:
        """Tell everyone who waits; the first error stands."""
        with self._lock:
            if self._dead is None:
                self._dead = error
            sinks, self._sinks = self._sinks, {}
            futures, self._futures = self._futures, {}
        if not self._started.done():
            self._started.set_exception(error)
        dead = error if isinstance(error, EngineDead) else EngineDead(error.message, hint=error.hint)
        for program, sink in sinks.items():
            self._deliver(program, sink, FailedEvent(error=dead.to_info()))
        for future in futures.values():
            future.set_exception(EngineDead(dead.message, hint=dead.hint))

    def _deliver(self, program: int, sink: EventSink, event: Event) -> None:
        """Hand over an event. A sink that raises loses its program, and nobody else's."""
        try:
            sink(event)
        except Exception:
            log.exception("the consumer of program %d raised; the program is cancelled", program)
            with self._lock:
                if self._sinks.pop(program, None) is not None:
                    self._out.append(pack(Cancel(program)))

    def forget(self, program: int) -> None:
        """The number of a program that was never sent."""
        with self._lock:
            self._sinks.pop(program, None)

    def _wake(self) -> None:
        """Make the thread look at what there is to send. The lock is held, so this must not wait for the thread."""
        if not self._closed:
            with suppress(BlockingIOError):  # a full pipe wakes it just as well
                os.write(self._wake_write, b"w")


_clients: weakref.WeakSet[WorkerClient] = weakref.WeakSet()


def live_clients() -> list[WorkerClient]:
    """Every client of this process that is not closed."""
    return list(_clients)


def close_all() -> None:
    """Close every engine; runs at exit (see `sgl.__init__`). An interrupt shortens it, and is not told any more."""
    for client in live_clients():
        try:
            client.close()
        except (KeyboardInterrupt, SystemExit):
            continue  # this one is closed, and the process is ending already


def _leave_to_parent() -> None:
    """In a fork of this process: its copy of the life pipe would keep the workers alive after their parent, and nobody
    is there to answer whoever waits."""
    for client in live_clients():
        os.close(client._life)
        client._lock = threading.Lock()  # may have been held by a thread that is not here
        dead = EngineDead(
            "this engine was started by another process (this one is a fork of it)",
            hint="create an engine in each process",
        )
        client._dead = dead
        if client._sinks or client._futures:
            # On a thread, since locks of those who wait may be held by threads that are not here either.
            threading.Thread(target=client._fail_all, args=(dead,), daemon=True).start()


os.register_at_fork(after_in_child=_leave_to_parent)
