"""How the events of a stream become bytes: server-sent events, or a line of JSON for each.

Owns the two ways. An error in the midst of a stream is its last event, in the error shape of the route.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sgl.server.failures import encode


class Framing(NamedTuple):
    """One way to write events.

    Attributes:
        frame: an event's bytes.
        error: those of an error's body.
        end: what closes a stream that has not failed.
    """

    media_type: str
    frame: Callable[[Any], bytes]
    error: Callable[[Any], bytes]
    end: bytes = b""


def server_sent(*, done: bool = True, named: Callable[[Any], str] | None = None) -> Framing:
    r"""Server-sent events.

    Args:
        done: end with `data: [DONE]`, as OpenAI's API does.
        named: gives each event its name.

    Example:
        >>> server_sent().frame({"a": 1}), server_sent(named=lambda event: event["type"]).frame({"type": "ping"})
        (b'data: {"a":1}\n\n', b'event: ping\ndata: {"type":"ping"}\n\n')
    """

    def frame(event: Any) -> bytes:
        name = b"" if named is None else f"event: {named(event)}\n".encode()
        return name + b"data: " + encode(event) + b"\n\n"

    def error(body: Any) -> bytes:
        return (b"" if named is None else b"event: error\n") + b"data: " + encode(body) + b"\n\n"

    return Framing("text/event-stream", frame, error, b"data: [DONE]\n\n" if done else b"")


def _line(value: Any) -> bytes:
    return encode(value) + b"\n"


LINES = Framing("application/x-ndjson", _line, _line)
"""A line of JSON for each event, as Ollama's API has it."""
