"""Bytes to requests: uvicorn's HTTP/1.1 protocol on llhttp, with bounds that it leaves open.

Owns the answers that are given before there is a request: 431 for a head over `max_header_bytes` (nothing more of it
is read), 408 for a head that does not come within `header_timeout`, 400 for what is no HTTP, 503 for a connection too
many. Each closes the connection. Everything behind a complete head is uvicorn's and the application's.

What is written waits in the transport until the client's window takes it. A client has `write_timeout` seconds for the
next 64 KiB of that, or for all that is left, whatever else becomes of the connection (an answer may be complete, or the
connection about to close); and all connections together hold `max_unread_bytes`. Beyond either, the connection is
aborted: its request ends, and nothing of its answer stays.

A head is handed to the parser when it is complete, so that its size is known before anything is kept of it in pieces.
The parser sees no `Upgrade` header: it would take the body that follows for another protocol's, and clients that offer
HTTP/2 (Java's does, in every request) would lose theirs. What comes between two pieces of a body (chunk extensions,
trailers, the head of a request sent ahead) is bounded like a head. Each piece costs the event loop some microseconds
however small it is, so a body of very many that are small on average is refused with 400.
"""

from __future__ import annotations

import asyncio
import http
import logging
import re
from typing import Any, NoReturn

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from sgl.errors import Overloaded
from sgl.server.config import ServerConfig
from sgl.server.failures import encode, error_response

log = logging.getLogger("sgl.server")

WRITE_BYTES = 2**16
"""What a client takes of an answer in `write_timeout` at least."""
FREE_PIECES = 4096
"""Pieces of a body that may be as small as they like: some 10 ms of the event loop."""
PIECE_BYTES = 64
"""What each further piece brings on average at least."""

_HEAD_END = re.compile(rb"\r?\n\r?\n")
_UPGRADE = re.compile(rb"(?i)\nUpgrade[ \t]*:[^\n]*(?=\n)")
_BEGINS = re.compile(rb"[\r\n]*[A-Z]")


def protocol_for(config: ServerConfig) -> type[HttpToolsProtocol]:
    """The protocol class for a server with this configuration."""

    class Protocol(_Bounded):
        header_timeout = config.header_timeout
        max_header_bytes = config.max_header_bytes
        max_connections = config.max_connections
        write_timeout = config.write_timeout
        unread = _Unread(config.max_unread_bytes)

    return Protocol


class _Unread:
    """What the connections of a server hold for clients that do not take it, the oldest first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sizes: dict[_Bounded, int] = {}
        self._total = 0

    def hold(self, connection: _Bounded, size: int) -> None:
        """A connection has so many bytes; those that have waited longest are aborted while there are too many."""
        self.release(connection)
        self._sizes[connection] = size
        self._total += size
        while self._total > self._max_bytes:
            oldest = next(iter(self._sizes))
            self.release(oldest)
            oldest.let_go(f"all clients together left more than {self._max_bytes} bytes unread")

    def release(self, connection: _Bounded) -> None:
        """It has none any more."""
        self._total -= self._sizes.pop(connection, 0)


class _Bounded(HttpToolsProtocol):
    header_timeout = 10.0
    max_header_bytes = 2**15
    max_connections = 4096
    write_timeout = 60.0
    unread = _Unread(2**28)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._head = bytearray()
        self._in_head = False  # the parser's, which sees the heads of requests that were sent ahead as they come
        self._in_body = False
        self._barren = 0  # bytes since a head was complete or a body went on
        self._pieces = 0  # of the body
        self._body_bytes = 0
        self._fault = ""  # what is wrong with what the parser was given, where that is known
        self._answered: RequestResponseCycle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # --- the connection ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that any byte that waits is known of
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_write_timer()
        if self._answered is not None and self._answered is not self.cycle:  # others were sent ahead of its answer
            self._answered.disconnected = not self._answered.response_complete
            self._answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        if not (self._in_head or self._in_body):
            self._head += data
            data = self._taken_head(len(self._head) - len(data))
            if not data:
                return
        self._barren += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "connections are not upgraded here")
        except httptools.HttpParserError:
            self._refuse(400, self._fault or "this is no HTTP request")
        if self._in_head and self._timer is None:
            self._await_head()
        if (self._in_head or self._in_body) and self._barren > self.max_header_bytes:
            self._refuse(431, "the head of the request is too large")

    def _taken_head(self, seen: int) -> bytes:
        """The head that has come, with what follows it; empty while it is incomplete, or when it is refused. `seen`
        bytes of it were looked at before."""
        if self._timer is None:
            self._await_head()
        found = _HEAD_END.search(self._head, max(seen - 3, 0), self.max_header_bytes + 4)
        if found is None and not _BEGINS.match(self._head) and self._head.strip(b"\r\n"):
            self._refuse(400, "this is no HTTP request")
        elif found is None and len(self._head) > self.max_header_bytes:
            self._refuse(431, "the head of the request is too large")
        if found is None:
            return b""
        head, rest = bytes(self._head[: found.end()]), bytes(self._head[found.end() :])
        self._head.clear()
        return _UPGRADE.sub(b"", head) + rest

    # --- what the parser tells ---

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header of the head; those that trail a body are passed over."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete: the request starts."""
        self._in_head, self._in_body, self._barren = False, True, 0
        self._pieces = self._body_bytes = 0
        self._stop_timer()
        if self.parser.get_http_version() == "1.1" and sum(name == b"host" for name, _ in self.headers) != 1:
            self._fail("a request of HTTP/1.1 has one Host header")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._barren = 0
        self._pieces += 1
        self._body_bytes += len(body)
        if self._pieces > FREE_PIECES + self._body_bytes // PIECE_BYTES:
            self._fail(
                f"the body comes in {self._pieces} pieces of {self._body_bytes} bytes together; "
                f"behind the first {FREE_PIECES}, pieces have {PIECE_BYTES} bytes on average: send larger ones"
            )
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._in_body = False
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """It is answered: who goes on sending its body may do so for a moment."""
        super().on_response_complete()
        if self._in_body and not self.pipeline and not self.transport.is_closing():
            self._await_head()

    def _fail(self, message: str) -> NoReturn:
        """End the parsing of what has come: it is refused with this message."""
        self._fault = message
        raise ValueError(message)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        if len(self.connections) > self.max_connections:
            app = error_response(
                Overloaded(f"{self.max_connections} connections are open", hint="close some, or come again later")
            )
            cycle.keep_alive = False
        super()._start_asgi_task(cycle, app)

    # --- answers that nobody reads ---

    def pause_writing(self) -> None:
        """The client's window is full: what was written waits."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """All that was written is on its way."""
        self._stop_write_timer()
        super().resume_writing()

    def _await_reader(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.write_timeout, self._is_unread, left)
        self.unread.hold(self, left)

    def _stop_write_timer(self) -> None:
        self.unread.release(self)
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _is_unread(self, before: int) -> None:
        """What waits has had its time; nothing was written meanwhile but the end of an answer."""
        if self.transport.get_write_buffer_size() <= before - WRITE_BYTES:
            self._await_reader()
        else:
            self.let_go(f"the client took less than it has to in {self.write_timeout:g} s")

    def let_go(self, why: str) -> None:
        """Abort the connection: its client does not read."""
        self._stop_write_timer()
        state = self._answered.scope.get("state", {}) if self._answered is not None else {}
        log.warning(
            "the connection of request %s is closed, with %d bytes of its answer unread: %s",
            state.get("id", "-"),
            self.transport.get_write_buffer_size(),
            why,
        )
        self.transport.abort()

    # --- heads that do not come, or are none ---

    def _await_head(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.header_timeout, self._is_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_late(self) -> None:
        self._timer = None
        if self._head or self._in_head:
            self._refuse(408, f"the head of the request was not complete after {self.header_timeout:g} s")
        else:
            self.transport.close()  # nothing was asked, or all was answered

    def _refuse(self, status: int, message: str) -> None:
        """Close, and say why where no answer is under way."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not (self.cycle.response_started or self.pipeline):
            self.transport.write(_refusal(status, message))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


def _refusal(status: int, message: str) -> bytes:
    """An answer in OpenAI's shape, as bytes."""
    found = http.HTTPStatus(status)
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": found.name.lower()}
    body = encode({"error": error})
    lines = (
        f"HTTP/1.1 {status} {found.phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def uvicorn_config(app: Any, config: ServerConfig) -> Config:
    """How uvicorn runs the application."""
    return Config(
        app,
        host=config.host,
        port=config.port,
        uds=config.uds,
        http=protocol_for(config),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=None,
    )
