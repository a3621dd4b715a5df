"""What a server meets beyond single requests: connections, bytes that belong to no request, a model that fails, a
process that is killed. Rows 1, 2, 24, 39, 51, 57, 61 and 65 of the fault table, as far as they are no single request's.
"""

from __future__ import annotations

import ast
import asyncio
import json
import pickle
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.child import gone
from support.http_line import status_of, talk
from support.server_process import sgl_serve
from support.serving import serving
from uvicorn.server import ServerState

from sgl.runtime.engine import Engine
from sgl.server import app
from sgl.server.config import ServerConfig
from sgl.server.transport import protocol_for, uvicorn_config

WAIT_S = 30.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def idle(engine: Engine) -> None:
    end = time.monotonic() + WAIT_S
    while any(engine.stats()[name] for name in ("num_programs", "num_running", "num_waiting", "pages_held")):
        assert time.monotonic() < end, engine.stats()
        time.sleep(0.01)


class Sink(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = b""
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing waits here."""

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def pause_reading(self) -> None:
        """Nothing comes by itself."""

    resume_reading = pause_reading


async def _calls_for(data: bytes) -> int:
    """Python functions that the protocol runs for the body of a request."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    server = ServerConfig()
    config = uvicorn_config(application, server)
    config.load()
    protocol = protocol_for(server)(config=config, server_state=ServerState(), app_state={})
    protocol.connection_made(Sink())
    protocol.data_received(CHUNKED)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        protocol.data_received(data)
    finally:
        sys.setprofile(None)
    protocol.connection_lost(None)
    for task in protocol.tasks:
        task.cancel()
    return calls


def test_row_02_chunks_cost_no_more_than_their_bytes() -> None:
    """Six bytes a chunk: what is done for each is a handful of calls, so that a body of megabytes holds nobody up."""
    chunks = 1000
    assert asyncio.run(_calls_for(b"6\r\naaaaaa\r\n" * chunks)) < 5 * chunks


@pytest.mark.parametrize(
    "pieces",
    [
        [CHUNKED, b"6" + b";a=b" * 5000, b";a=b" * 5000, b";a=b" * 5000],
        [CHUNKED, b"0\r\nX: " + b"y" * 20_000, b"y" * 20_000],
        [CHUNKED, b"2\r\n{}\r\n0\r\n\r\nGET /health HTTP/1.1\r\nX: ", b"y" * 20_000, b"y" * 20_000],
    ],
    ids=["an extension of a chunk", "a trailer", "a head that was sent ahead"],
)
def test_rows_01_02_what_stands_between_pieces_of_a_body_is_bounded(dummy_engine: Engine, pieces: list[bytes]) -> None:
    with serving(dummy_engine, max_header_bytes=8192) as served:
        answer = talk(served.port, *pieces, pause_s=0.02)
        assert status_of(answer) in (400, 431), answer
        with httpx2.Client(base_url=served.url) as http:
            assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"Host: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n", 200),
        (b"Host: localhost\r\nExpect: 100-continue\r\n", 200),
        (b"", 400),
        (b"Host: localhost\r\nHost: localhost\r\n", 400),
        (b"Host: localhost\r\nTransfer-Encoding: chunked\r\n", 400),
        (b"Host: localhost\r\nContent-Length: 3\r\n", 400),
    ],
    ids=["an offer of HTTP 2", "a question first", "no host", "two hosts", "two framings", "two lengths"],
)
def test_row_01_heads_that_other_servers_trip_over(dummy_engine: Engine, lines: bytes, status: int) -> None:
    body = b'{"prompt": "a", "max_tokens": 1}'
    request = b"POST /v1/completions HTTP/1.1\r\n" + lines + b"Content-Length: %d\r\n" % len(body)
    with serving(dummy_engine, header_timeout=1) as served:
        answer = talk(served.port, request + b"Connection: close\r\n\r\n" + body)
        if answer.startswith(b"HTTP/1.1 100"):
            answer = answer.split(b"\r\n\r\n", 1)[1]
        assert status_of(answer) == status, answer


def test_row_24_every_template_runs_in_the_sandbox(root: Path) -> None:
    """Wherever Jinja is used, no environment is but the immutable sandbox."""
    found: dict[str, set[str]] = {}
    for room in ("sgl", "lang", "runtime", "grammars", "kernels"):
        for file in {file.resolve() for file in (root / room).rglob("*.py")}:
            source = file.read_text()
            if "jinja2" in source:
                nodes = list(ast.walk(ast.parse(source)))
                names = {getattr(node, "attr", getattr(node, "id", "")) for node in nodes}
                names |= {node.name for node in nodes if isinstance(node, ast.alias)}
                found[file.relative_to(root).as_posix()] = names
    assert "ImmutableSandboxedEnvironment" in found["runtime/text/template.py"]
    open_ones = {"Environment", "NativeEnvironment", "SandboxedEnvironment"}
    assert not {file: names & open_ones for file, names in found.items() if names & open_ones}


def test_row_39_a_client_that_sent_more_ahead_is_noticed_too(dummy_engine: Engine) -> None:
    body = json.dumps({"prompt": "Hi", "max_tokens": 1800, "ignore_eos": True, "stream": True}).encode()
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    before = dummy_engine.stats()
    with serving(dummy_engine) as served:
        line = socket.create_connection(("127.0.0.1", served.port))
        line.sendall(request * 2)
        assert b"200 OK" in line.recv(4096)
        line.close()
        idle(dummy_engine)
        after = dummy_engine.stats()
        assert after["decode_tokens"] - before["decode_tokens"] < 1800
        assert after["programs"] - before["programs"] == 1
        assert served.server.num_running == 0


def test_row_51_a_connection_too_many_is_told_when_to_come_again(dummy_engine: Engine) -> None:
    with serving(dummy_engine, max_connections=2) as served:
        held = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(2)]
        answer = talk(served.port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for line in held:
            line.close()
        assert status_of(answer) == 503
        assert b"retry-after: 1" in answer.lower()
        assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "overloaded"
        end = time.monotonic() + WAIT_S
        while (
            status_of(talk(served.port, b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")) != 200
        ):
            assert time.monotonic() < end


def test_row_57_a_row_that_fails_ends_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGL_TEST_FAULTS", "1")
    faults = json.dumps({"in_forward": {"action": "nan", "program": "completion", "at": 3}})
    with Engine(model_path="dummy", max_total_tokens=1024, fault_points=faults) as engine, serving(engine) as served:
        with httpx2.Client(base_url=served.url, timeout=WAIT_S) as http:
            asked = {"prompt": "a", "max_tokens": 20, "ignore_eos": True, "stream": True}
            lines = [line for line in http.post("/v1/completions", json=asked).text.split("\n\n") if line]
            assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "invalid_logits"
            again = http.post("/v1/completions", json={**asked, "stream": False})
            assert again.json()["usage"]["completion_tokens"] == 20
        idle(engine)


def test_row_61_a_server_that_is_killed_leaves_no_worker(tmp_path: Path) -> None:
    """Also: a server that listens to the network without a key says so, and it starts in a home that is read-only."""
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    with sgl_serve(tmp_path / "log", "--host", "0.0.0.0", HOME=str(home)) as process:
        assert "0.0.0.0 is open to the network, and there is no --api-key" in process.shown
        worker = process.worker()
        process.popen.send_signal(signal.SIGKILL)
        process.popen.wait()
        assert gone(worker)


class Trap:
    """Unpickling it leaves a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._file,))


def test_row_65_a_pickle_is_no_request_anywhere(dummy_engine: Engine, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    data = pickle.dumps(Trap(sprung))
    with serving(dummy_engine) as served, httpx2.Client(base_url=served.url) as http:
        for route in app.table():
            if route.body is None:
                continue
            path = route.path.replace("{id}", "x").replace("{model:path}", "x")
            for kind in ("application/octet-stream", "application/json", "application/x-pickle"):
                assert http.post(path, content=data, headers={"Content-Type": kind}).status_code in (400, 404), path
    assert not sprung.exists()
