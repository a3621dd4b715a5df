"""What probes, dashboards and load balancers ask.

Owns three different questions: live (this process and the worker exist), ready (it takes requests: the worker answers,
steps succeed, no drain), and whether a token really comes out (`/health_generate`). None of them waits for another, or
for a thread, of which requests may have taken all; and each probe is a program of its own, so that two at once do not
collide.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response

import sgl
from sgl.errors import EngineDead, SglError
from sgl.lang.graph import Gen, Graph, ProgramOptions, Sampling, Tokens
from sgl.server.call import Call
from sgl.server.metrics import CONTENT_TYPE
from sgl.server.routes import Routes

routes = Routes()

PROBE_S = 5.0
"""Longest wait for the worker's answer to a probe, or to a scrape."""


async def _health(call: Call) -> tuple[bool, bool, str]:
    health = await call.server.engine.async_health(PROBE_S)
    if call.server.draining:
        return health.live, False, "the server is shutting down"
    return health.live, health.ready, health.reason


def _answer(call: Call, good: bool, reason: str) -> Response:
    return call.json({"status": "ok"} if good else {"status": "unavailable", "reason": reason}, 200 if good else 503)


@routes.get("/health", "open")
async def health(call: Call) -> Any:
    """200 when requests are taken."""
    _, ready, reason = await _health(call)
    return _answer(call, ready, reason)


@routes.get("/health/ready", "open")
async def ready(call: Call) -> Any:
    """As `/health`."""
    return await health(call)


@routes.get("/health/live", "open")
async def live(call: Call) -> Any:
    """200 while the process and its worker exist, also when they drain or are slow."""
    alive = call.server.engine.alive
    return _answer(call, alive, "the engine's worker ended")


@routes.get("/ping", "open")
async def ping(call: Call) -> Any:
    """200 when requests are taken."""
    return await health(call)


@routes.get("/health_generate", "user")
async def health_generate(call: Call) -> Any:
    """200 once a token was generated, or a text encoded."""
    if not call.server.is_generation:
        await call.while_connected(call.server.engine.async_encode(["probe"]))
        return _answer(call, True, "")
    graph = Graph(
        nodes=(
            Tokens(id=0, token_ids=(0,)),
            Gen(id=1, name="probe", sampling=Sampling(max_new_tokens=1, temperature=0.0, ignore_eos=True)),
        )
    )
    options = ProgramOptions(name="probe", want_text=False, deadline_s=60.0, cache_salt=f"probe-{call.id}")
    try:
        program = call.start(graph, options)
        await call.while_connected(_finish(program.events()))
    except SglError as error:
        return _answer(call, False, error.message)
    return _answer(call, True, "")


async def _finish(events: Any) -> None:
    async for _ in events:
        continue


@routes.get("/version", "open")
async def version(call: Call) -> Any:
    """The version of sgl."""
    return {"version": sgl.__version__}


@routes.get("/metrics", "user", goes_on=True)
async def metrics(call: Call) -> Any:
    """Prometheus metrics; without the engine's while its worker is away, or does not answer."""
    try:
        stats = await asyncio.wait_for(call.server.engine.async_stats(), PROBE_S)
    except (EngineDead, TimeoutError):
        stats = {}
    return Response(call.server.metrics.text(stats), media_type=CONTENT_TYPE)
