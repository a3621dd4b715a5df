"""Test program 46 at full size: what it takes in tokens, threads and memory. Slow; small in `test_peer_programs`.

On the toy model: the point is states, not what they say. Run `pytest -m slow -s tests/programs/test_scale.py` and
see the figures.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sgl
from sgl.runtime.engine import Engine

GREEDY: dict[str, Any] = {"temperature": 0}


@pytest.fixture(scope="module")
def roomy() -> Iterator[Engine]:
    """The toy model with a long context and room for every state's token."""
    longer = json.dumps({"max_position_embeddings": 16384})
    with Engine("dummy", json_model_override_args=longer, max_total_tokens=40_000, chunked_prefill_size=2048) as engine:
        yield engine


def memory_mib(pid: int | str) -> tuple[int, int]:
    """Resident memory of a process now, and at its peak, in MiB."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return int(status["VmRSS"].split()[0]) // 1024, int(status["VmHWM"].split()[0]) // 1024


def report(what: str, engine: Engine, before: tuple[int, int], num_threads: int) -> None:
    """Figures, for who looks (`-s`)."""
    client, worker = memory_mib("self"), memory_mib(engine.worker_pid)
    sys.stdout.write(
        f"\n{what}: client {before[0]} -> {client[0]} MiB, worker {before[1]} -> {worker[0]} MiB "
        f"(peaks {client[1]} and {worker[1]}), {num_threads} more threads in the client\n"
    )


@pytest.mark.slow
def test_10_000_live_states_each_with_a_token(roomy: Engine) -> None:
    @sgl.function
    def program(s):
        s += "A prefix that all share. "
        forks = s.fork(10_000)
        # Each says something else first: equal states would share even what they generate.
        forks += lambda i: f"{i:04} " + sgl.gen("x", max_tokens=2, ignore_eos=True)
        threads = threading.active_count()
        values = [fork["x"] for fork in forks]
        stats = roomy.stats()
        report("10,000 live states", roomy, before, threading.active_count() - threads)
        assert stats["pages_held"] >= 10_000, "each holds the keys and values of a token that it generated"
        assert threading.active_count() == threads
        return len(values)

    before = (memory_mib("self")[0], memory_mib(roomy.worker_pid)[0])
    state = program.run(backend=roomy, **GREEDY)
    assert state.ret_value == 10_000
    client, worker = memory_mib("self")[0] - before[0], memory_mib(roomy.worker_pid)[0] - before[1]
    assert client < 400, "tens of kilobytes per state at most"
    assert worker < 400


@pytest.mark.slow
def test_10_000_states_of_an_async_program(roomy: Engine) -> None:
    @sgl.function
    async def program(s):
        s += "Another prefix. "
        forks = s.fork(10_000)

        async def one(fork, i):
            fork += f"{i % 10}" + sgl.gen("x", max_tokens=1, ignore_eos=True)
            return await fork["x"]

        threads = threading.active_count()
        values = await asyncio.gather(*(one(fork, i) for i, fork in enumerate(forks)))
        report("10,000 tasks", roomy, before, threading.active_count() - threads)
        assert threading.active_count() == threads
        return len(values)

    before = (memory_mib("self")[0], memory_mib(roomy.worker_pid)[0])
    assert program.run(backend=roomy, **GREEDY).ret_value == 10_000


@pytest.mark.slow
def test_1000_forks_of_8000_tokens(roomy: Engine) -> None:
    prefix = "".join(chr(97 + i * 7 % 26) for i in range(8_000))

    @sgl.function
    def program(s):
        s += prefix
        forks = s.fork(1_000)
        forks += lambda i: f"{i:03}" + sgl.gen("x", max_tokens=2, ignore_eos=True)
        threads = threading.active_count()
        forks.join()
        found = len(s["x"])
        report("1,000 forks of 8,000 tokens", roomy, before, threading.active_count() - threads)
        return found

    before = (memory_mib("self")[0], memory_mib(roomy.worker_pid)[0])
    state = program.run(backend=roomy, **GREEDY)
    assert state.ret_value == 1_000
    own = 1_000 * 4  # three digits, and the token before them, which is computed where its logits are needed
    assert state.usage.prefill_tokens <= len(prefix) + own, "the prefix is computed once"
