"""The worker process: one engine core behind one socket.

Owns the process: start-up, the loop `receive -> step -> send`, and every way to end. The client starts it with a socket
address and a pipe; the pipe's end of file means that the client is gone, whatever way it went, and the worker exits at
once, removing the socket's folder in its place. A step or a start that hangs is ended by the watchdog. Signals of the
terminal do not reach it: the client puts it into a process group of its own, and decides.

Exit status: 0 after `Shutdown` or when the client is gone, 1 when the engine failed (the client was told why) or hung.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import shutil
import signal
import sys
import threading
import time
from functools import partial
from io import FileIO
from pathlib import Path
from typing import IO, Any

import msgspec
import zmq

from sgl.errors import ConfigError, InternalError, InvalidParameter, SglError
from sgl.lang.graph import PROTOCOL, Event, FailedEvent, StateText
from sgl.runtime import rendezvous
from sgl.runtime.config import EngineConfig, RuntimeOverride, config_from_mapping
from sgl.runtime.core import EngineCore
from sgl.runtime.encoding import encodes_nothing
from sgl.runtime.engine_start import IMPORTING, build_core, find_model, load_extras
from sgl.runtime.failures import internal_error
from sgl.runtime.loading.encoder_checkpoint import EncoderCheckpoint, encoder_checkpoint
from sgl.runtime.loading.sources import ModelSource
from sgl.runtime.logs import forward_worker_logs, set_worker_level
from sgl.runtime.messages import (
    Cancel,
    CancelEncode,
    Encode,
    EncodeReply,
    Events,
    Failed,
    FlushCache,
    FlushReply,
    GetStats,
    Hello,
    Override,
    OverrideReply,
    Pin,
    Ping,
    PinReply,
    Pong,
    ProfileReply,
    Progress,
    ReadState,
    Ready,
    Refused,
    Shutdown,
    StartProfile,
    StateReply,
    StatsReply,
    StopProfile,
    Submit,
    ToClient,
    ToWorker,
    Unpin,
    pack,
    unpack_to_worker,
)
from sgl.runtime.overrides import Settings, override
from sgl.runtime.program_jobs import job_threads
from sgl.runtime.step_log import StepLog
from sgl.runtime.watchdog import Watchdog

_JOB_THREADS = 4
"""More than one, so that a constraint that compiles for seconds does not hold up the texts behind it."""
_SWITCH_S = 0.0005
"""How long a job may hold Python's lock while the step loop waits for it, which it does several times in a step."""

log = logging.getLogger("sgl.worker")


_LONGEST_POLL_S = 3600.0
"""A poll counts milliseconds in 31 bits; a deadline that is further away is looked at again."""


class Worker:
    """Drives an engine core from a socket.

    Args:
        socket: a connected PAIR socket.
        stacks: open file for the stacks of a worker that hangs.
    """

    def __init__(self, socket: zmq.Socket[bytes], stacks: IO[bytes]) -> None:
        self._socket = socket
        self._stacks = stacks
        self._message_log: FileIO | None = None
        self._overrides: list[RuntimeOverride] = []
        self._events: list[tuple[int, Event]] = []
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def run(self) -> None:
        """Serve until `Shutdown`. Raises what ends the engine."""
        hello = unpack_to_worker(self._socket.recv())
        if not isinstance(hello, Hello) or hello.protocol != PROTOCOL:
            raise InternalError(f"the client does not speak protocol {PROTOCOL}")
        config = config_from_mapping(hello.config)
        self._watchdog = Watchdog(config.watchdog_timeout, self._stacks)
        self._open_logs(config, hello)
        load_extras(config)  # what is wrong with them is told before a model is fetched
        source = find_model(config, self._progress)
        if (encoder := encoder_checkpoint(source)) is not None:
            self._serve_encoder(config, encoder)
            return
        self._core, info = self._start(config, source)
        self._send(Ready(epoch=self._core.epoch, info=info))
        while True:
            if self._core.has_work:
                self._step_log.wake()
                self._poller.poll(0)
            else:
                self._step_log.rest()
                self._watchdog.idle()
                self._poller.poll(self._idle_timeout())
            self._watchdog.busy()
            self._drain_wakes()
            self._flush_logs()
            while self._socket.poll(0):
                if not self._handle(self._socket.recv()):
                    return
            if self._core.step():
                self._step_log.stepped(self._core.scheduler)
            self._flush_events()

    def _serve_encoder(self, config: EngineConfig, checkpoint: EncoderCheckpoint) -> None:
        """The same loop around the core of an encoder."""
        self._progress(IMPORTING)
        from sgl.runtime.encoder_start import build_encoder

        core, info = build_encoder(
            config, checkpoint, executor=job_threads(_JOB_THREADS), wake=self._wake, progress=self._progress
        )
        self._send(Ready(epoch=core.epoch, info=info))
        while True:
            if not core.has_work:
                self._watchdog.idle()
            self._poller.poll(0 if core.has_work else None)
            self._watchdog.busy()
            self._drain_wakes()
            self._flush_logs()
            while self._socket.poll(0):
                message = unpack_to_worker(self._socket.recv())
                if isinstance(message, Shutdown):
                    return
                if not isinstance(message, Refused):
                    self._note(message)
                core.handle(message)
            core.step()
            for reply in core.take_replies():
                self._send(reply)

    def _open_logs(self, config: EngineConfig, hello: Hello) -> None:
        if config.message_log is not None:
            self._message_log = _open_log(config.message_log)
        self._logs = forward_worker_logs(config.log_level, self._on_log)
        self._note(hello)

    def _start(self, config: EngineConfig, source: ModelSource) -> tuple[EngineCore, dict[str, Any]]:
        # What is loaded stays: searching it for garbage takes a tenth of the start, and would take time of later steps.
        gc.disable()
        core, info = build_core(
            config,
            emit=lambda program, event: self._events.append((program, event)),
            executor=job_threads(_JOB_THREADS),
            wake=self._wake,
            progress=self._progress,
            source=source,
        )
        gc.freeze()
        gc.enable()
        self._step_log = StepLog(config.decode_log_interval)
        self._settings = Settings(config=core.config, limits=core.limits, log_level=config.log_level)
        return core, info

    def _note(self, message: ToWorker) -> None:
        """Append a message to the `message_log`, which begins with the engine's configuration."""
        if self._message_log is None:
            return
        try:
            self._message_log.write(msgspec.json.encode(message) + b"\n")
        except OSError as error:
            log.warning("message_log is switched off: %s", error)
            self._message_log = None

    def _on_log(self) -> None:
        """A record came in. The socket belongs to the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._flush_logs()
        else:
            self._wake()

    def _flush_logs(self) -> None:
        for record in self._logs.drain():
            self._send(record)

    def _progress(self, text: str) -> None:
        """A phase of starting begins, and has the watchdog's whole time; imports have all the time that disks take."""
        self._watchdog.idle()
        if text != IMPORTING:
            self._watchdog.busy()
        self._send(Progress(text))

    def _handle(self, frame: bytes) -> bool:
        """Act on one message; False when it says to end."""
        core = self._core
        try:
            message = unpack_to_worker(frame)
        except InternalError as error:
            log.error("a frame of %d bytes is refused: %s", len(frame), error.message)
            return True
        if not isinstance(message, Refused):  # which is none
            self._note(message)
        match message:
            case Submit():
                if message.open is not None:
                    core.open(message.program, message.open)
                core.submit(message.program, message.graph, finish=message.finish)
            case ReadState():
                program, request = message.program, message.request

                def reply(state: StateText | None, error: SglError | None) -> None:
                    self._flush_events()
                    info = error.to_info() if error is not None else None
                    self._send(StateReply(program=program, request=request, state=state, error=info))

                core.read_state(program, message.branch, reply)
            case Cancel():
                core.cancel(message.program)
            case GetStats():
                stats = core.snapshot()
                broken: SglError | None = None
                if message.check:
                    try:
                        stats.check()
                    except SglError as error:
                        broken = error
                self._send(
                    StatsReply(
                        request=message.request,
                        stats={**stats.as_dict(), "overrides": msgspec.to_builtins(self._overrides)},
                        error=broken.to_info() if broken is not None else None,
                    )
                )
            case Ping():
                self._send(Pong(request=message.request, stalled_s=core.stalled_s))
            case Override():
                self._send(self._override(message))
            case FlushCache():
                core.cache.flush(message.wait_s, partial(self._reply, FlushReply, message.request))
            case Pin():
                done = partial(self._reply, PinReply, message.request)
                core.cache.pin(message.request, message.prefix, message.ttl_s, message.cache_salt, done)
            case Unpin():
                core.cache.unpin(message.pin)
            case StartProfile() | StopProfile():
                self._send(self._profile(message))
            case Shutdown():
                core.cancel_all()
                self._flush_events()
                if core.tracer is not None:
                    core.tracer.close()
                    self._flush_logs()
                return False
            case Refused():
                self._refuse(message)
            case Encode():
                self._send(EncodeReply(request=message.request, error=encodes_nothing("a decoder").to_info()))
            case CancelEncode():
                pass  # it was told at once that nothing is encoded here
            case Hello():
                raise InternalError("the client said hello twice")
        return True

    def _reply(
        self, kind: type[FlushReply] | type[PinReply], request: int, number: int, error: SglError | None
    ) -> None:
        """Answer a question about the cache."""
        self._send(kind(request, number, error.to_info() if error is not None else None))

    def _profile(self, message: StartProfile | StopProfile) -> ProfileReply:
        """Begin or end a profile, or say why not. Called between two steps."""
        profiler = self._core.profiler
        try:
            path = profiler.start(message) if isinstance(message, StartProfile) else profiler.stop()
        except SglError as error:
            return ProfileReply(request=message.request, error=error.to_info())
        return ProfileReply(request=message.request, path=path)

    def _override(self, message: Override) -> OverrideReply:
        """Change the running engine, or say why not. Called between two steps."""
        try:
            settings, records = override(self._settings, message.changes, why=message.why, at=time.time())
        except ConfigError as error:
            return OverrideReply(request=message.request, error=error.to_info())
        self._settings = settings
        self._core.apply(settings.config, settings.limits)
        set_worker_level(settings.log_level)
        self._overrides.extend(records)
        for record in records:
            log.info("%s is %r now, was %r: %s", record.field, record.value, record.was, record.why)
        return OverrideReply(request=message.request, overrides=records)

    def _refuse(self, message: Refused) -> None:
        """Fail the program that a message was for, whether it was open already or should have been opened by it."""
        error = InvalidParameter(message.reason, hint="pass a value of the expected type")
        if not self._core.fail(message.program, error):
            self._events.append((message.program, FailedEvent(error=error.to_info())))

    def _flush_events(self) -> None:
        if self._events:
            events = tuple(self._events)
            self._events.clear()
            self._send(Events(events))

    def _send(self, message: ToClient) -> None:
        self._socket.send(pack(message))

    def _wake(self) -> None:
        os.write(self._wake_write, b"w")

    def _drain_wakes(self) -> None:
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            return

    def _idle_timeout(self) -> int | None:
        """Milliseconds to wait at most: until the next deadline, but no longer than a poll can; `None` without one."""
        deadline = self._core.next_deadline()
        if deadline is None:
            return None
        return int(min(max(0.0, deadline - self._core.now()), _LONGEST_POLL_S) * 1000) + 1


def _open_log(path: str) -> FileIO:
    try:
        return FileIO(path, "a", opener=lambda name, flags: os.open(name, flags, 0o600))
    except OSError as error:
        raise ConfigError(
            f"message_log {path!r} cannot be written: {error.strerror}", hint="name a file in a folder that exists"
        ) from None


def _exit_with_parent(pipe: int, folder: str) -> None:
    """End this process when the pipe to the client closes, even in the middle of a step; nobody else is left to
    remove the folder."""

    def watch() -> None:
        os.read(pipe, 1)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=watch, name="sgl-parent", daemon=True).start()


def main(folder: str, pipe: int) -> None:
    """Serve the client whose socket is in `folder` until it says to end, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a message on a terminal that stops background writers
    _exit_with_parent(pipe, folder)
    sys.setswitchinterval(_SWITCH_S)
    try:
        stacks = (Path(folder) / rendezvous.STACKS).open("wb", buffering=0)
    except FileNotFoundError:  # the client was interrupted while it started this process, and has taken the folder away
        os._exit(0)
    faulthandler.enable(stacks)
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 2000)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(rendezvous.address(folder))
    status = 0
    try:
        Worker(socket, stacks).run()
    except SglError as error:
        socket.send(pack(Failed(error.to_info())))
        status = 1
    except Exception as error:  # noqa: BLE001 - the client is told, whatever it was
        socket.send(pack(Failed(internal_error("the engine's worker failed", error).to_info())))
        status = 1
    socket.close()
    context.term()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of torch and of jobs have nothing left to say
