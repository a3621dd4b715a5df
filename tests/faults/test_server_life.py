"""What befalls a server while it works: clients that go away or do not read, full queues, signals, a worker that dies.
Named by their rows in the table of faults: 7, 39, 41, 51, 60, 62 to 64.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.server_process import ServerProcess, sgl_serve
from support.serving import Served, serving

from sgl.runtime.engine import Engine

WAIT_S = 30.0
LONG: dict[str, Any] = {"prompt": "Hi", "max_tokens": 1800, "ignore_eos": True, "temperature": 0}


def idle(engine: Engine) -> None:
    """Wait until nothing of any program is left."""
    end = time.monotonic() + WAIT_S
    while any(engine.stats()[name] for name in ("num_programs", "num_running", "num_waiting", "pages_held")):
        assert time.monotonic() < end, engine.stats()
        time.sleep(0.02)
    engine.check()


def post(port: int, path: str, body: dict[str, Any]) -> socket.socket:
    """A request on a connection of its own, with a small window."""
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    line.settimeout(WAIT_S)
    line.connect(("127.0.0.1", port))
    data = json.dumps(body).encode()
    line.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return line


def until(engine: Engine, **least: int) -> None:
    """Wait for counters."""
    end = time.monotonic() + WAIT_S
    while any(engine.stats()[name] < number for name, number in least.items()):
        assert time.monotonic() < end, engine.stats()
        time.sleep(0.005)


def num_ended_early(served: Served) -> int:
    """Programs that did not end by themselves."""
    registry = served.server.metrics.registry
    return int(registry.get_sample_value("sglang:num_aborted_requests_total", {"model_name": served.server.model}) or 0)


def is_ended_early(engine: Engine, served: Served, body: dict[str, Any], leave: bool) -> bool:
    """Whether a request ends before its time when its client goes away, or with `leave` false does not read.

    It may have come to its end by itself before that was noticed, on a machine that is busy with something else: it has
    three goes.
    """
    for _ in range(3):
        forwards, ended = engine.stats()["forwards"], num_ended_early(served)
        line = post(served.port, "/v1/completions", body)
        until(engine, forwards=forwards + 2)
        if leave:
            line.close()
        idle(engine)
        line.close()
        if num_ended_early(served) == ended + 1:
            return True
    return False


def test_row_07_who_does_not_read_loses_the_request_and_nothing_piles_up(dummy_engine: Engine) -> None:
    with serving(dummy_engine, send_buffer=4096, stream_backlog=16) as served:
        body = {**LONG, "max_tokens": 900, "stream": True, "n": 2, "logprobs": 20}
        assert is_ended_early(dummy_engine, served, body, leave=False)
        assert served.server.num_running <= 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 8])
def test_rows_39_41_a_client_that_goes_away_ends_its_request(dummy_engine: Engine, stream: bool, n: int) -> None:
    with serving(dummy_engine) as served:
        body = {**LONG, "stream": stream, "n": n, "max_tokens": 1800 if n == 1 else 480}  # the pool holds all of it
        assert is_ended_early(dummy_engine, served, body, leave=True)
        assert served.server.num_running == 0


@pytest.fixture(scope="module")
def narrow_engine() -> Iterator[Engine]:
    """An engine that runs one request and lets one wait."""
    with Engine(model_path="dummy", max_total_tokens=2048, max_running_requests=1, max_queue=1) as engine:
        yield engine


def test_row_39_a_client_that_goes_away_while_it_waits_or_is_read(narrow_engine: Engine) -> None:
    engine = narrow_engine
    with serving(engine) as served:
        half = socket.create_connection(("127.0.0.1", served.port))
        half.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"prompt"')
        end = time.monotonic() + WAIT_S
        while served.server.num_running < 1:
            assert time.monotonic() < end, "its head is not read"
            time.sleep(0.005)
        running = post(served.port, "/v1/completions", {**LONG, "stream": True})
        until(engine, num_running=1)
        waiting = post(served.port, "/v1/completions", {**LONG, "prompt": "Ha"})
        until(engine, num_waiting=1)
        for line in (half, waiting):
            line.close()
        while num_ended_early(served) < 1 or served.server.num_running > 1:
            assert time.monotonic() < end, engine.stats()
            time.sleep(0.005)
        running.close()
        idle(engine)
        assert served.server.num_running == 0
        with httpx2.Client(base_url=served.url) as http:
            assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).is_success


def test_row_51_a_full_queue_says_so_and_when_to_come_again(narrow_engine: Engine) -> None:
    with serving(narrow_engine) as served, ThreadPoolExecutor(8) as pool:
        before = narrow_engine.stats()["forwards"]
        with httpx2.Client(base_url=served.url, timeout=WAIT_S) as http:
            first = pool.submit(http.post, "/v1/completions", json={**LONG, "max_tokens": 400})
            until(narrow_engine, forwards=before + 2)
            others = [pool.submit(http.post, "/v1/completions", json={**LONG, "max_tokens": 1}) for _ in range(6)]
            answers = [each.result() for each in others]
            assert first.result().is_success
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused
    assert any(answer.is_success for answer in answers)
    assert all(answer.headers["retry-after"] for answer in refused)
    assert refused[0].json()["error"]["type"] == "rate_limit_error"


# --- the process ----------------------------------------------------------------------------------------------------


def streamed(url: str, max_tokens: int) -> list[str]:
    """The data lines of a stream, also of one that breaks off."""
    lines: list[str] = []
    body = {**LONG, "max_tokens": max_tokens, "stream": True}
    try:
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_S) as response:
            lines.extend(line for line in response.iter_lines() if line)
    except httpx2.HTTPError:
        lines.append("broken off")
    return lines


def busy(process: ServerProcess) -> None:
    end = time.monotonic() + WAIT_S
    while "sglang:num_running_reqs{" not in (text := httpx2.get(f"{process.url}/metrics").text) or re.search(
        r'num_running_reqs\{model_name="dummy"\} 0\.0', text
    ):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_row_63_sigterm_lets_streams_end_and_takes_nothing_new(tmp_path: Path) -> None:
    with sgl_serve(tmp_path / "log") as process, ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(streamed, process.url, 600) for _ in range(2)]
        busy(process)
        with httpx2.Client(base_url=process.url) as http:
            assert http.get("/health").status_code == 200
            process.popen.send_signal(signal.SIGTERM)
            end = time.monotonic() + WAIT_S
            while http.get("/health").status_code == 200:
                assert time.monotonic() < end
            assert http.get("/health/live").status_code == 200
            refused = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
        assert all(stream.result()[-1] == "data: [DONE]" for stream in streams)
        assert process.popen.wait(WAIT_S) == 0


def test_row_64_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with sgl_serve(tmp_path / "log", "--drain", "600") as process, ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(streamed, process.url, 1900) for _ in range(2)]
        busy(process)
        worker = process.worker()
        process.popen.send_signal(signal.SIGTERM)
        with httpx2.Client(base_url=process.url) as http:
            end = time.monotonic() + WAIT_S
            while http.get("/health").status_code == 200:
                assert time.monotonic() < end
        process.popen.send_signal(signal.SIGINT)
        assert process.popen.wait(WAIT_S) == 0
        assert any("data: [DONE]" not in stream.result() for stream in streams), "the drain waited for them to end"
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)


def test_row_62_a_worker_that_dies_ends_its_streams_with_an_error_and_the_server(tmp_path: Path) -> None:
    with sgl_serve(tmp_path / "log") as process, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(streamed, process.url, 1900)
        busy(process)
        os.kill(process.worker(), signal.SIGKILL)
        last = stream.result()[-1]
        assert '"code":"engine_dead"' in last, last
        assert process.popen.wait(WAIT_S) == 1


def test_row_64_a_port_that_is_taken_is_said_before_the_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "sgl.cli", "serve", "no-such-model", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_row_60_probes_do_not_collide_and_tell_a_stopped_worker() -> None:
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(model_path="dummy", max_total_tokens=2048))
        served = stack.enter_context(serving(engine))
        with httpx2.Client(base_url=served.url, timeout=WAIT_S) as http, ThreadPoolExecutor(4) as pool:
            probes = [pool.submit(http.get, "/health_generate") for _ in range(4)]
            assert [probe.result().status_code for probe in probes] == [200] * 4
            os.kill(engine.worker_pid, signal.SIGKILL)
            end = time.monotonic() + WAIT_S
            while http.get("/health/live").status_code == 200:
                assert time.monotonic() < end
            ready = http.get("/health")
            assert ready.status_code == 503
            assert "ended" in ready.json()["reason"]
            answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_dead"
