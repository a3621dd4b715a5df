"""The table of routes: each with who may call it, and what its body is.

Owns `Routes` (a module's part of the table), the tiers, and the way from a request to its handler: key, draining, body,
errors. A route cannot be declared without a tier, and the application refuses to be built with one that is not in the
table.

| tier | who |
|---|---|
| `open` | anybody: what probes and load balancers ask, without anything of requests or configuration in it |
| `user` | who bears an API key, where there are keys |
| `admin` | who bears the admin key; without one, anybody on a server without keys, and nobody on one with keys |
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sgl.errors import Draining, Forbidden, InvalidParameter, SglError, Unauthorized
from sgl.server import bodies
from sgl.server.call import Call, EventStream, Server
from sgl.server.config import ServerConfig
from sgl.server.failures import Shape, error_body, error_response, internal

Tier: TypeAlias = Literal["open", "user", "admin"]
Handler: TypeAlias = Callable[..., Awaitable[Any]]

log = logging.getLogger("sgl.server")


class Route(NamedTuple):
    """One method on one path.

    Attributes:
        query: names of the parameters that its URL may have.
        goes_on: it belongs to work that is under way, or watches it: taken while the server drains, too.
    """

    method: str
    path: str
    tier: Tier
    handler: Handler
    body: Any = None
    shape: Shape = error_body
    goes_on: bool = False
    query: tuple[str, ...] = ()


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a route that has none, where a client sends one."""


class Routes:
    """The routes of a module.

    Args:
        shape: of their errors.

    Example:
        >>> routes = Routes()
        >>> @routes.get("/ping", "open")
        ... async def ping(call):
        ...     return {}
        >>> routes.all[0].path, routes.all[0].tier
        ('/ping', 'open')
    """

    def __init__(self, shape: Shape = error_body) -> None:
        self.all: list[Route] = []
        self._shape = shape

    def get(
        self, path: str, tier: Tier, *, goes_on: bool = False, query: tuple[str, ...] = ()
    ) -> Callable[[Handler], Handler]:
        """A handler of GET requests: `async def handler(call)`."""
        return self._route("GET", path, tier, None, goes_on, query)

    def post(
        self, path: str, tier: Tier, body: Any = None, *, goes_on: bool = False, query: tuple[str, ...] = ()
    ) -> Callable[[Handler], Handler]:
        """A handler of POST requests: `async def handler(call, body)`, or `handler(call)` where none is taken."""
        return self._route("POST", path, tier, body, goes_on, query)

    def delete(self, path: str, tier: Tier, *, goes_on: bool = False) -> Callable[[Handler], Handler]:
        """A handler of DELETE requests: `async def handler(call)`."""
        return self._route("DELETE", path, tier, None, goes_on, ())

    def _route(
        self, method: str, path: str, tier: Tier, body: Any, goes_on: bool, query: tuple[str, ...]
    ) -> Callable[[Handler], Handler]:
        def register(handler: Handler) -> Handler:
            self.all.append(Route(method, path, tier, handler, body, self._shape, goes_on, query))
            return handler

        return register


def endpoint(server: Server, route: Route) -> Callable[[Request], Awaitable[Response]]:
    """What answers requests on a route."""

    async def answer(request: Request) -> Response:
        call: Call | None = None
        response: Response | None = None
        try:
            key = bearer(request)
            check_access(server.config, route.tier, key)
            if server.draining and route.tier != "open" and not route.goes_on:
                raise Draining("the server is shutting down", hint="send the request to another one")
            call = Call(server, request, request.state.id, key, route.shape)
            if route.tier != "open":
                call.admit()
            response = await _handled(route, call)
            if isinstance(response, EventStream):
                await response.first()
        except SglError as error:
            response = error_response(error if call is None else call.told(error), route.shape)
        except Exception:
            log.exception("request %s to %s failed", request.state.id, route.path)
            response = error_response(internal(request.state.id), route.shape)
        finally:
            if call is not None and not isinstance(response, EventStream):  # which closes its call at its end
                call.close()
        server.metrics.answered(route.path, response.status_code)
        return response

    return answer


async def _handled(route: Route, call: Call) -> Response:
    call.warnings = _check_query(route, call)
    result = await (_without_body(route, call) if route.body is None else _with_body(route, call))
    response = result if isinstance(result, Response) else await call.apart(call.json, result)
    for warning in call.warnings:
        response.headers.append("X-Warning", warning.encode("ascii", "replace").decode())
    return response


def _check_query(route: Route, call: Call) -> list[str]:
    """Warnings about parameters in the URL that the route does not have. What probes ask may have any.

    Raises:
        InvalidParameter: there is one, and the server is not lenient.
    """
    names = call.request.query_params.keys() if route.tier != "open" else ()
    unknown = [name for name in names if name not in route.query]
    taken = f"{route.path} takes {' and '.join(route.query)}" if route.query else "leave it out"
    if unknown and not call.server.config.lenient:
        raise InvalidParameter(f"unknown query parameter {unknown[0]!r}", hint=taken, param=unknown[0])
    return [f"unknown query parameter {name!r} was passed over ({taken})" for name in unknown]


async def _without_body(route: Route, call: Call) -> Any:
    if route.method != "GET":
        config = call.server.config
        raw = await bodies.read_body(call.request, config.max_body_bytes, config.body_timeout)
        if raw.strip():
            _, warnings = await bodies.decode(raw, Nothing, config.lenient)
            call.warnings += warnings
    return await route.handler(call)


async def _with_body(route: Route, call: Call) -> Any:
    config = call.server.config
    bodies.check_media_type(call.request.headers)
    raw = await bodies.read_body(call.request, config.max_body_bytes, config.body_timeout)
    call.weigh(len(raw))
    body, warnings = await bodies.decode(raw, route.body, config.lenient)
    call.warnings += warnings
    return await route.handler(call, body)


def bearer(request: Request) -> str | None:
    """The key that a request bears: `Authorization: Bearer`, or `x-api-key` as Anthropic's clients send it."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return request.headers.get("x-api-key")


def check_access(config: ServerConfig, tier: Tier, key: str | None) -> None:
    """Raise unless a request with this key may use routes of this tier.

    Raises:
        Unauthorized: no key, or a wrong one.
        Forbidden: a key that does not reach so far.
    """
    if tier == "open":
        return
    is_admin = _equal(key, config.admin_api_key)
    is_user = True in [_equal(key, each) for each in config.api_key]  # all of them: the time tells nothing
    if tier == "user":
        if not config.api_key or is_user or is_admin:
            return
        raise Unauthorized(
            "no API key was given" if key is None else "the API key is wrong",
            hint="send Authorization: Bearer KEY",
        )
    if is_admin or (config.admin_api_key is None and not config.api_key):
        return
    if not is_user:
        raise Unauthorized("this route wants the admin key", hint="send Authorization: Bearer ADMIN_KEY")
    raise Forbidden(
        "this route wants the admin key",
        hint="use it" if config.admin_api_key is not None else "start the server with --admin-api-key to open it",
    )


def _equal(given: str | None, key: str | None) -> bool:
    return given is not None and key is not None and hmac.compare_digest(given.encode(), key.encode())


def body_schema(route: Route) -> dict[str, Any] | None:
    """The JSON schema of a route's body, for the API description."""
    if route.body is None:
        return None
    schemas, components = msgspec.json.schema_components([route.body], ref_template="#/components/schemas/{name}")
    return {"schema": schemas[0], "components": components}
