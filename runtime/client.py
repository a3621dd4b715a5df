"""The client half of an engine: starts the worker process and speaks with it.

Owns the worker process, its socket folder (mode 0700) and one thread that alone touches the socket. Other threads hand
it frames and get answers through futures and sinks. No torch here.

Ways to end, each within a second: `close` (asks the worker to end, then ends it), the worker's death (every open
session gets `FailedEvent` with `EngineDead`, every open future fails), the interpreter's exit (`close` runs at exit).
A client does not survive a fork of its process: in the child every call raises `EngineDead`.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any

import zmq

from sgl.errors import EngineDead, SglError
from sgl.lang.graph import DoneEvent, Event, FailedEvent, StateText
from sgl.runtime.messages import (
    Cancel,
    Events,
    Failed,
    FlushReply,
    Hello,
    Progress,
    Ready,
    Shutdown,
    StateReply,
    StatsReply,
    ToClient,
    ToWorker,
    pack,
    unpack_to_client,
)

EventSink = Callable[[Event], None]

log = logging.getLogger("sgl.client")

_START = (
    "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given['path']; "
    "from sgl.runtime.worker import main; main(given['address'], given['pipe'])"
)


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
        self._closed = False
        self._started: Future[None] = Future()

        self._folder = tempfile.mkdtemp(prefix="sgl-", dir=_short_folder())
        address = f"ipc://{self._folder}/worker"
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        worker_end, self._life = os.pipe()
        _clients.add(self)
        # The worker imports what this process imports, but never from the current folder on its own account.
        given = {"path": [path for path in sys.path if path], "address": address, "pipe": worker_end}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, json.dumps(given)],
                stdin=subprocess.DEVNULL,
                pass_fds=(worker_end,),
                # Threads that spin while they wait make every step many times slower as soon as the cores are shared.
                env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
            )
        finally:
            os.close(worker_end)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._thread = threading.Thread(target=self._serve, name="sgl-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        self.send(Hello(config))
        try:
            self._started.result()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the worker process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the worker serves."""
        return self._dead is None and not self._closing and self._owner == os.getpid()

    def send(self, message: ToWorker) -> None:
        """Queue a message.

        Raises:
            EngineDead: the worker is gone, or this process is a fork of the one that started it.
        """
        if self._owner != os.getpid():
            raise EngineDead(
                "this engine was started by another process (this one is a fork of it)",
                hint="create an engine in each process",
            )
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
        with self._lock:
            self._futures[number] = future
        try:
            self.send(make(number))
        except SglError as error:
            with self._lock:
                waiting = self._futures.pop(number, None)
            if waiting is not None:  # else it was failed with everyone else's
                waiting.set_exception(error)
        return future

    def close(self, timeout_s: float = 10.0) -> None:
        """End the worker and free everything; idempotent. Open sessions fail with `EngineDead`."""
        with self._lock:
            if self._closing or self._owner != os.getpid():
                return
            self._closing = True
            self._out.append(pack(Shutdown()))
            self._wake()
        atexit.unregister(self.close)
        if not self._started.done():
            self._process.kill()  # while it loads a model it reads no messages
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()
        self._socket.close()
        self._context.term()
        with self._lock:
            self._closed = True
            for descriptor in (self._wake_read, self._wake_write, self._life, self._pidfd):
                os.close(descriptor)
        _clients.discard(self)
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- the thread ---

    def _serve(self) -> None:
        """The thread: whatever it cannot handle ends the engine, and everyone is told."""
        try:
            self._exchange()
        except Exception as error:
            log.exception("the engine's connection ends")
            self._process.kill()
            self._process.wait()
            self._fail_all(EngineDead(f"the connection to the worker broke: {type(error).__name__}: {error}"))

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
        status = self._process.wait()
        while self._socket.poll(50):
            self._receive(unpack_to_client(self._socket.recv()))
        reason = "was shut down" if self._closing else f"ended unexpectedly (exit status {status})"
        self._fail_all(EngineDead(f"the engine's worker {reason}", hint="create a new engine"))

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
            case FlushReply():
                self._answer(message.request, message.pages, None)
            case Progress():
                if self._on_progress is not None:
                    try:
                        self._on_progress(message.text)
                    except OSError:  # the terminal is gone; the engine is not
                        self._on_progress = None
            case Ready():
                self.info = {**message.info, "epoch": message.epoch}
                self._started.set_result(None)
            case Failed():
                self._fail_all(SglError.from_info(message.error))

    def _answer(self, request: int, result: StateText | dict[str, Any] | int | None, error: Any) -> None:
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
        """Make the thread look at what there is to send. The lock is held."""
        if not self._closed:
            os.write(self._wake_write, b"w")


def _short_folder() -> str | None:
    """A folder in which a socket path stays below the 107 bytes that the system allows."""
    return None if len(tempfile.gettempdir()) < 80 else "/tmp"


_clients: weakref.WeakSet[WorkerClient] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a fork of this process: its copy of the life pipe would keep the workers alive after their parent."""
    for client in _clients:
        os.close(client._life)


os.register_at_fork(after_in_child=_leave_to_parent)
