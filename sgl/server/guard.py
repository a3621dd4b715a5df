"""What holds for every request before it is known which one it is.

Owns the request id, the check of the Host header, the access log, and the last resort: an exception that nobody caught
is one 500 with the request's id in it, and its traceback goes to the log alone.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgl.errors import Forbidden
from sgl.server.config import ServerConfig
from sgl.server.failures import error_response, internal

log = logging.getLogger("sgl.server")
access = logging.getLogger("sgl.server.access")

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Guard:
    """ASGI application around `app`."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._hosts = config.hosts
        self._log_requests = config.log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
        given = {name: value.decode("latin-1") for name, value in headers if name in (b"x-request-id", b"host")}
        wanted = given.get(b"x-request-id", "")
        request_id = wanted if _ID.fullmatch(wanted) else uuid.uuid4().hex
        scope.setdefault("state", {})["id"] = request_id
        start = time.monotonic()
        status = 0
        is_whole = False

        async def tagged(message: Message) -> None:
            nonlocal status, is_whole
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            if not self._is_allowed(given.get(b"host", "")):
                error = Forbidden(
                    "this Host is not served here", hint="use http://127.0.0.1, or give --allowed-hosts or an API key"
                )
                await error_response(error)(scope, receive, tagged)
            else:
                await self._app(scope, receive, tagged)
        except Exception:
            log.exception("request %s to %s failed", request_id, scope["path"])
            if is_whole:
                return
            if status:
                raise  # the answer has begun: the connection is closed
            await error_response(internal(request_id))(scope, receive, tagged)
        finally:
            if self._log_requests:
                access.info(
                    "%s %s %d %.3f s id=%s",
                    scope["method"],
                    scope["path"],
                    status,
                    time.monotonic() - start,
                    request_id,
                )

    def _is_allowed(self, host: str) -> bool:
        if self._hosts is None:
            return True
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        return name.strip("[]").lower() in self._hosts
