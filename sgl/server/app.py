"""The application: every route behind the guard.

Owns the assembly, and the rule that no route is served that is not in the table with its tier.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

import sgl
from sgl.errors import InvalidRequest, MethodNotAllowed, NotFound
from sgl.server import anthropic, embeddings, health, native, ollama, playground, programs, scoring
from sgl.server.call import Server
from sgl.server.failures import error_response, internal
from sgl.server.guard import Guard
from sgl.server.openai import chat, completions, models, responses
from sgl.server.routes import Route, Routes, body_schema, endpoint

MODULES: tuple[Any, ...] = (
    health,
    models,
    chat,
    completions,
    responses,
    anthropic,
    ollama,
    scoring,
    embeddings,
    programs,
    native,
    playground,
)
"""Each has its part of the table as `routes`."""


def table() -> list[Route]:
    """Every route with its tier.

    Example:
        >>> {route.tier for route in table() if route.path.startswith("/v1/")}
        {'user'}
    """
    return [*(route for module in MODULES for route in module.routes.all), *_own.all]


def create_app(server: Server) -> ASGIApp:
    """The ASGI application of a server; it neither starts nor ends its engine."""
    app = FastAPI(title="sgl", version=sgl.__version__, openapi_url=None, docs_url=None, redoc_url=None)
    for route in table():
        app.add_route(route.path, endpoint(server, route), methods=[route.method], include_in_schema=False)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)
    app.state.server = server
    return Guard(app, server.config)


async def _bug(request: Request, error: Exception) -> Response:
    """What nobody caught: FastAPI answers with this, and raises it again for the guard's log."""
    return error_response(internal(request.state.id))


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router says of a path or method that it does not know."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    kind: InvalidRequest
    if status == 405:
        allowed = sorted(route.method for route in table() if route.path == request.url.path)
        kind = MethodNotAllowed(
            f"{request.method} is not taken by {request.url.path}",
            hint=f"use {' or '.join(allowed) or 'another method'}",
        )
    else:
        kind = NotFound(f"there is no route {request.url.path}", hint="GET /openapi.json lists them")
    return error_response(kind)


_own = Routes()


@_own.get("/openapi.json", "open")
async def openapi(call: Any) -> dict[str, Any]:
    """The description of this API, made from the table of routes."""
    return description()


@cache  # some 20 ms, for anybody who asks
def description() -> dict[str, Any]:
    """OpenAPI 3.1 of every route; `x-tier` is who may call it."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for route in table():
        found = body_schema(route)
        operation: dict[str, Any] = {
            "summary": (route.handler.__doc__ or "").strip().splitlines()[0],
            "x-tier": route.tier,
            "responses": {"200": {"description": "the answer"}, "default": {"description": "an error"}},
        }
        if found is not None:
            schemas.update(found["components"])
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": found["schema"]}}}
        if route.tier != "open":
            operation["security"] = [{"bearer": []}]
        paths.setdefault(route.path.replace(":path", ""), {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "sgl", "version": sgl.__version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }
