"""Requests that are ended by their clients at awkward moments, and ids that are used again: rows 40, 43 and 44 of the
fault table, and what several requests under one id mean for each other.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx2
import pytest
from support.http_line import Line
from support.scripted import Rig
from support.serving import Served, serving

from sgl.grammars.spec import Regex
from sgl.lang.graph import DoneEvent, FailedEvent, Gen, Graph, LiteralText, ProgramOptions, Sampling, Text, ValueEvent
from sgl.runtime.engine import Engine

WAIT_S = 30.0
FORCED = Regex("((ab|ac)cdefgh){6}")
"""After each choice six tokens are forced: several come in one step."""


def ask(rig: Rig, program: int, constraint: Regex | None = None) -> None:
    nodes = (
        Text(id=0, segments=(LiteralText("prompt"),)),
        Gen(id=1, name="x", sampling=Sampling(max_new_tokens=60, temperature=0.0), constraint=constraint),
    )
    rig.core.open(program, ProgramOptions())
    rig.core.submit(program, Graph(nodes=nodes), finish=True)


@pytest.mark.parametrize("steps", range(1, 6))
def test_row_40_an_abort_between_tokens_that_come_together_leaves_nothing(steps: int) -> None:
    rig = Rig()
    ask(rig, 1, FORCED)
    ask(rig, 2)
    whole = Rig()
    ask(whole, 1, FORCED)
    ask(whole, 2)
    whole.run()
    assert whole.core.snapshot().forced_tokens > 10
    rig.run(steps, to_end=False)
    rig.core.cancel(1)
    rig.run()
    assert rig.of(1, FailedEvent)
    assert [event.value for event in rig.of(2, ValueEvent)] == [event.value for event in whole.of(2, ValueEvent)]
    stats = rig.core.snapshot()
    assert (stats.num_programs, stats.num_running, stats.num_waiting, stats.pages_held) == (0, 0, 0, 0)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_row_43_an_id_is_used_again_in_the_tick_of_its_abort(steps: int) -> None:
    rig = Rig()
    ask(rig, 1)
    rig.run(steps, to_end=False)
    rig.core.cancel(1)
    ask(rig, 1)
    rig.run()
    assert [event.value for event in rig.of(1, ValueEvent)] == [event.value for event in _alone().of(1, ValueEvent)]
    assert (len(rig.of(1, FailedEvent)), len(rig.of(1, DoneEvent))) == (1, 1)
    assert rig.core.snapshot().pages_held == 0


def _alone() -> Rig:
    rig = Rig()
    ask(rig, 1)
    rig.run()
    return rig


# --- over HTTP ------------------------------------------------------------------------------------------------------


def body(tokens: int, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return {"text": "a", "sampling_params": sampling, "rid": "mine", **more}


def idle(served: Served, engine: Engine) -> None:
    """Nothing of any request is left."""
    end = time.monotonic() + WAIT_S
    names = ("num_programs", "num_running", "num_waiting", "pages_held")
    while served.server.num_running or any(engine.stats()[name] for name in names):
        assert time.monotonic() < end, (served.server.num_running, engine.stats())
        time.sleep(0.01)


def test_row_43_an_aborted_id_can_be_used_again_and_the_abort_reaches_no_other(dummy_engine: Engine) -> None:
    with serving(dummy_engine) as served, httpx2.Client(base_url=served.url, timeout=WAIT_S) as http:
        for _ in range(8):
            with http.stream("POST", "/generate", json=body(1500, stream=True)) as first:
                lines = first.iter_lines()
                next(lines)
                with httpx2.Client(base_url=served.url, timeout=WAIT_S) as other:
                    assert other.post("/abort_request", json={"rid": "mine"}).json() == {"aborted": 1}
                    while (again := other.post("/generate", json=body(5))).status_code == 400:
                        assert "is running" in again.json()["error"]["message"]
                assert again.json()["meta_info"]["completion_tokens"] == 5
        idle(served, dummy_engine)


def test_row_42_of_requests_that_come_at_once_with_one_id_one_runs(dummy_engine: Engine) -> None:
    async def sent(line: Line) -> int:
        data = json.dumps(body(40, return_text_in_logprobs=True)).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        await line.send(head.encode() + data)
        return (await line.answer()).status

    async def all_at_once(port: int) -> list[int]:
        lines = [Line(port) for _ in range(8)]
        try:
            return await asyncio.gather(*(sent(line) for line in lines))
        finally:
            for line in lines:
                line.close()

    with serving(dummy_engine) as served:
        before = dummy_engine.stats()["programs"]
        statuses = asyncio.run(all_at_once(served.port))
        assert set(statuses) <= {200, 400}
        assert statuses.count(200) == dummy_engine.stats()["programs"] - before >= 1
        idle(served, dummy_engine)


def test_requests_that_share_a_tracing_id_are_each_known_until_they_end(dummy_engine: Engine) -> None:
    """The drain waits for what is known; an id that one of them took with it would cut off the other."""
    trace = {"X-Request-Id": "trace-1"}
    asked = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with serving(dummy_engine) as served, httpx2.Client(base_url=served.url, timeout=WAIT_S) as http:
        with http.stream("POST", "/v1/completions", json=asked, headers=trace) as long:
            lines = long.iter_lines()
            next(lines)
            short = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=trace)
            assert short.is_success
            assert served.server.num_running == 1
            assert http.post("/abort_request", json={"rid": "trace-1"}).json() == {"aborted": 1}
            assert "cancelled" in [line for line in lines if line][-1]
        idle(served, dummy_engine)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/generate", {"text": ["a", "b" * 4096, "c"], "sampling_params": {"max_new_tokens": 3}}),
        ("/generate", {"input_ids": [[1], [10**6]], "sampling_params": {"max_new_tokens": 3}}),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 3}, {"max_new_tokens": -3}]}),
        ("/v1/completions", {"prompt": ["a", "b" * 4096], "max_tokens": 3, "stream": True}),
        ("/v1/completions", {"prompt": [[1], [10**6]], "max_tokens": 3}),
        ("/v1/score", {"query": "q", "items": ["a", "b" * 4096], "label_token_ids": [1, 2]}),
    ],
    ids=["too long", "no such token", "no such number", "streamed", "no such token in a prompt", "items"],
)
def test_row_44_a_batch_with_a_wrong_member_starts_nothing_that_stays(
    dummy_engine: Engine, path: str, asked: dict[str, Any]
) -> None:
    with serving(dummy_engine) as served, httpx2.Client(base_url=served.url, timeout=WAIT_S) as http:
        refused = http.post(path, json=asked)
        said = refused.text.strip().rpartition("data: ")[2]  # a stream may have begun
        assert refused.status_code == (200 if refused.text.startswith("data") else 400), refused.text
        assert json.loads(said)["error"]["type"] == "invalid_request_error"
        idle(served, dummy_engine)
        assert not served.server._running
        assert http.post("/generate", json=body(2)).json()["meta_info"]["completion_tokens"] == 2
