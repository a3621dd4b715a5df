"""A real server under requests of every kind for a while: fuzz, and a soak at a full pool (row 76). No 5xx, no hang,
nothing left, memory flat.

Here each is short; `make test-long` runs 100,000 fuzzed requests and a soak of ten minutes by the same tests, which
read `SGL_FUZZ_REQUESTS`, `SGL_FUZZ_SEED` and `SGL_SOAK_S`. What a fuzzed request broke once is a file in `corpus/`.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from support.fuzz_cases import VALID, Fuzzer
from support.fuzz_run import Report, fuzz, replayed
from support.server_process import ServerProcess, sgl_serve
from support.soak import Soak, soak

REQUESTS = int(os.environ.get("SGL_FUZZ_REQUESTS", "1500"))
SEED = int(os.environ.get("SGL_FUZZ_SEED", "1"))
SOAK_S = float(os.environ.get("SGL_SOAK_S", "6"))
LONG_S = 300
"""From here on a soak says something about memory."""
BYTES_A_REQUEST = 1024
HELPERS = 4
"""Processes that the worker keeps for compiling, at most."""
CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.http"))
FLAGS = [
    *("--context-length", "256", "--max-total-tokens", "1536", "--num-threads", "1"),
    *("--program-lease", "1", "--header-timeout", "2", "--body-timeout", "2", "--watchdog-timeout", "3600"),
    "--no-log-requests",
]
"""Sequences are short, so that a request without a bound is; the pool holds a few of them; who waits for more bytes
does not wait long; a machine that is stopped for a while is no hang."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with sgl_serve(tmp_path_factory.mktemp("server") / "log", *FLAGS) as process:
        warm_up(process)
        yield process
        assert process.end() == 0
    assert "Traceback" not in process.shown, process.shown[-5000:]


def warm_up(process: ServerProcess) -> None:
    """Whatever is made at first use: renderer, compilers, threads."""
    with httpx2.Client(base_url=process.url, trust_env=False, timeout=60) as http:
        for path, bodies in VALID.items():
            for body in bodies:
                if body.get("finish", True):
                    http.post(path, json=body)


def idle(process: ServerProcess) -> dict[str, int]:
    """The statistics, once nothing is left of any program."""
    end = time.monotonic() + 60
    while True:
        stats = process.stats()
        left = {name: stats[name] for name in ("num_programs", "num_running", "num_waiting", "pages_held")}
        if not any(left.values()):
            return stats
        assert time.monotonic() < end, left
        time.sleep(0.05)


def nothing_is_left(process: ServerProcess, before: dict[str, int]) -> None:
    """The laws hold, nothing is held, and no descriptor, process or thread has stayed."""
    stats = idle(process)
    assert stats["prompt_tokens"] == stats["cached_tokens"] + stats["prefill_tokens"]
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
    with httpx2.Client(base_url=process.url, trust_env=False, timeout=60) as http:
        assert http.post("/flush_cache").json() == {"status": "ok"}
        assert http.get("/health").status_code == 200
        answer = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 3, "temperature": 0})
        assert answer.json()["usage"]["completion_tokens"] == 3
    assert process.stats()["pages_free"] + process.stats()["pages_cached"] == stats["pages_total"]
    end = time.monotonic() + 30
    while more := grown(before, process.handles()):
        assert time.monotonic() < end, more
        time.sleep(0.2)


def grown(before: dict[str, int], now: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Counts that are higher than what was made at first use, and stays, explains: threads of pools, and processes that
    compile what must be bounded, with two pipes each."""
    helpers = now["processes"] - before["processes"]
    threads = min(32, (os.cpu_count() or 1) + 4)
    more = {"processes": HELPERS, "worker files": 2 * helpers, "server threads": threads, "worker threads": threads}
    return {name: (before[name], number) for name, number in now.items() if number > before[name] + more.get(name, 0)}


@pytest.mark.parametrize("file", CORPUS, ids=[file.stem for file in CORPUS])
def test_what_broke_a_server_once_does_not_again(server: ServerProcess, file: Path) -> None:
    assert asyncio.run(replayed(server.port, file)) is None
    idle(server)


def test_fuzzed_requests_break_nothing(server: ServerProcess, tmp_path: Path) -> None:
    with httpx2.Client(base_url=server.url, trust_env=False) as http:
        description = http.get("/openapi.json").json()
    folder = Path(os.environ.get("SGL_FUZZ_DIR", tmp_path))
    before = server.handles()
    start = time.monotonic()
    report: Report = asyncio.run(fuzz(server.port, Fuzzer(SEED, description), REQUESTS, folder))
    sys.stdout.write(f"\nfuzz, seed {SEED}: {report}; {time.monotonic() - start:.0f} s\n")
    assert not report.wrong, "\n".join(report.wrong[:20]) + server.shown[-3000:]
    assert sum(report.statuses.values()) == REQUESTS
    assert report.statuses["200"] > REQUESTS / 20, "hardly anything gets past the door"
    nothing_is_left(server, before)


def may_grow(found: Soak) -> bool:
    """Whether the server or its worker may take more than `BYTES_A_REQUEST`, by what was seen of them."""
    return any(sum(found.slope(which)) >= BYTES_A_REQUEST for which in (1, 2))


def test_row_76_growth_is_seen_through_noise() -> None:
    def seen(bytes_a_request: float, noise: int, num: int = 400) -> Soak:
        rng = random.Random(SEED)
        samples = [(25 * i, 2**26 + rng.randrange(-noise, noise), int(25 * i * bytes_a_request)) for i in range(num)]
        return Soak(samples=samples)

    assert not may_grow(seen(100, 2**20))
    assert may_grow(seen(2000, 2**20))
    assert may_grow(seen(0, 2**28)), "what cannot be told is not flat"
    assert may_grow(seen(0, 1, num=2))


def test_row_76_a_soak_at_a_full_pool_leaves_nothing_and_grows_by_nothing(server: ServerProcess) -> None:
    before = server.handles()
    found = asyncio.run(soak(server, SOAK_S, clients=16, seed=SEED))
    sys.stdout.write(f"\nsoak of {SOAK_S:g} s, seed {SEED}:\n{found}\n")
    assert found.availability == 1.0, "\n".join(found.bad[:20])
    assert found.good
    assert found.cancelled
    nothing_is_left(server, before)
    if SOAK_S >= LONG_S:
        assert not may_grow(found), f"it grows, or too little was seen of it:\n{found}"
