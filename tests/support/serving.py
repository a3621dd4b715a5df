"""A server in this process, for tests that need its routes and not its process.

`serving(engine)` runs the application as uvicorn runs it, transport included, on a thread; the engine stays the test's.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sgl.runtime.engine import Engine
from sgl.server.app import create_app
from sgl.server.call import Server
from sgl.server.config import server_config
from sgl.server.serve import WebServer
from sgl.server.transport import uvicorn_config

START_S = 20.0
THREAD = "serving"
"""Name of the thread that a server's loop runs on."""


class Served:
    """A running server: its address, the objects behind it, and the loop that they run on."""

    def __init__(self, server: Server, web: WebServer, loop: asyncio.AbstractEventLoop, port: int) -> None:
        self.server = server
        self.loop = loop
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._web = web

    @property
    def num_connections(self) -> int:
        """Connections that are open, those that are about to close among them."""
        return len(self._web.server_state.connections)


@contextmanager
def serving(engine: Engine, *, send_buffer: int | None = None, **options: Any) -> Iterator[Served]:
    """Serve an engine with these server options until the block is left; `send_buffer` bounds what the system takes off
    the server for a client that does not read."""
    listener = socket.socket()
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    ready = threading.Event()
    held: dict[str, Any] = {}

    async def run() -> None:
        server = Server(engine, server_config(options))
        web = WebServer(uvicorn_config(create_app(server), server.config))
        held.update(server=server, web=web, loop=asyncio.get_running_loop())
        task = asyncio.create_task(web.serve(sockets=[listener]))
        while not web.started:
            await asyncio.sleep(0.005)
        ready.set()
        await task

    thread = threading.Thread(target=lambda: asyncio.run(run()), name=THREAD, daemon=True)
    thread.start()
    assert ready.wait(START_S), "the server does not start"
    try:
        yield Served(held["server"], held["web"], held["loop"], port)
    finally:
        held["web"].should_exit = True
        held["web"].force_exit = True
        thread.join(START_S)
        listener.close()
        assert not thread.is_alive(), "the server does not end"
