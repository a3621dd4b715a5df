"""One request in the server's hands, and what all requests share.

Owns `Server`, the state of the process (engine, model name, what runs, whether it drains), and `Call`, one request with
its id and tenant: how a handler starts programs and answers. Handlers use nothing of Starlette but `Response`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sgl.errors import Cancelled, InvalidParameter, ModelNotFound, SglError
from sgl.lang.graph import Graph, ProgramOptions
from sgl.runtime.engine import Engine
from sgl.runtime.rendering import ModelRenderer
from sgl.server.config import ServerConfig
from sgl.server.failures import encode, error_body
from sgl.server.metrics import Metrics
from sgl.server.running import Running

if TYPE_CHECKING:
    from sgl.server.programs import OpenProgram

T = TypeVar("T")

WRITE_TIMEOUT_S = 60.0
"""Seconds that a client may leave its receive buffer full before its connection is closed."""


class Server:
    """What requests share.

    Args:
        engine: that computes; it belongs to whoever made it.
        config: the server's.

    Attributes:
        model: its name in the API.
        created: when this server began, for the list of models.
        draining: the process ends: nothing new is taken.
    """

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.info = dict(engine.server_info())
        self.model = config.served_model_name or str(self.info["model"])
        self.created = int(time.time())
        self.draining = False
        self.metrics = Metrics(self.model)
        self.formats: dict[str, str | None] = dict(self.info.get("formats") or {})
        self._programs: dict[str, OpenProgram] = {}
        self._running: dict[str, list[Running]] = {}
        self._renderer: ModelRenderer | None = None
        self._renderer_lock = asyncio.Lock()

    @property
    def is_generation(self) -> bool:
        """Whether the model generates text; encoders do not."""
        return self.info.get("kind") != "encoder"

    @cached_property
    def context_len(self) -> int:
        """Most tokens of a prompt with its output."""
        return int(self.info["resolved"]["context_len"])

    @cached_property
    def default_new_tokens(self) -> int:
        """What a request that names no bound may generate: all that fits. The engine ends it at the context."""
        resolved = self.info["resolved"]
        pool = int(resolved["num_pages"]) * int(resolved["page_size"])
        return self.context_len if pool >= self.context_len else max(pool // 2, 1)

    async def renderer(self) -> ModelRenderer:
        """What tokenizes and renders as the engine does, in this process; made on a thread at first use."""
        async with self._renderer_lock:
            if self._renderer is None:
                self._renderer = await asyncio.to_thread(self.engine.renderer)
        return self._renderer

    def check_model(self, name: str | None) -> None:
        """Raise `ModelNotFound` unless `name` is the served model's, or none."""
        if name in (None, "", self.model, "default", str(self.info["model"])):
            return
        raise ModelNotFound(
            f"the model {name!r} is not served here", hint=f"this server has {self.model!r}", param="model"
        )

    def register(self, request_id: str, program: Running) -> None:
        """Make a program known under the id of its request."""
        self._running.setdefault(request_id, []).append(program)

    def forget(self, request_id: str) -> None:
        """The request with this id has ended."""
        self._running.pop(request_id, None)

    def knows(self, request_id: str) -> bool:
        """Whether a request with this id runs."""
        return request_id in self._running

    def abort(self, request_id: str) -> int:
        """Cancel the programs of a request; how many there were. Unknown ids are no error."""
        programs = self._running.get(request_id, [])
        for program in programs:
            program.fail(Cancelled("aborted by /abort_request"))
        return len(programs)

    def abort_all(self) -> int:
        """Cancel every request."""
        return sum(self.abort(request_id) for request_id in list(self._running))

    def open_program(self, program: OpenProgram) -> str:
        """Make a program known to its fragments; its id, which cannot be guessed."""
        id = uuid.uuid4().hex
        self._programs[id] = program
        return id

    def program(self, id: str) -> OpenProgram | None:
        """An open program."""
        return self._programs.get(id)

    def close_program(self, id: str) -> None:
        """It has ended."""
        self._programs.pop(id, None)

    @property
    def num_running(self) -> int:
        """Requests that have programs."""
        return len(self._running)


class Call:
    """One request.

    Args:
        id: given by the client in `X-Request-Id`, or made.
        key: the API key that it bears, if any.

    Attributes:
        warnings: about what was passed over (lenient mode); they go into the response.
    """

    def __init__(self, server: Server, request: Request, id: str, key: str | None) -> None:
        self.server = server
        self.request = request
        self.id = id
        self.warnings: list[str] = []
        self.key = key
        self._stack = ExitStack()

    def salt(self, given: str | None) -> str:
        """What separates this tenant's cached prefixes: its key, where there are several, and what it asks for."""
        keys = self.server.config.api_key
        tenant = hashlib.sha256((self.key or "").encode()).hexdigest()[:16] if len(keys) > 1 else ""
        return f"{tenant}/{given}" if tenant and given else tenant or given or ""

    def name(self, rid: str | None) -> None:
        """Let the client's own id be that of this request (for `/abort_request`).

        Raises:
            InvalidParameter: another request with this id is running.
        """
        if rid is None:
            return
        if self.server.knows(rid):
            raise InvalidParameter(
                f"a request with id {rid!r} is running", hint="use another rid, or wait for it", param="rid"
            )
        self.id = rid

    def start(self, graph: Graph, options: ProgramOptions, *, finish: bool = True) -> Running:
        """Start a program; it ends with this call at the latest."""
        server = self.server
        watch = server.metrics.watch()
        program = self._stack.enter_context(Running(server.engine, options, server.config.stream_backlog, watch.see))
        self.server.register(self.id, program)
        program.submit(graph, finish=finish)
        return program

    def close(self) -> None:
        """Cancel what still runs of this request."""
        self.server.forget(self.id)
        self._stack.close()

    async def while_connected(self, work: Awaitable[T]) -> T:
        """The result of `work`, which is cancelled when the client goes away.

        Raises:
            Cancelled: it went away.
        """
        task = asyncio.ensure_future(work)
        gone = asyncio.create_task(_gone(self.request.receive))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Cancelled("the client went away")
            return task.result()
        finally:
            await _end(task, gone)

    def json(self, value: Any, status: int = 200) -> Response:
        """An answer as JSON, with the warnings of this call."""
        if self.warnings and isinstance(value, dict):
            value = {**value, "warnings": self.warnings}
        return Response(encode(value), status, media_type="application/json")

    def stream(
        self, events: AsyncGenerator[Any, None], *, done: bool = True, named: Callable[[Any], str] | None = None
    ) -> Response:
        """Server-sent events, one for each value (encoded as JSON); an error in their midst is the last one.

        Args:
            done: end with `data: [DONE]`, as OpenAI's API does.
            named: gives each event its name.
        """
        return EventStream(self, events, done, named)


class EventStream(Response):
    """A response of server-sent events.

    The first event is waited for before anything is sent, so that what fails at once has a status of its own. The
    client's going away, or its not reading for `WRITE_TIMEOUT_S`, ends the events' generator and with it the program.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        call: Call,
        events: AsyncGenerator[Any, None],
        done: bool,
        named: Callable[[Any], str] | None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._call = call
        self._events = events
        self._done = done
        self._named = named

    async def first(self) -> None:
        """Wait for the first event; raises `SglError` when there is an error in its place."""
        self._head = await self._call.while_connected(anext(self._events, None))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            await _end(work, gone)
            await self._events.aclose()
            self._call.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def write(data: bytes, more: bool = True) -> None:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            if self._head is not None:
                await write(self._frame(self._head))
                async for event in self._events:
                    await write(self._frame(event))
            end = b"data: [DONE]\n\n" if self._done else b""
        except SglError as error:
            end = self._error_frame(error)
        await write(end, more=False)

    def _frame(self, event: Any) -> bytes:
        name = f"event: {self._named(event)}\n".encode() if self._named is not None else b""
        return name + b"data: " + encode(event) + b"\n\n"

    def _error_frame(self, error: SglError) -> bytes:
        name = b"event: error\n" if self._named is not None else b""
        return name + b"data: " + encode(error_body(error)) + b"\n\n"


async def _gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def new_id(prefix: str) -> str:
    """An id as OpenAI's API writes them.

    Example:
        >>> new_id("chatcmpl").startswith("chatcmpl-")
        True
    """
    return f"{prefix}-{uuid.uuid4().hex}"
