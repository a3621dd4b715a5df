"""What a server owes its clients while others misbehave or it ends: answers that nobody reads, threads that are taken,
drains, leases, bodies that take long to look at. Rows 7, 8, 60 and 63 of the table of faults.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from support.http_line import status_of
from support.serving import THREAD, Served, serving

import sgl
from sgl.runtime.engine import Engine
from sgl.server import bodies, health, native, programs
from sgl.server.openai import completions

WAIT_S = 30.0
GEN = {"type": "gen", "id": 1, "name": "x", "sampling": {"max_new_tokens": 4, "ignore_eos": True}}
TEXT = {"type": "text", "id": 0, "segments": [{"type": "literal", "text": "Hi"}]}


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def unread(port: int, path: str, body: dict[str, Any], *lines: str) -> socket.socket:
    """A request on a connection of its own, with a small window that nobody reads."""
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    line.settimeout(WAIT_S)
    line.connect(("127.0.0.1", port))
    data = json.dumps(body).encode()
    head = (f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}", *lines, "", "")
    line.sendall("\r\n".join(head).encode() + data)
    return line


# --- row 7 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "lines"),
    [
        ("/tokenize", {"text": "a" * 60_000}, ()),
        ("/tokenize", {"text": "a" * 60_000}, ("Connection: close",)),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 900, "ignore_eos": True, "stream": True, "n": 4}, ()),
    ],
    ids=["whole", "closing", "stream"],
)
def test_row_07_an_answer_that_nobody_reads_is_given_up(
    dummy_engine: Engine, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any], lines: tuple[str, ...]
) -> None:
    with caplog.at_level(logging.INFO, "sgl"), serving(dummy_engine, send_buffer=4096, write_timeout=0.1) as served:
        line = unread(served.port, path, body, "X-Request-Id: deaf", *lines)
        until(lambda: any("deaf is closed" in record.getMessage() for record in caplog.records))
        until(lambda: not served.num_connections and not served.server.num_running)
        line.close()
    told = [record for record in caplog.records if record.levelno > logging.INFO]
    assert [record.exc_info for record in told] == [None], told


def test_row_07_who_takes_something_of_an_answer_gets_the_rest(dummy_engine: Engine) -> None:
    with serving(dummy_engine, send_buffer=4096) as served, httpx2.Client(base_url=served.url) as http:
        text = "a" * 60_000
        assert http.post("/tokenize", json={"text": text}).json()["count"] == len(text)


def test_row_07_what_nobody_reads_is_bounded_together(dummy_engine: Engine) -> None:
    with serving(dummy_engine, send_buffer=4096, max_unread_bytes=2**20) as served:
        lines = [unread(served.port, "/tokenize", {"text": "a" * 200_000}) for _ in range(2)]  # 600 KB each
        until(lambda: served.num_connections == 1)
        for line in lines:
            line.close()


# --- row 60 ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def without_threads(dummy_engine: Engine) -> Iterator[Served]:
    """A server whose threads are all taken."""
    release = threading.Event()
    with serving(dummy_engine) as served:

        def take_all() -> None:
            for _ in range(64):
                served.loop.run_in_executor(None, release.wait)

        served.loop.call_soon_threadsafe(take_all)
        try:
            yield served
        finally:
            release.set()


def test_row_60_probes_want_no_thread(without_threads: Served) -> None:
    with httpx2.Client(base_url=without_threads.url, timeout=WAIT_S) as http:
        for path in ("/health", "/health/ready", "/health/live", "/ping", "/metrics", "/server_info"):
            assert http.get(path).status_code == 200, path
        assert http.post("/flush_cache?timeout=5").status_code == 200


# --- row 63 ---------------------------------------------------------------------------------------------------------


class Open:
    """A program over HTTP that goes on, and its events."""

    def __init__(self, http: httpx2.Client) -> None:
        graph = {"protocol": 1, "nodes": [TEXT, GEN]}
        asked = {"graph": graph, "stream": True, "finish": False}
        self._http = http
        self._stream = http.stream("POST", "/v1/programs", json=asked)
        self._lines = self._stream.__enter__().iter_lines()
        self.id = self.next("program")["id"]

    def next(self, kind: str) -> dict[str, Any]:
        """The next event of a kind."""
        for line in self._lines:
            event = json.loads(line[6:]) if line.startswith("data: ") else {}
            if event.get("type") == kind:
                return event
        raise AssertionError(f"the stream ended without {kind}")

    def submit(self, *, finish: bool, tokens: int = 4) -> int:
        """Send a fragment; the answer's status."""
        sampling = {"max_new_tokens": tokens, "ignore_eos": True}
        gen = {**GEN, "id": 2 + finish, "name": f"y{finish}", "sampling": sampling}
        body = {"graph": {"protocol": 1, "nodes": [gen]}, "finish": finish}
        return self._http.post(f"/v1/programs/{self.id}/fragments", json=body).status_code

    def close(self) -> None:
        self._stream.__exit__(None, None, None)


def test_row_63_a_drain_lets_open_programs_go_on(dummy_engine: Engine) -> None:
    with serving(dummy_engine) as served, httpx2.Client(base_url=served.url, timeout=WAIT_S) as http:
        program = Open(http)
        program.next("handles")
        served.server.draining = True
        assert http.post("/v1/programs", json={"graph": {"protocol": 1, "nodes": [TEXT, GEN]}}).status_code == 503
        assert program.submit(finish=False) == 202
        program.next("handles")
        assert http.get(f"/v1/programs/{program.id}/branches/0").status_code == 200
        assert served.server.num_running == 1
        assert program.submit(finish=True) == 202
        program.next("done")
        program.close()
        until(lambda: not served.server.num_running)


def test_row_63_a_drain_waits_for_requests_that_run_nothing_yet(dummy_engine: Engine) -> None:
    body = b'{"prompt": "a", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    with serving(dummy_engine) as served, socket.create_connection(("127.0.0.1", served.port)) as line:
        line.sendall(head + body[:9])
        until(lambda: served.server.num_running == 1)
        served.server.draining = True
        line.sendall(body[9:])
        assert status_of(line.recv(65536)) == 200
        until(lambda: not served.server.num_running)


# --- leases ---------------------------------------------------------------------------------------------------------


def test_a_lease_counts_from_the_end_of_what_was_sent_and_read(dummy_engine: Engine) -> None:
    """Longer than its lease in all, with a state read while a fragment runs: it ends as its last fragment says."""
    with (
        serving(dummy_engine, program_lease=0.2) as served,
        httpx2.Client(base_url=served.url, timeout=WAIT_S) as http,
    ):
        program = Open(http)
        program.next("handles")
        assert program.submit(finish=False, tokens=400) == 202
        assert http.get(f"/v1/programs/{program.id}/branches/0").status_code == 200
        program.next("handles")
        assert program.submit(finish=True) == 202
        program.next("done")
        program.close()
        left = Open(http)
        assert left.next("failed")["error"]["code"] == "state_lost"
        left.close()


# --- row 8: what takes long to look at ------------------------------------------------------------------------------


def test_row_08_large_bodies_are_looked_at_apart(dummy_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done for each of a body's many parts is done on no server's loop."""
    names: dict[str, str] = {}

    def noted(where: Any, name: str) -> None:
        work = getattr(where, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            names[name] = threading.current_thread().name
            return work(*args, **kwargs)

        monkeypatch.setattr(where, name, call)

    for where, name in ((bodies, "decode_now"), (completions, "prompts_of"), (native, "make_calls")):
        noted(where, name)
    sent: list[str] = []
    open_program = dummy_engine.open

    def opened(sink: Any, options: Any) -> Any:
        session = open_program(sink, options)
        submit = session.submit
        session.submit = lambda graph, **kwargs: (sent.append(threading.current_thread().name), submit(graph, **kwargs))
        return session

    monkeypatch.setattr(dummy_engine, "open", opened)
    ids = [1] * 100_000
    with serving(dummy_engine) as served, httpx2.Client(base_url=served.url, timeout=WAIT_S) as http:
        for path, body in (("/v1/completions", {"prompt": ids}), ("/generate", {"input_ids": ids})):
            answer = http.post(path, json=body)
            assert answer.status_code == 400, answer.text
            assert "100000 tokens" in answer.json()["error"]["message"]
    assert len(names) == 3
    assert THREAD not in {*names.values(), *sent}
    assert len(sent) == 2


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/messages", "messages"),
        ("/api/chat", "messages"),
        ("/v1/responses", "input"),
    ],
)
def test_row_08_turns_are_bounded(dummy_engine: Engine, path: str, field: str) -> None:
    turns = [{"role": "user", "content": "a"}] * (bodies.MAX_TURNS + 1)
    with serving(dummy_engine) as served, httpx2.Client(base_url=served.url, timeout=WAIT_S) as http:
        answer = http.post(path, json={field: turns, **({"max_tokens": 1} if path == "/v1/messages" else {})})
        assert answer.status_code == 400
        assert f"{bodies.MAX_TURNS + 1} turns" in answer.text


def test_row_08_bindings_that_multiply_a_template_are_refused_before(dummy_engine: Engine) -> None:
    @sgl.function
    def template(s: sgl.ProgramState, a: str) -> None:
        s += "x" * 100_000 + a
        s += sgl.gen("x", max_tokens=1)

    program = json.loads(template.compile().to_json())
    before = dummy_engine.stats()["programs"]
    with serving(dummy_engine) as served, httpx2.Client(base_url=served.url, timeout=WAIT_S) as http:
        answer = http.post("/v1/programs", json={"program": program, "bindings": [{"a": "b"}] * programs.MAX_ROWS})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "bindings", answer.text
    assert dummy_engine.stats()["programs"] == before


# --- metrics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_the_first_token_is_timed_apart_from_the_last(dummy_engine: Engine, stream: bool) -> None:
    def sums(http: httpx2.Client) -> dict[str, float]:
        lines = [line.rpartition(" ") for line in http.get("/metrics").text.splitlines() if line.startswith("vllm:")]
        return {name.partition("{")[0]: float(value) for name, _, value in lines}

    first, whole = "vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"
    with serving(dummy_engine) as served, httpx2.Client(base_url=served.url, timeout=WAIT_S) as http:
        asked = {"prompt": "Hi", "max_tokens": 60, "ignore_eos": True, "stream": stream}
        assert http.post("/v1/completions", json=asked).is_success
        found = sums(http)
        assert found[f"{first}_count"] == found[f"{whole}_count"] == 1
        assert 0 < found[f"{first}_sum"] < found[f"{whole}_sum"] / 2


def test_a_scrape_does_not_wait_for_an_engine_that_does_not_answer(
    dummy_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(dummy_engine, "async_stats", never)
    monkeypatch.setattr(health, "PROBE_S", 0.05)
    with serving(dummy_engine) as served, httpx2.Client(base_url=served.url, timeout=WAIT_S) as http:
        text = http.get("/metrics").text
    assert "vllm:e2e_request_latency_seconds_count" in text
    assert "vllm:num_requests_running" not in text


def test_programs_are_counted_by_what_becomes_of_them(dummy_engine: Engine) -> None:
    with serving(dummy_engine) as served, httpx2.Client(base_url=served.url, timeout=WAIT_S) as http:
        asked = {"prompt": "Hi", "max_tokens": 3, "ignore_eos": True}
        assert http.post("/v1/completions", json={**asked, "n": 2}).is_success
        assert http.post("/v1/completions", json={**asked, "regex": "[ab]{2}"}).is_success
        text = http.get("/metrics").text
    for name, labels, value in (
        ("sglang:num_requests_total", "", 2),
        ("sglang:num_so_requests_total", "", 1),
        ("vllm:request_success_total", 'finished_reason="length",', 2),
        ("vllm:request_success_total", 'finished_reason="stop",', 1),
    ):
        assert f'{name}{{{labels}model_name="dummy"}} {value}.0' in text, name
