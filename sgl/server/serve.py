"""The server's process: engine, application, signals, drain, exit status.

Owns the order of starting up (engine, a warm-up token, socket, ready line) and of ending. The first SIGTERM, SIGHUP or
Ctrl-C begins the drain: not ready, new requests are answered 503, those that were taken and programs that are open go
on for at most `drain` seconds. A second one ends at once. A worker that dies ends the server with status 1, after its
streams were told.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from uvicorn import Config as UvicornConfig
from uvicorn import Server as UvicornServer

from sgl.errors import ConfigError, Draining
from sgl.runtime.engine import Engine
from sgl.server.app import create_app
from sgl.server.call import Server
from sgl.server.config import ServerConfig, effective
from sgl.server.transport import uvicorn_config

log = logging.getLogger("sgl.server")

_WATCH_S = 0.5
"""Between two looks at the worker."""
_SWITCH_S = 0.0005
"""How long a thread that reads a body may hold Python's lock while the event loop waits for it."""
_CUT = Draining("the server ended before this request did", hint="send it to another one, or raise --drain")


def serve(config: ServerConfig, engine_fields: Mapping[str, Any], say: Callable[[str], None]) -> int:
    """Serve until a signal ends it; the exit status.

    Args:
        say: shows a line to the person who started it.

    Raises:
        ConfigError: the address cannot be listened on.
        SglError: the engine cannot start.
    """
    say = _while_it_can_be_said(say)
    listener = _listen(config)
    try:
        with Engine(**engine_fields) as engine:
            server = Server(engine, config)
            if server.is_generation:
                engine.generate(input_ids=[0], sampling_params={"max_new_tokens": 1, "ignore_eos": True})
            else:
                engine.encode("warm-up")
            return asyncio.run(_run(server, listener, say))
    finally:
        if listener is not None:
            listener.close()


def _while_it_can_be_said(say: Callable[[str], None]) -> Callable[[str], None]:
    """`say` for a process that goes on when nobody can be told: the disk is full, the terminal or pipe is closed."""

    def said(line: str) -> None:
        with suppress(OSError):
            say(line)

    return said


def _listen(config: ServerConfig) -> socket.socket | None:
    """The socket, taken before the model is loaded: a port that is in use is known at once. None for a unix socket."""
    if config.uds is not None:
        folder = Path(config.uds).absolute().parent
        if not os.access(folder, os.W_OK):
            raise ConfigError(
                f"cannot listen on {config.uds}: {folder} is no folder that can be written",
                hint="choose another --uds",
                param="uds",
            )
        return None
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        param = "host" if is_host else "port"
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror or error}",
            hint=f"choose another --{param}" + (" (0 takes a free one)" if param == "port" else ""),
            param=param,
        ) from None
    return listener


def _told(server: Server, listener: socket.socket | None) -> list[str]:
    """What is said before the ready line."""
    config = server.config
    lines = []
    if not config.on_loopback and not config.api_key:
        lines.append(f"warning: {config.host} is open to the network, and there is no --api-key")
    shown = {name: value for name, value in effective(config).items() if value not in ((), None)}
    log.info("server config: %s", shown)
    where = config.uds or _url(config, listener)
    lines.append(f"sgl is ready: {server.model} on {where}")
    return lines


def _url(config: ServerConfig, listener: socket.socket | None) -> str:
    port = listener.getsockname()[1] if listener is not None else config.port
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{port}"


class WebServer(UvicornServer):
    """uvicorn without its own signal handling: the drain is ours.

    Args:
        on_started: called when connections are taken.
    """

    def __init__(self, config: UvicornConfig, on_started: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        if self.started:
            self._on_started()

    def capture_signals(self) -> Any:
        """Nothing is captured."""
        return nullcontext()


async def _run(server: Server, listener: socket.socket | None, say: Callable[[str], None]) -> int:

    def started() -> None:
        gc.freeze()  # what is there now stays: collections need not look at it again
        sys.setswitchinterval(_SWITCH_S)
        for line in _told(server, listener):
            say(line)

    web = WebServer(uvicorn_config(create_app(server), server.config), started)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        stop.set()
        if signals > 1:
            web.force_exit = True
            server.abort_all(_CUT)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores SIGHUP for us
            loop.add_signal_handler(number, on_signal)
    serving = asyncio.create_task(web.serve(sockets=[listener] if listener is not None else None))
    died = asyncio.create_task(_worker_death(server))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, died, stopped}, return_when=asyncio.FIRST_COMPLETED)
        status = 0
        if died.done():
            say("error: the engine's worker ended; the server ends, too")
            status = 1
        server.draining = True
        if stopped.done() and server.num_running:
            say(f"sgl ends: {server.num_running} requests may take {server.config.drain:g} s more")
        await _drain(server, lambda: signals > 1 or died.done())
        web.should_exit = True
        server.abort_all(_CUT)
        try:
            await asyncio.wait_for(asyncio.shield(serving), 5.0)
        except TimeoutError:
            web.force_exit = True
            await serving
        return status
    finally:
        for task in (died, stopped):
            task.cancel()
        if server.config.uds is not None and web.started:
            Path(server.config.uds).unlink(missing_ok=True)


async def _drain(server: Server, is_urgent: Callable[[], bool]) -> None:
    """Wait until nothing runs, for at most `drain` seconds."""
    deadline = asyncio.get_running_loop().time() + server.config.drain
    while server.num_running and not is_urgent() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.05)


async def _worker_death(server: Server) -> None:
    while server.engine.alive:
        await asyncio.sleep(_WATCH_S)


def logging_to_stderr(level: str) -> None:
    """Show the server's log lines, for a process that is a server and nothing else."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("sgl.server", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level.upper() if name == "sgl.server" else "WARNING")
        logger.propagate = False
