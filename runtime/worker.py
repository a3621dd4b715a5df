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
import importlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from io import FileIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
import zmq

from sgl import environment
from sgl.errors import ConfigError, InternalError, InvalidParameter, SglError, UnsupportedModel
from sgl.grammars.formats import detect_reasoning_format, detect_tool_format
from sgl.lang.graph import PROTOCOL, Event, FailedEvent, StateText
from sgl.runtime import rendezvous
from sgl.runtime.config import EngineConfig, Facts, ResolvedConfig, RuntimeOverride, config_from_mapping
from sgl.runtime.core import EngineCore
from sgl.runtime.decode_graphs import early_rows
from sgl.runtime.encoding import encodes_nothing
from sgl.runtime.failures import internal_error
from sgl.runtime.faults import SWITCH, FaultPoints, parse_faults
from sgl.runtime.loading.checkpoint import Checkpoint, open_checkpoint
from sgl.runtime.loading.encoder_checkpoint import EncoderCheckpoint, encoder_checkpoint
from sgl.runtime.loading.sources import ModelSource, locate
from sgl.runtime.logs import forward_worker_logs, set_worker_level
from sgl.runtime.memory_plan import BYTES_OF
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
from sgl.runtime.processors import LogitProcessor, load_processors
from sgl.runtime.program_jobs import job_threads
from sgl.runtime.resolution import resolve
from sgl.runtime.sampling_defaults import model_defaults
from sgl.runtime.speculation.draft_model import DraftModel, check_tokenizers
from sgl.runtime.speculation.options import draft_slots, resolve_speculation
from sgl.runtime.speculation.start import make_drafter
from sgl.runtime.text.tokenizer import Tokenizer
from sgl.runtime.trace import Tracer
from sgl.runtime.watchdog import Watchdog

if TYPE_CHECKING:
    from sgl.runtime.device_clock import DeviceClock
    from sgl.runtime.model_runner import ModelRunner
    from sgl.runtime.models.registry import ModelConfig
    from sgl.runtime.sampler import Sampler

_JOB_THREADS = 4
"""More than one, so that a constraint that compiles for seconds does not hold up the texts behind it."""

IMPORTING = "importing torch"

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
                self._poller.poll(0)
            else:
                self._watchdog.idle()
                self._poller.poll(self._idle_timeout())
            self._watchdog.busy()
            self._drain_wakes()
            self._flush_logs()
            while self._socket.poll(0):
                if not self._handle(self._socket.recv()):
                    return
            self._core.step()
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


def load_extras(config: EngineConfig) -> tuple[FaultPoints | None, dict[str, LogitProcessor]]:
    """What tests make fail, and the logit processors that a user brings along.

    Raises:
        ConfigError: one of them is wrong.
    """
    faults = None
    if config.fault_points is not None:
        faults = parse_faults(config.fault_points, allowed=environment.read(SWITCH) == "1")
    return faults, load_processors(config.logit_processors)


def find_model(config: EngineConfig, progress: Callable[[str], None] = lambda text: None) -> ModelSource:
    """The model that `config` names, fetched if need be. Raises as `locate`."""
    progress(f"opening {config.model_path}")

    def downloading(done: int, total: int | None) -> None:
        whole = f" of {total / 2**20:.0f}" if total else ""
        progress(f"fetching {config.model_path}: {done / 2**20:.0f}{whole} MiB")

    return locate(
        config.model_path,
        load_format=config.load_format,
        offline=config.offline,
        revision=config.revision,
        progress=downloading,
    )


def build_core(
    config: EngineConfig,
    *,
    emit: Callable[[int, Event], None],
    executor: Executor | None = None,
    wake: Callable[[], None] = lambda: None,
    progress: Callable[[str], None] = lambda text: None,
    kind: type[EngineCore] = EngineCore,
    source: ModelSource | None = None,
) -> tuple[EngineCore, dict[str, Any]]:
    """Load a model and put an engine core on it, in this process.

    Args:
        emit, executor, wake: as `EngineCore` takes them.
        progress: gets a line for each phase.
        kind: the core's class, for those who watch it from within.
        source: the model, where it has been found already.

    Returns:
        The core, and what `server_info` shows.

    Raises:
        ModelError: the model cannot be found, fetched or loaded.
        ConfigError: it does not fit the wishes in `config`.
    """
    faults, processors = load_extras(config)
    source = source or find_model(config, progress)
    checkpoint = open_checkpoint(source, config.json_model_override_args, config.model_impl)
    defaults = model_defaults(checkpoint.folder) if config.sampling_defaults == "model" else {}
    path = config.tokenizer_path
    tokenizer = checkpoint.tokenizer() if path is None else Tokenizer.from_folder(path)
    if tokenizer.vocab_size > checkpoint.config.vocab_size:
        raise UnsupportedModel(
            f"the tokenizer has {tokenizer.vocab_size} ids and the model {checkpoint.config.vocab_size}",
            hint="give the tokenizer that belongs to the model",
        )

    # Imported here: torch takes seconds, and a wrong option, name or file has been told before.
    progress(IMPORTING)
    importlib.import_module("sgl.runtime.model_runner")

    progress(f"planning {source.name}")
    facts = checkpoint.facts()
    draft = _open_draft_model(config, tokenizer, progress)
    if draft is not None:
        facts = msgspec.structs.replace(facts, draft=draft.facts())
    resolved = _resolve_and_load_kernels(config, facts, progress)
    if resolved.model_impl == "transformers":
        log.warning("transformers' layers compute %s, which is slower than sgl's own", checkpoint.config.architecture)
    if resolved.memory is not None:
        progress(f"loading {source.name}: {resolved.memory.summary()}")
        log.info("memory plan of %s: %s", source.name, resolved.memory.summary())
    model = checkpoint.build_model(
        resolved.dtype,
        resolved.device,
        deterministic=resolved.deterministic,
        context_len=resolved.context_len,
        kernels=resolved.kernels,
        quantization=resolved.quantization,
    )
    runner, sampler, device_clock = _put_to_work(model, checkpoint.config, resolved, tokenizer, processors)
    drafter = None
    if draft is not None:
        progress(f"loading the draft model {config.speculative_draft_model_path}")
        drafter = make_drafter(resolved, tokenizer, _load_draft_model(config, resolved, draft, tokenizer, processors))
    if early := early_rows(resolved.cuda_graph_max_bs_decode):
        progress(f"recording decoding steps of {', '.join(map(str, early))} rows")
        runner.capture(early)
    tracer = Tracer(config.trace_file, time.monotonic) if config.trace_file is not None else None
    core = kind(
        resolved,
        tokenizer,
        runner,
        sampler,
        emit=emit,
        executor=executor,
        wake=wake,
        processors=processors,
        tracer=tracer,
        device_clock=device_clock,
        shared_prefix_tokens=lambda: runner.shared_prefix_tokens,
        faults=faults,
        drafter=drafter,
    )
    info = {
        "kind": "decoder",
        "model": source.name,
        "model_path": str(source.path) if source.path else source.name,
        "architecture": checkpoint.config.architecture,
        "model_impl": resolved.model_impl,
        "vocab_size": tokenizer.vocab_size,
        "sampling_defaults": defaults,
        "formats": _formats(tokenizer),
        "logit_processors": sorted(processors),
        "resolved": msgspec.to_builtins(resolved),
        "step_weights_bytes": _step_weights_bytes(checkpoint.config, resolved),
        "overrides": [],
    }
    return core, info


def _open_draft_model(config: EngineConfig, tokenizer: Tokenizer, progress: Callable[[str], None]) -> Checkpoint | None:
    """The draft model's checkpoint, if guesses come from one.

    Raises:
        ModelError: it cannot be found, fetched or read.
        ConfigError: its tokens are others, or options of speculation contradict each other.
    """
    options = resolve_speculation(config)
    if options is None or options.draft_model_path is None:
        return None
    draft = msgspec.structs.replace(config, model_path=options.draft_model_path, revision=options.draft_model_revision)
    checkpoint = open_checkpoint(find_model(draft, progress))
    check_tokenizers(checkpoint.tokenizer(), tokenizer)
    return checkpoint


def _load_draft_model(
    config: EngineConfig,
    resolved: ResolvedConfig,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    processors: Mapping[str, LogitProcessor],
) -> DraftModel:
    """The draft model at work, with keys and values of its own; what it may hold is in the plan of `resolved`."""
    num_slots = draft_slots(resolved.context_len)
    own = resolve(
        EngineConfig(
            dtype=config.dtype,
            quantization=config.quantization,
            device=resolved.device,
            kernels=config.kernels,
            max_total_tokens=num_slots,
            max_running_requests=resolved.max_running_requests,
            chunked_prefill_size=resolved.chunked_prefill_size,
            num_threads=resolved.num_threads,
            enable_deterministic_inference=resolved.deterministic,
        ),
        msgspec.structs.replace(checkpoint.facts(), available_bytes=0),  # nothing limits: it is in the plan already
    )
    model = checkpoint.build_model(
        own.dtype,
        own.device,
        deterministic=own.deterministic,
        context_len=own.context_len,
        kernels=own.kernels,
        quantization=own.quantization,
    )
    runner, sampler, _ = _put_to_work(model, checkpoint.config, own, tokenizer, processors)
    return DraftModel(
        runner,
        sampler,
        num_slots=num_slots,
        context_len=own.context_len,
        chunk=own.chunked_prefill_size,
    )


def _put_to_work(
    model: Any,
    model_config: ModelConfig,
    resolved: ResolvedConfig,
    tokenizer: Tokenizer,
    processors: Mapping[str, LogitProcessor],
) -> tuple[ModelRunner, Sampler, DeviceClock | None]:
    """What computes steps and draws tokens. Where Triton's kernels compute, one of them draws, so that the host need
    not wait, and the device is timed."""
    from sgl.runtime.model_runner import ModelRunner
    from sgl.runtime.sampler import Sampler

    if resolved.kernels != "triton":
        return ModelRunner(model, model_config, resolved), Sampler(tokenizer.vocab_size, processors), None
    from sgl.runtime.device_clock import DeviceClock
    from sgl.runtime.device_sampler import DeviceSampler

    clock = DeviceClock()
    runner = ModelRunner(model, model_config, resolved, clock)
    return runner, DeviceSampler(tokenizer.vocab_size, processors, clock), clock


def _step_weights_bytes(config: ModelConfig, resolved: ResolvedConfig) -> int:
    """Bytes of weights that a decoding step reads: of an embedding that is not the head, only its rows' own."""
    if config.tie_word_embeddings or resolved.quantization != "none":
        return resolved.weights_bytes
    return resolved.weights_bytes - config.vocab_size * config.hidden_size * BYTES_OF[resolved.dtype]


def _formats(tokenizer: Tokenizer) -> dict[str, str | None]:
    """How this model writes tool calls and reasoning, as its chat template has it."""
    template = tokenizer.chat_template.source if tokenizer.chat_template is not None else ""
    reasoning = detect_reasoning_format(template)
    return {"tool": detect_tool_format(template).name, "reasoning": reasoning.name if reasoning is not None else None}


def _resolve_and_load_kernels(config: EngineConfig, facts: Facts, progress: Callable[[str], None]) -> ResolvedConfig:
    """What runs, with the native kernels loaded where they compute. A compiler that turns out not to work is one fact
    more: the rest is decided without native kernels, and said once.

    Raises:
        ConfigError: the wishes in `config` cannot be had.
    """
    from sgl.runtime.loading.facts import load_native_kernels

    resolved = resolve(config, facts)
    obstacle = facts.native_obstacle
    if resolved.kernels == "native" and not (obstacle := load_native_kernels(progress)):
        return resolved
    if obstacle:
        slower = resolve(config, msgspec.structs.replace(facts, native="", native_obstacle=obstacle))
        if resolve(config, msgspec.structs.replace(facts, native_obstacle="")).kernels == "native":
            log.warning("the model runs on torch, which is slower: %s", obstacle)
        return slower
    return resolved


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
