"""`sgl.RemoteEngine`: a backend like every other, and the same as in process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.backend_conformance import BackendConformance
from support.serving import Served, serving

import sgl
from sgl.errors import EngineDead, Unauthorized
from sgl.runtime.engine import Engine


@pytest.fixture(scope="module")
def served(dummy_engine: Engine) -> Iterator[Served]:
    with serving(dummy_engine) as server:
        yield server


@pytest.fixture
def remote(served: Served) -> Iterator[sgl.RemoteEngine]:
    with sgl.RemoteEngine(served.url) as engine:
        yield engine


class TestRemoteEngine(BackendConformance):
    @pytest.fixture
    def backend(self, remote: sgl.RemoteEngine) -> sgl.RemoteEngine:
        return remote


@sgl.function
def branching(s: sgl.ProgramState, topic: str) -> None:
    s += sgl.system("Be brief.")
    s += sgl.user(topic)
    s += sgl.assistant(sgl.gen("first", max_tokens=6, temperature=0))
    forks = s.fork(3)
    for number, fork in enumerate(forks):
        fork += sgl.user(f"View {number}")
        fork += sgl.assistant(sgl.gen("view", max_tokens=4, temperature=0))
    forks.join()
    s += sgl.user("\n".join(s["view"]) + "?")
    s += sgl.assistant(sgl.select("choice", ["left", "right"]))


def test_a_program_says_and_costs_the_same(dummy_engine: Engine, remote: sgl.RemoteEngine) -> None:
    counters = ("prompt_tokens", "prefill_tokens", "decode_tokens", "scored_tokens", "requests", "programs")

    def run(backend: object) -> tuple[object, ...]:
        dummy_engine.flush_cache(wait_s=5)
        before = dummy_engine.stats()
        state = branching.run("Trains", backend=backend)
        values = (state["first"], state["view"], state["choice"], state.text())
        after = dummy_engine.stats()
        return (*values, *(after[name] - before[name] for name in counters))

    assert run(remote) == run(dummy_engine)


def test_a_static_program_is_one_request(served: Served, remote: sgl.RemoteEngine) -> None:
    compiled = branching.compile()
    remote.sampling_defaults()
    seen: list[str] = []
    app = served.server.metrics.answered
    served.server.metrics.answered = lambda path, status: seen.append(path)  # type: ignore[method-assign]
    try:
        compiled.run("Trains", backend=remote)
    finally:
        served.server.metrics.answered = app  # type: ignore[method-assign]
    assert seen == ["/v1/programs"]


def test_a_stream_arrives_piece_by_piece(remote: sgl.RemoteEngine, dummy_engine: Engine) -> None:
    there = list(branching.run("Trains", backend=remote, stream=True).text_iter("first"))
    here = list(branching.run("Trains", backend=dummy_engine, stream=True).text_iter("first"))
    assert "".join(there) == "".join(here)
    assert len(there) > 1


def test_runtime_endpoint_is_the_same_under_sglangs_name(served: Served, dummy_engine: Engine) -> None:
    endpoint = sgl.RuntimeEndpoint(served.url)
    try:
        here = branching.run("Trains", backend=dummy_engine)
        there = branching.run("Trains", backend=endpoint)
        assert (there["view"], there.text()) == (here["view"], here.text())
        sgl.flush_cache(endpoint)
        assert sgl.get_server_info(endpoint)["model"] == "dummy"
    finally:
        endpoint.shutdown()


def test_nobody_there_is_an_error_at_once() -> None:
    with sgl.RemoteEngine("http://127.0.0.1:9") as engine:
        with pytest.raises(EngineDead, match="no sgl server answers"):
            branching.run("Trains", backend=engine).sync()
        assert not engine.alive


def test_keys(dummy_engine: Engine) -> None:
    with serving(dummy_engine, api_key=("secret",)) as served:
        with sgl.RemoteEngine(served.url, api_key="wrong") as engine, pytest.raises(Unauthorized):
            engine.server_info()
        with sgl.RemoteEngine(served.url, api_key="secret") as engine:
            assert branching.run("Trains", backend=engine)["choice"] in ("left", "right")
            assert "secret" not in str(engine.server_info())
