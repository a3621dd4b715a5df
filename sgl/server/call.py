"""One request in the server's hands, and what all requests share.

Owns `Server`, the state of the process (engine, model name, what runs, whether it drains), and `Call`, one request with
its id and tenant: how a handler starts programs and answers. Handlers use nothing of Starlette but `Response`.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sgl.errors import Cancelled, InvalidParameter, ModelNotFound, SglError, Unsupported
from sgl.lang.graph import Graph, ProgramOptions
from sgl.runtime.engine import Engine
from sgl.runtime.rendering import ModelRenderer
from sgl.server.bodies import LARGE
from sgl.server.config import ServerConfig
from sgl.server.failures import Shape, at_field, encode, error_body, in_words
from sgl.server.framing import Framing, server_sent
from sgl.server.metrics import Metrics
from sgl.server.openai.responses_store import ResponseStore
from sgl.server.running import Computation, Running

if TYPE_CHECKING:
    from sgl.server.programs import OpenProgram

P = ParamSpec("P")
T = TypeVar("T")

MAX_UNWRITTEN = 2**14
"""Bytes of a stream that may wait for a write to end; behind them events wait, which `stream_backlog` bounds."""


class Work(Protocol):
    """What runs for a request, as far as whoever aborts it knows it."""

    def fail(self, error: SglError) -> None:
        """Stop it for a reason that its reader is told."""


class Place(NamedTuple):
    """Under which the work of a request is known: tenants may use the same ids, and reach none of each other's."""

    tenant: str
    id: str


class Server:
    """What requests share.

    Args:
        engine: that computes; it belongs to whoever made it.
        config: the server's.

    Attributes:
        model: its name in the API.
        created: when this server began, for the list of models.
        draining: the process ends: nothing new is taken.
        responses: those that are kept, where the operator wants that.
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
        self.responses = (
            ResponseStore(config.response_store_bytes, config.response_lease) if config.response_store_bytes else None
        )
        self._programs: dict[str, OpenProgram] = {}
        self._running: dict[Place, list[Work]] = {}
        self._claimed: set[Place] = set()
        self._admitted: set[Call] = set()
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

    @cached_property
    def profiler_dir(self) -> Path:
        """The folder of all profiles that are asked for over HTTP."""
        return Path(self.config.profiler_dir or tempfile.mkdtemp(prefix="sgl-profiles-"))

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

    def check_generates(self) -> None:
        """Raise `Unsupported` where the model is an encoder."""
        if not self.is_generation:
            raise Unsupported(
                f"{self.model} is an encoder: it generates nothing",
                hint=f"POST {'/classify' if self._num_labels else '/v1/embeddings'}, or serve a model that generates",
                param="model",
            )

    def check_encodes(self, task: Literal["embed", "classify", "rerank"]) -> None:
        """Raise `Unsupported` where the model is none for the task."""
        labels = self._num_labels
        has_head = {"embed": labels == 0, "classify": labels > 0, "rerank": labels == 1}
        if not self.is_generation and has_head[task]:
            return
        serve, gives = {
            "embed": ("an encoder without a head, as minilm-l6", "no embeddings"),
            "classify": ("an encoder with labels (minilm-l6 has none)", "no labels"),
            "rerank": ("a cross-encoder, which has one label (minilm-l6 has none)", "no scores of pairs"),
        }[task]
        other = {"embed": "POST /classify, or ", "classify": "POST /v1/embeddings, or "}.get(task, "")
        raise Unsupported(
            f"{self.model} {'generates text' if self.is_generation else 'is another encoder'}: it gives {gives}",
            hint=f"{'' if self.is_generation else other}serve {serve}",
            param="model",
        )

    @property
    def _num_labels(self) -> int:
        """Of an encoder; those that give embeddings have none."""
        return len((self.info.get("encoder") or {}).get("labels") or ())

    def register(self, place: Place, work: Work) -> None:
        """Make a program, or a computation, known under the id of its request."""
        self._running.setdefault(place, []).append(work)

    def forget(self, place: Place, ended: list[Work]) -> None:
        """What ran for a request has ended; another one with its id (tracing gives many the same) goes on."""
        left = [work for work in self._running.get(place, ()) if work not in ended]
        if left:
            self._running[place] = left
        else:
            self._running.pop(place, None)

    def claim(self, place: Place) -> bool:
        """Take an id for one request, until `release`; False when another one has it, or runs under it."""
        if place in self._claimed or place in self._running:
            return False
        self._claimed.add(place)
        return True

    def release(self, place: Place) -> None:
        """The request that claimed this id has ended."""
        self._claimed.discard(place)

    def abort(self, place: Place, reason: SglError | None = None) -> int:
        """Cancel what runs for a tenant's request; how much there was. Unknown ids are no error."""
        running = self._running.get(place, [])
        for work in running:
            work.fail(reason or Cancelled("aborted by /abort_request"))
        return len(running)

    def abort_all(self, reason: SglError | None = None) -> int:
        """Cancel every request."""
        return sum(self.abort(place, reason) for place in list(self._running))

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

    def admit(self, call: Call) -> None:
        """A request was taken, and will be answered before a drain is over."""
        self._admitted.add(call)

    def dismiss(self, call: Call) -> None:
        """It has its answer; its stream has ended."""
        self._admitted.discard(call)

    @property
    def num_running(self) -> int:
        """Requests that were taken and are not answered, from their body to the end of their stream."""
        return len(self._admitted)


class Call:
    """One request.

    Args:
        id: given by the client in `X-Request-Id`, or made.
        key: the API key that it bears, if any.
        shape: of its errors.

    Attributes:
        warnings: about what was passed over (lenient mode); they go into the response.
        is_large: there is much of it to look at (see `weigh`, `apart`).
        words: names of fields, as the rooms behind this one have them, and as the client does; one after the other.
        constraint: the field that has the constraint, for errors.
    """

    def __init__(self, server: Server, request: Request, id: str, key: str | None, shape: Shape = error_body) -> None:
        self.shape = shape
        self.server = server
        self.request = request
        self.id = id
        self.warnings: list[str] = []
        self.is_large = False
        self.words: list[Mapping[str, str]] = []
        self.constraint = ""
        self.key = key
        self._work: dict[Place, list[Work]] = {}
        self._stack = ExitStack()

    def admit(self) -> None:
        """A drain waits for this request from now on."""
        self.server.admit(self)

    @property
    def tenant(self) -> str:
        """Whose request it is: a digest of its key, where there are several."""
        if len(self.server.config.api_key) < 2:
            return ""
        return hashlib.sha256((self.key or "").encode()).hexdigest()[:16]

    def salt(self, given: str | None) -> str:
        """What separates this tenant's cached prefixes: its key, where there are several, and what it asks for."""
        tenant = self.tenant
        return f"{tenant}/{given}" if tenant and given else tenant or given or ""

    def told(self, error: SglError) -> SglError:
        """An error as the client is told of it: with the names that its fields have."""
        field = self.constraint
        for names in self.words:
            error, field = in_words(error, names), names.get(field, field)
        return at_field(error, field)

    def name(self, rid: str | None) -> None:
        """Let the client's own id be that of this request (for `/abort_request`).

        Raises:
            InvalidParameter: another request with this id is running.
        """
        if rid is not None:
            self.claim(rid)
            self.id = rid

    def claim(self, rid: str) -> None:
        """Take the client's own id for this request, or for a part of it.

        Raises:
            InvalidParameter: another request with this id is running.
        """
        place = Place(self.tenant, rid)
        if not self.server.claim(place):
            raise InvalidParameter(
                f"a request with id {rid!r} is running", hint="use another rid, or wait for it", param="rid"
            )
        self._stack.callback(self.server.release, place)

    def weigh(self, size: int) -> None:
        """So much of this request, or of its answer, is to be looked at from now on: apart where it is much."""
        self.is_large = self.is_large or size >= LARGE

    async def apart(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`work(...)`, on a thread where there is much of it: what takes time in proportion to that holds nobody up."""
        if self.is_large:
            return await asyncio.to_thread(work, *args, **kwargs)
        return work(*args, **kwargs)

    def start(self, graph: Graph, options: ProgramOptions, *, finish: bool = True, rid: str | None = None) -> Running:
        """Start a program; it ends with this call at the latest.

        Args:
            rid: that was claimed for it, where it is not the request's.

        Raises:
            Unsupported: the model generates nothing.
        """
        server = self.server
        server.check_generates()
        watch = server.metrics.watch(graph)
        program = self._stack.enter_context(Running(server.engine, options, server.config.stream_backlog, watch.see))
        self._register(program, rid or self.id)
        if self.is_large and finish:
            program.submit_apart(graph)
        else:
            program.submit(graph, finish=finish)
        return program

    async def compute(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work` that is no program: cancelled when the client goes away, or by `/abort_request`.

        Raises:
            Cancelled: it was.
        """
        computation = Computation(work)
        self._register(computation, self.id)
        began = time.monotonic()
        result = await self.while_connected(computation.result())
        self.server.metrics.computed(time.monotonic() - began)
        return result

    def _register(self, work: Work, id: str) -> None:
        place = Place(self.tenant, id)
        self._work.setdefault(place, []).append(work)
        self.server.register(place, work)

    def close(self) -> None:
        """Cancel what still runs of this request."""
        self.server.dismiss(self)
        for place, work in self._work.items():
            self.server.forget(place, work)
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
        """Server-sent events (see `sgl.server.framing`); an error in their midst is the last one."""
        return EventStream(self, events, server_sent(done=done, named=named))

    def framed(self, events: AsyncGenerator[Any, None], framing: Framing) -> Response:
        """A stream that is written in another way."""
        return EventStream(self, events, framing)


class EventStream(Response):
    """A response of events that come one by one.

    The first event is waited for before anything is sent, so that what fails at once has a status of its own. The
    client's going away, or its being let go because it does not read (`sgl.server.transport`), ends the events'
    generator and with it the program.
    """

    def __init__(self, call: Call, events: AsyncGenerator[Any, None], framing: Framing) -> None:
        self.media_type = framing.media_type
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._call = call
        self._events = events
        self._framing = framing

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

        out = _Output(send)
        writing = asyncio.create_task(out.run())
        try:
            try:
                if self._head is not None:
                    await out.write(self._framing.frame(self._head))
                    async for event in self._events:
                        await out.write(self._framing.frame(event))
                end = self._framing.end
            except SglError as error:
                end = self._framing.error(self._call.shape(self._call.told(error)))
            await out.write(end, is_last=True)
            await writing
        finally:
            await _end(writing)


class _Output:
    """Frames on their way out: all that were made since the last write leave in one.

    So a loop that has much to do, or a client that reads slowly, costs a write for many frames and not one for each.
    What waits here is bounded: `write` waits while it is `MAX_UNWRITTEN` bytes.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._frames: list[bytes] = []
        self._size = 0
        self._is_last = False
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._fault: Exception | None = None

    async def write(self, frame: bytes, *, is_last: bool = False) -> None:
        """Take a frame; raises what a write raised."""
        self._frames.append(frame)
        self._size += len(frame)
        self._is_last = is_last
        self._filled.set()
        while self._size >= MAX_UNWRITTEN and self._fault is None:
            self._emptied.clear()
            await self._emptied.wait()
        if self._fault is not None:
            raise self._fault

    async def run(self) -> None:
        """Write until the last frame is out."""
        try:
            while True:
                await self._filled.wait()
                self._filled.clear()
                data, is_last = b"".join(self._frames), self._is_last
                self._frames.clear()
                self._size = 0
                await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
                if is_last:
                    return
                self._emptied.set()
        except Exception as error:
            self._fault = error
            self._emptied.set()
            raise


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
