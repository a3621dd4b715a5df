"""Bytes to requests: uvicorn's HTTP/1.1 protocol, with bounds that it leaves open.

Owns three answers that are given before there is a request: 431 for a head over `max_header_bytes` (nothing more of it
is read), 408 for a head that does not come within `header_timeout`, 400 for what is no HTTP. Each closes the
connection. Everything behind a complete head is uvicorn's and the application's.
"""

from __future__ import annotations

import asyncio
import http
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from sgl.server.config import ServerConfig
from sgl.server.failures import encode


def protocol_for(config: ServerConfig) -> type[H11Protocol]:
    """The protocol class for a server with this configuration."""

    class Protocol(_BoundedHead):
        header_timeout = config.header_timeout

    return Protocol


class _BoundedHead(H11Protocol):
    header_timeout = 10.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self.conn.our_state is h11.IDLE and self.conn.their_state is h11.IDLE and self._head_timer is None:
            self._await_head()  # of the next request on this connection
        self.conn.receive_data(data)
        self.handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this from the `except` clause of a head that h11 refuses."""
        status = 400
        if self.conn.their_state is h11.ERROR and self._is_oversized():
            status, msg = 431, "the head of the request is too large"
        self._refuse(status, msg)

    def _is_oversized(self) -> bool:
        data, _ = self.conn.trailing_data
        return len(data) > (self.config.h11_max_incomplete_event_size or 0)

    def _await_head(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(self.header_timeout, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing() or self.conn.their_state is not h11.IDLE:
            return
        if self.conn.trailing_data[0]:
            self._refuse(408, f"the head of the request was not complete after {self.header_timeout:g} s")
        else:
            self.transport.close()  # nothing was asked

    def _refuse(self, status: int, message: str) -> None:
        """Answer and close; only before anything was answered on this request."""
        self._stop_timer()
        error = {
            "message": message,
            "type": "invalid_request_error",
            "param": None,
            "code": http.HTTPStatus(status).name.lower(),
        }
        body = encode({"error": error})
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        try:
            reason = http.HTTPStatus(status).phrase.encode()
            output = self.conn.send(h11.Response(status_code=status, headers=headers, reason=reason))
            output = (output or b"") + (self.conn.send(h11.Data(data=body)) or b"")
            self.transport.write(output)
        except h11.LocalProtocolError:  # an answer is under way: there is nothing to say any more
            pass
        self.transport.close()


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
        limit_concurrency=config.max_connections,
        h11_max_incomplete_event_size=config.max_header_bytes,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=None,
    )
