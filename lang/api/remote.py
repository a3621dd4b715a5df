"""`sgl.RemoteEngine`: programs on an sgl server, exactly as in process.

Owns the client of the server's program routes. A program is one POST whose answer streams its events; a static one
takes no other round trip, one that goes on posts its fragments beside it. All connections live on one thread of the
backend, however many programs are open, and the server frees a program's state when its stream breaks off.

Fails with `EngineDead` where the server cannot be reached or goes away, with `RemoteError` where what answers is no sgl
server, and with the server's own errors, typed as they are there.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec

from sgl.errors import Cancelled, ConfigError, EngineDead, ErrorInfo, RemoteError, SglError, StateLost, Unsupported
from sgl.lang.backend import EventSink
from sgl.lang.graph import (
    DoneEvent,
    Event,
    FailedEvent,
    Graph,
    ProgramOptions,
    StateText,
    lone_surrogate,
)

if TYPE_CHECKING:
    import httpx2

_CONNECT_S = 10.0


class RemoteEngine:
    """A backend over an sgl server (`sgl serve`).

    Args:
        url: of the server, as `http://127.0.0.1:30000`; a `/v1` at its end, as OpenAI's clients have it, is left out.
        api_key: of the server, where it has keys.
        timeout_s: for the answers that are no programs; a program takes as long as it takes (`deadline_s` bounds it).

    Raises:
        ConfigError: the URL is none, or no header can carry the key.

    Example:
        >>> import sgl
        >>> engine = sgl.RemoteEngine("http://127.0.0.1:9")  # nobody listens there
        >>> engine.server_info()
        Traceback (most recent call last):
        sgl.errors.EngineDead: no sgl server answers at http://127.0.0.1:9 (start one with sgl serve, or check the URL)
        >>> engine.shutdown()
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ConfigError(f"url is {url!r}; expected http://HOST:PORT", param="url")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError(
                "api_key has characters that a header cannot carry", hint="give the server's own key", param="api_key"
            )
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._thread = _Loop()
        self._client: httpx2.AsyncClient | None = None
        self._info: dict[str, Any] | None = None
        self._sessions: set[RemoteSession] = set()

    # --- as a backend of the language ---

    def open(self, sink: EventSink, options: ProgramOptions) -> RemoteSession:
        """Start a program (see `sgl.lang.backend`)."""
        session = RemoteSession(self, sink, options)
        self._sessions.add(session)
        return session

    def flush_cache(self, *, wait_s: float = 0.0) -> bool:
        """Drop what no program uses from the server's cache; on a server with keys that takes the admin's."""
        self._ask("POST", f"/flush_cache?timeout={wait_s:g}")
        return True

    def server_info(self) -> Mapping[str, Any]:
        """What the server runs."""
        found: dict[str, Any] = self._ask("GET", "/server_info")
        return found

    def sampling_defaults(self) -> Mapping[str, Any]:
        """The sampling fields that the server's model recommends; asked for once."""
        found: Mapping[str, Any] = self._known().get("sampling_defaults") or {}
        return found

    def stats(self) -> dict[str, Any]:
        """The server's counters (see `sgl.runtime.stats.Stats`)."""
        found: dict[str, Any] = self._ask("GET", "/server_info")["stats"]
        return found

    @property
    def alive(self) -> bool:
        """Whether the server takes requests."""
        try:
            self._ask("GET", "/health")
        except SglError:
            return False
        return True

    def shutdown(self) -> None:
        """Close all connections; open programs fail with `EngineDead`. The server goes on. Idempotent."""
        for session in list(self._sessions):
            session.fail(EngineDead("this connection to the server was shut down", hint="create a new RemoteEngine"))
        self._thread.close(self._close)

    async def _close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    def __enter__(self) -> RemoteEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def __reduce__(self) -> str:
        raise Unsupported("a RemoteEngine cannot be sent to another process", hint="create one in each process")

    def __repr__(self) -> str:
        return f"RemoteEngine({self.url!r})"

    # --- for its sessions ---

    @property
    def client(self) -> httpx2.AsyncClient:
        """The connections; only on the thread."""
        if self._client is None:
            import httpx2

            self._client = httpx2.AsyncClient(
                base_url=self.url,
                headers=self._headers,
                timeout=httpx2.Timeout(None, connect=_CONNECT_S),
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
                trust_env=False,
            )
        return self._client

    def run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine on the thread."""
        return self._thread.run(work)

    def forget(self, session: RemoteSession) -> None:
        """It has ended."""
        self._sessions.discard(session)

    async def request(self, method: str, path: str, body: bytes | None = None) -> Any:
        """One request with its answer; only on the thread.

        Raises:
            SglError: the server says no, or nothing.
        """
        import httpx2

        try:
            response = await self.client.request(method, path, content=body, timeout=self._timeout_s)
        except httpx2.TimeoutException:
            raise EngineDead(f"{self.url} did not answer in {self._timeout_s:g} s", hint="raise timeout_s") from None
        except httpx2.HTTPError as error:
            raise self.unreachable(error) from None
        if response.is_error:
            raise error_in(response.status_code, response.content)
        return msgspec.json.decode(response.content)

    def unreachable(self, error: Exception) -> SglError:
        """What a broken connection means."""
        import httpx2

        if isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout)):
            return EngineDead(f"no sgl server answers at {self.url}", hint="start one with sgl serve, or check the URL")
        return EngineDead(f"the connection to {self.url} broke off", hint="is the server still running?")

    def _ask(self, method: str, path: str) -> Any:
        return self.run(self.request(method, path)).result()

    def _known(self) -> dict[str, Any]:
        if self._info is None:
            self._info = self._ask("GET", "/server_info")
        return self._info


class RemoteSession:
    """One program on a server (see `sgl.lang.backend.Session`)."""

    def __init__(self, engine: RemoteEngine, sink: EventSink, options: ProgramOptions) -> None:
        self._engine = engine
        self._sink = sink
        self._options = options
        self._lock = threading.Lock()
        self._begun = False
        self._ended = False
        self._id: Future[str] = Future()
        self._order: asyncio.Lock | None = None
        self._stream: Future[Any] | None = None

    def submit(self, graph: Graph, *, finish: bool = False) -> None:
        """Execute a whole program, or what is new of it.

        Raises:
            SglError: the program cannot be sent.
        """
        body = {"graph": graph, "finish": finish}
        with self._lock:
            if self._begun:
                self._later(self._post("POST", "/fragments", _encoded(body)))
                return
            self._begun = True
            options = {**msgspec.to_builtins(self._options), "stream": self._options.stream}
            first = {**body, "stream": True, "options": options}
            self._stream = self._engine.run(self._follow(_encoded(first)))

    def read_state(self, branch: int) -> Future[StateText]:
        """The text and ids of a live branch after everything submitted so far."""
        with self._lock:
            begun = self._begun
        if not begun:
            self.submit(Graph(nodes=()))
        return self._engine.run(self._read(branch))

    def cancel(self) -> None:
        """Stop the program and release its state."""
        self.fail(Cancelled("the program was cancelled"))

    def fail(self, error: SglError) -> None:
        """End it here, which ends it on the server, too."""
        if self._end(FailedEvent(error=error.to_info())) and self._stream is not None:
            self._stream.cancel()

    # --- on the thread ---

    async def _follow(self, body: bytes) -> None:
        """The program's one stream: all its events, in order."""
        import httpx2

        client = self._engine.client
        try:
            headers = {"Content-Type": "application/json"}
            async with client.stream("POST", "/v1/programs", content=body, headers=headers) as response:
                if response.is_error:
                    raise error_in(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        self._take(line.removeprefix("data: ").encode())
            raise EngineDead("the server ended the program's stream without a reason")
        except httpx2.HTTPError as error:
            self._fail(self._engine.unreachable(error))
        except SglError as error:
            self._fail(error)
        except msgspec.MsgspecError as error:
            self._fail(RemoteError(f"{self._engine.url} does not speak as this version of sgl does: {error}"))

    def _take(self, data: bytes) -> None:
        if not self._id.done():
            started = msgspec.json.decode(data, type=_Started)
            self._id.set_result(started.id)
            return
        event: Event = msgspec.json.decode(data, type=Event)
        if isinstance(event, (DoneEvent, FailedEvent)):
            self._end(event)
        elif not self._ended:
            self._sink(event)

    def _fail(self, error: SglError) -> None:
        self._end(FailedEvent(error=error.to_info()))

    def _end(self, event: Event) -> bool:
        """Deliver the last event, once."""
        with self._lock:
            if self._ended:
                return False
            self._ended = True
        self._engine.forget(self)
        if not self._id.done():
            self._id.set_exception(StateLost("the program has ended"))
        self._sink(event)
        return True

    def _later(self, work: Coroutine[Any, Any, Any]) -> None:
        self._engine.run(self._or_fail(work))

    async def _or_fail(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            await work
        except SglError as error:
            self._fail(error)
            if self._stream is not None:
                self._stream.cancel()

    async def _post(self, method: str, path: str, body: bytes | None = None) -> Any:
        """A request about this program, after those before it."""
        if self._order is None:
            self._order = asyncio.Lock()
        async with self._order:  # which is fair: requests go in the order in which they came
            id = await asyncio.wrap_future(self._id)
            return await self._engine.request(method, f"/v1/programs/{id}{path}", body)

    async def _read(self, branch: int) -> StateText:
        if self._ended:
            raise StateLost(f"branch {branch} is not there any more: the program has ended")
        try:
            state = await self._post("GET", f"/branches/{branch}")
        except SglError as error:
            raise StateLost(f"branch {branch} is not there any more: {error.message}") from None
        return msgspec.convert(state, StateText)


class _Started(msgspec.Struct, frozen=True, tag="program"):
    """The first line of a program's stream."""

    id: str
    protocol: int


def error_in(status: int, body: bytes) -> SglError:
    """The error that an answer holds, of the server's own type where it names one.

    Example:
        >>> error_in(429, b'{"error": {"message": "full", "code": "queue_full", "param": null}}')
        QueueFull('full')
        >>> error_in(502, b"<html>")
        RemoteError('the server answered with status 502')
    """
    try:
        found = msgspec.json.decode(body)["error"]
        details = {**(found.get("details") or {}), **({"param": found["param"]} if found.get("param") else {})}
        return SglError.from_info(ErrorInfo(found["code"], found["message"], "", details))
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        return RemoteError(f"the server answered with status {status}", remote_status=status)


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError as error:
        raise lone_surrogate(error) from None


class _Loop:
    """An event loop on a thread of its own, started at the first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Start a coroutine; its future."""
        with self._lock:
            if self._closed:
                work.close()
                raise EngineDead("this RemoteEngine was shut down", hint="create a new one")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="sgl-remote", daemon=True)
                self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `last`, then end the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(_finish(last), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _finish(last: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Cancel what runs on this loop, wait for it, then run `last`."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await last()
