"""What travels between the engine client and its worker process.

Owns the two closed unions `ToWorker` and `ToClient` and their msgpack form. Frames go over a ZeroMQ PAIR socket on a
private unix socket. A frame that does not decode fails its program; the worker drops one that names none, and the
client, which takes frames from nobody else, then ends the connection. Nothing is guessed, and nothing is pickled.
Programs are numbered by the client; a number is never reused in one engine.

Order: a program's messages are handled in the order sent. The worker answers `Hello` once, with `Ready` or `Failed`.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from sgl.errors import ErrorInfo, InternalError, InvalidParameter
from sgl.lang.graph import PROTOCOL, Event, Graph, ProgramOptions, StateText, lone_surrogate
from sgl.runtime.config import RuntimeOverride


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message to the worker: the configuration to start with, as given by the user (JSON-like mapping)."""

    config: dict[str, Any]
    protocol: int = PROTOCOL


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A program's next fragment: only what is new. `open` starts the program with it, `finish` ends it after it."""

    program: int
    graph: Graph
    open: ProgramOptions | None = None
    finish: bool = False


class ReadState(msgspec.Struct, frozen=True, tag="read_state"):
    """Ask for a branch's text after everything submitted so far; answered by `StateReply`."""

    program: int
    request: int
    branch: int


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop a program and release its state."""

    program: int


class GetStats(msgspec.Struct, frozen=True, tag="get_stats"):
    """Ask for the counters; `check` also verifies both laws."""

    request: int
    check: bool = False


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Ask whether the worker's loop turns; answered between two steps."""

    request: int


class FlushCache(msgspec.Struct, frozen=True, tag="flush_cache"):
    """Drop every cached page that nothing holds, as soon as no request runs or waits; refused after `wait_s`."""

    request: int
    wait_s: float = 0.0


class Pin(msgspec.Struct, frozen=True, tag="pin"):
    """Keep a prefix, given as text or as token ids, in the cache; `request` is the pin's number from then on."""

    request: int
    prefix: str | tuple[int, ...]
    ttl_s: float | None = None
    cache_salt: str = ""


class Unpin(msgspec.Struct, frozen=True, tag="unpin"):
    """Let a pinned prefix go. Not answered."""

    pin: int


class Override(msgspec.Struct, frozen=True, tag="override"):
    """Change fields of the running engine, all or none, between two steps; answered by `OverrideReply`."""

    request: int
    changes: dict[str, Any]
    why: str


class StartProfile(msgspec.Struct, frozen=True, tag="start_profile"):
    """Profile steps with torch's profiler; answered by `ProfileReply` at once.

    Attributes:
        output_dir: folder of the trace; by default a new one that only this user can open.
        num_steps: after so many the profile ends by itself; else at `StopProfile`.
        start_step: the first one, counted from now.
        activities: of `CPU`, `GPU` and `CUDA_PROFILER` (switches a profiler from outside on, and names steps for it).
        with_stack, record_shapes: lines of Python, and shapes of tensors, for each operation.
    """

    request: int
    output_dir: str | None = None
    num_steps: int | None = None
    start_step: int | None = None
    activities: tuple[str, ...] = ("CPU", "GPU")
    with_stack: bool = False
    record_shapes: bool = False


class StopProfile(msgspec.Struct, frozen=True, tag="stop_profile"):
    """End the profile; answered by `ProfileReply` once its file is written."""

    request: int


class EncoderInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an encoder reads at once: a text, a `pair` of texts, or token ids with their special ones."""

    text: str = ""
    pair: str | None = None
    token_ids: tuple[int, ...] | None = None


EncoderTask: TypeAlias = Literal["embed", "classify", "score"]


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """Compute inputs, each as a whole and all or none; answered by `EncodeReply`. For encoders only.

    Attributes:
        task: vectors, shares of labels, or the score of a pair.
        truncate: cut an input that is longer than the model takes, instead of refusing it.
    """

    request: int
    task: EncoderTask
    inputs: tuple[EncoderInput, ...]
    truncate: bool = False


class CancelEncode(msgspec.Struct, frozen=True, tag="cancel_encode"):
    """Compute no more of an `Encode`, which is answered with `Cancelled` unless it is answered already."""

    request: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Cancel everything and exit with status 0."""


ToWorker: TypeAlias = (
    Hello
    | Submit
    | ReadState
    | Cancel
    | GetStats
    | Ping
    | FlushCache
    | Pin
    | Unpin
    | Override
    | Encode
    | CancelEncode
    | StartProfile
    | StopProfile
    | Shutdown
)


class Refused(msgspec.Struct, frozen=True):
    """Not on the wire: a program's message that does not decode, and why."""

    program: int
    reason: str


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A phase of starting up, for the progress display."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The worker serves. `info` is what `Engine.server_info()` shows; `epoch` names this run in state handles."""

    epoch: str
    info: dict[str, Any]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker cannot start, or ends: the reason."""

    error: ErrorInfo


class Events(msgspec.Struct, frozen=True, tag="events"):
    """Events of programs, in order."""

    events: tuple[tuple[int, Event], ...]


class StateReply(msgspec.Struct, frozen=True, tag="state_reply"):
    """Answer to `ReadState`."""

    program: int
    request: int
    state: StateText | None
    error: ErrorInfo | None = None


class StatsReply(msgspec.Struct, frozen=True, tag="stats_reply"):
    """Answer to `GetStats`; `error` names a broken law."""

    request: int
    stats: dict[str, Any]
    error: ErrorInfo | None = None


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Answer to `Ping`: seconds since the last step that succeeded, 0 when there is nothing to do."""

    request: int
    stalled_s: float


class OverrideReply(msgspec.Struct, frozen=True, tag="override_reply"):
    """Answer to `Override`: what it changed; or why it was refused."""

    request: int
    overrides: tuple[RuntimeOverride, ...] = ()
    error: ErrorInfo | None = None


class Log(msgspec.Struct, frozen=True, tag="log"):
    """A log record of the worker: level as in `logging`, name of its logger, text with its traceback if any."""

    level: int
    logger: str
    text: str


class FlushReply(msgspec.Struct, frozen=True, tag="flush_reply"):
    """Answer to `FlushCache`: pages that became free, or why none did."""

    request: int
    pages: int
    error: ErrorInfo | None = None


class PinReply(msgspec.Struct, frozen=True, tag="pin_reply"):
    """Answer to `Pin`, once the prefix is computed: tokens that are pinned, or why none are."""

    request: int
    num_tokens: int
    error: ErrorInfo | None = None


class ProfileReply(msgspec.Struct, frozen=True, tag="profile_reply"):
    """Answer to `StartProfile` and `StopProfile`: the file that is written, or why none is."""

    request: int
    path: str = ""
    error: ErrorInfo | None = None


class EncodeReply(msgspec.Struct, frozen=True, tag="encode_reply"):
    """Answer to `Encode`: per input its numbers, as float32 in memory's order, and its tokens; or what is wrong."""

    request: int
    rows: tuple[bytes, ...] = ()
    num_tokens: tuple[int, ...] = ()
    error: ErrorInfo | None = None


ToClient: TypeAlias = (
    Progress
    | Ready
    | Failed
    | Events
    | StateReply
    | StatsReply
    | Pong
    | OverrideReply
    | Log
    | FlushReply
    | PinReply
    | ProfileReply
    | EncodeReply
)

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_to_client = msgspec.msgpack.Decoder(ToClient)


def pack(message: ToWorker | ToClient) -> bytes:
    """One message as a frame.

    Raises:
        InvalidParameter: it holds text with lone surrogates, or a number of more than 64 bits.
    """
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError as error:
        raise lone_surrogate(error) from None
    except OverflowError:
        raise InvalidParameter("a number does not fit 64 bits", hint="pass a smaller one") from None
    except TypeError as error:
        raise InvalidParameter(f"a value cannot be sent: {error}", hint="pass plain values") from None


def check_types(message: ToWorker) -> None:
    """Raise `InvalidParameter` where the worker would not take the message's frame, and so would not answer."""
    try:
        _to_worker.decode(pack(message))
    except msgspec.MsgspecError as error:
        raise InvalidParameter(f"a value has the wrong type: {error}", hint="see the call's documentation") from None


def unpack_to_worker(frame: bytes) -> ToWorker | Refused:
    """The message to the worker in a frame.

    A program's message with a value of the wrong type comes back as `Refused`: it concerns that program alone.

    Raises:
        InternalError: the frame is no message at all.
    """
    try:
        message: ToWorker = _to_worker.decode(frame)
    except msgspec.MsgspecError as error:
        try:
            raw = msgspec.msgpack.decode(frame)
        except msgspec.MsgspecError:
            raw = None
        if isinstance(raw, dict) and isinstance(raw.get("program"), int):
            return Refused(raw["program"], f"a value has the wrong type: {error}")
        raise InternalError(f"frame to the worker does not decode: {error}") from None
    return message


def unpack_to_client(frame: bytes) -> ToClient:
    """The message to the client in a frame; raises `InternalError` when it is none."""
    try:
        message: ToClient = _to_client.decode(frame)
    except msgspec.MsgspecError as error:
        raise InternalError(f"frame to the client does not decode: {error}") from None
    return message
