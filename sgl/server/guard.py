"""What holds for every request before it is known which one it is.

Owns the request id, the checks of Host and of where a request comes from, the access log, and the last resort: an
exception that nobody caught is one 500 with the request's id in it, and its traceback goes to the log alone.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgl.errors import Forbidden
from sgl.server.config import ServerConfig
from sgl.server.failures import error_response, internal

log = logging.getLogger("sgl.server")
access = logging.getLogger("sgl.server.access")

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_READ = (b"x-request-id", b"host", b"origin", b"sec-fetch-site")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class Guard:
    """ASGI application around `app`."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._hosts = config.hosts
        self._has_keys = bool(config.api_key)
        self._named = frozenset(name.lower() for name in config.allowed_hosts)
        self._log_requests = config.log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
        given = {name: value.decode("latin-1") for name, value in headers if name in _READ}
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
            error = self._refusal(scope["method"], given)
            if error is not None:
                await error_response(error)(scope, receive, tagged)
            else:
                await self._app(scope, receive, tagged)
        except Exception:
            log.exception("request %s to %s failed", request_id, quote(scope["path"]))
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
                    quote(scope["path"]),  # a line break in it would write lines of its own
                    status,
                    time.monotonic() - start,
                    request_id,
                )

    def _refusal(self, method: str, given: Mapping[bytes, str]) -> Forbidden | None:
        """Why a request is not for this server, or not from whom it serves."""
        host = given.get(b"host", "")
        if self._hosts is not None and _name(host) not in self._hosts:
            return Forbidden(
                "this Host is not served here", hint="use http://127.0.0.1, or give --allowed-hosts or an API key"
            )
        if method not in _SAFE_METHODS and not self._has_keys and self._is_foreign(host, given):
            return Forbidden(
                "a page of another origin may not use a server without keys",
                hint="start the server with --api-key, or name the page's host in --allowed-hosts",
            )
        return None

    def _is_foreign(self, host: str, given: Mapping[bytes, str]) -> bool:
        """Whether a browser sends this for a page that is not the server's own. Other clients send neither header.

        A browser sends what a page of any site asks for (only the answer is kept from the page), so without a key,
        which such a page has not, the headers that no page can change are all that tells.
        """
        origin = given.get(b"origin")
        if origin is None:
            return given.get(b"sec-fetch-site", "none") not in ("none", "same-origin")
        authority = origin.partition("://")[2].lower()
        return not authority or (authority != host.lower() and _name(authority) not in self._named)


def _name(host: str) -> str:
    """The name in `name:port`, without the brackets of an IPv6 address."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    return name.strip("[]").lower()
