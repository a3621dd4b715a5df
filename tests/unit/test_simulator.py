"""The simulator against the real engine's counters, and what it answers about policies."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from support.scripted import small_config

import sgl
from sgl.bench.simulate import run
from sgl.errors import ConfigError
from sgl.lang.graph import Fork, Gen, Graph, Join, LiteralText, ProgramOptions, Release, Sampling, Select, Text
from sgl.runtime.simulator import (
    LatencyModel,
    SimulatedProgram,
    Simulation,
    load_log,
    poisson,
)


@sgl.function
def judge(s, essay: str, words: int) -> None:  # type: ignore[no-untyped-def]
    s += "Essay: " + essay
    forks = s.fork(3)
    for index, fork in enumerate(forks):
        fork += f" aspect {index}: " + sgl.gen("note", max_tokens=words, ignore_eos=True)
    forks.join()
    s += " grade: " + sgl.gen("grade", max_tokens=2, ignore_eos=True)


@sgl.function
def chain(s, question: str) -> None:  # type: ignore[no-untyped-def]
    s += question
    for _ in range(3):
        s += sgl.gen("step", max_tokens=5, ignore_eos=True)
        if s["step"] is not None:
            s += "; next "


def test_the_simulator_predicts_the_counters_of_the_real_engine(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    engine = sgl.Engine(
        model_path="dummy", max_total_tokens=2048, message_log=str(log), max_running_requests=4, chunked_prefill_size=64
    )
    with engine:
        for index in range(3):
            judge.run(essay="words " * 20 + str(index), words=8 + index, backend=engine, temperature=0)
            chain.run(question=f"question {index}? ", backend=engine, temperature=0)
        real = engine.stats()
        info = engine.server_info()["resolved"]
    recorded = load_log(log)
    programs = recorded.programs
    assert recorded.fields == {
        "model_path": "dummy",
        "max_total_tokens": 2048,
        "max_running_requests": 4,
        "chunked_prefill_size": 64,
    }
    assert [len(program.fragments) > 1 for program in programs] == [False, True] * 3
    config = small_config(
        num_pages=2048, context_len=info["context_len"], max_running_requests=4, chunked_prefill_size=64
    )
    apart = [msgspec.structs.replace(program, arrival_s=1e3 * i) for i, program in enumerate(programs)]
    result = Simulation(config).run(apart)
    simulated = result.stats.as_dict()
    for counter in ("prompt_tokens", "cached_tokens", "prefill_tokens", "decode_tokens", "forwards", "requests"):
        assert simulated[counter] == real[counter], counter
    assert all(times.error is None and times.end_s is not None for times in result.programs)


def ask(prompt: str, n: int, number: int = 0) -> Graph:
    sampling = Sampling(max_new_tokens=n, ignore_eos=True)
    return Graph(nodes=(Text(id=0, segments=(LiteralText(prompt),)), Gen(id=1, name="x", sampling=sampling)))


def test_time_is_the_latency_models_and_idle_time_is_skipped() -> None:
    latency = LatencyModel(step_s=1.0, token_s=0.25, pair_s=0.0)
    programs = [SimulatedProgram(fragments=(ask("abcd", 3),), arrival_s=at) for at in (10.0, 100.0)]
    result = Simulation(small_config(), latency).run(programs)
    first, second = result.programs
    # Prefill of 4 tokens and two decode steps; the second finds all but its last token in the cache.
    assert (first.first_s, first.end_s) == (pytest.approx(10 + 4.5), pytest.approx(10 + 2 + 2.5))
    assert second.end_s == pytest.approx(100 + 1.25 * 3)
    assert result.busy_share == pytest.approx((4.5 + 3.75) / (103.75 - 10))


def test_finishing_started_programs_first_ends_them_earlier() -> None:
    """Chains of fragments compete for two rows: program order against arrival order."""

    def fragments(number: int) -> tuple[Graph, ...]:
        sampling = Sampling(max_new_tokens=4, ignore_eos=True)
        return tuple(
            Graph(
                nodes=(
                    Text(id=2 * k, segments=(LiteralText(f"{number}-{k} "),)),
                    Gen(id=2 * k + 1, name=f"x{k}", sampling=sampling),
                )
            )
            for k in range(4)
        )

    def mean_end(policy: str) -> tuple[float, float]:
        programs = [SimulatedProgram(fragments=fragments(number)) for number in range(8)]
        result = Simulation(small_config(max_running_requests=2, schedule_policy=policy)).run(programs)
        ends = [times.end_s for times in result.programs if times.end_s is not None]
        assert len(ends) == 8
        return sum(ends) / 8, result.makespan_s

    aware, arrival = mean_end("program"), mean_end("fcfs")
    assert aware[0] < 0.8 * arrival[0]
    assert aware[1] <= 1.05 * arrival[1]


def test_selects_forks_constraints_and_lengths_are_simulated() -> None:
    children = (1, 2)
    nodes = [
        Text(id=0, segments=(LiteralText("pick "),)),
        Select(id=1, name="pick", choices=("left", "right")),
        Fork(id=2, children=children),
        *(Gen(id=2 + child, branch=child, name="x", sampling=Sampling(max_new_tokens=50)) for child in children),
        Join(id=5, children=children),
        *(Release(id=5 + child, branch=child) for child in children),
    ]
    program = SimulatedProgram(fragments=(Graph(nodes=tuple(nodes)),))
    result = Simulation(small_config(), output_len=lambda spec: 7).run([program, program])
    assert result.stats.decode_tokens == 2 * 2 * 8  # seven letters and the end of sequence, which was drawn too
    result.stats.check()


def test_a_program_that_fails_is_reported_and_the_others_go_on() -> None:
    too_long = SimulatedProgram(fragments=(ask("x" * 500, 4), ask("never", 1)))
    late = SimulatedProgram(fragments=(ask("y" * 60, 100),), options=ProgramOptions(deadline_s=0.01))
    fine = SimulatedProgram(fragments=(ask("z", 4),))
    result = Simulation(small_config()).run([too_long, late, fine])
    assert [times.error for times in result.programs] == ["prompt_too_long", "deadline_exceeded", None]
    assert (result.latency_s(0.5) or 0) > 0
    assert Simulation(small_config()).run([late]).latency_s(0.5) is None


def test_latency_is_fitted_to_a_trace(tmp_path: Path) -> None:
    wanted = LatencyModel(step_s=4e-3, token_s=2e-3, pair_s=1e-7)
    lines = []
    for tokens in range(1, 30):
        pairs = tokens * (50 + tokens**2)
        ms = 1e3 * (wanted.step_s + wanted.token_s * tokens + wanted.pair_s * pairs)
        lines.append(json.dumps({"ph": "X", "args": {"tokens": tokens, "pairs": pairs, "forward_ms": ms}}))
    path = tmp_path / "trace.json"
    path.write_text("[\n" + ",\n".join(lines) + ',\n{"ph": "X", "ar')
    fitted = LatencyModel.from_trace(path)
    for name in ("step_s", "token_s", "pair_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(wanted, name), rel=1e-3)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="at least 10"):
        LatencyModel.from_trace(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_log(tmp_path / "missing")
    path.write_text("")
    with pytest.raises(ConfigError, match="has no program in it"):
        load_log(path)


def test_arrivals_are_a_poisson_process_by_seed() -> None:
    programs = poisson([SimulatedProgram(fragments=(ask("a", 1),))] * 2000, rate=50.0)
    arrivals = [program.arrival_s for program in programs]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(2000 / 50, rel=0.1)
    assert [p.arrival_s for p in poisson(programs, 50.0, seed=1)] != arrivals


def test_the_command_compares_variants(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with sgl.Engine(model_path="dummy", max_total_tokens=2048, message_log=str(log)) as engine:
        chain.run_batch([{"question": f"question {i}? "} for i in range(6)], backend=engine)
    report = run(log, {}, vary=["max-running-requests=1,8"], rate=100.0)
    assert (report.model, report.engine) == ("dummy", {"model_path": "dummy", "max_total_tokens": 2048})
    assert run(log, {"max_total_tokens": 4096}).engine["max_total_tokens"] == 4096
    log.write_bytes(2 * log.read_bytes())
    assert run(log, {}).variants[0].programs == 12, "two engines that wrote to one file"
    narrow, wide = report.variants
    assert (narrow.fields, narrow.programs, narrow.failed) == ({"max_running_requests": 1}, 6, 0)
    assert narrow.decode_tokens == wide.decode_tokens == 6 * 15
    assert narrow.forwards > wide.forwards
    assert narrow.makespan_s > wide.makespan_s
    for wrong in ("page_size", "page_size=", "pages=1", "page_size=x"):
        with pytest.raises(ConfigError):
            run(log, {"model_path": "dummy"}, vary=[wrong])
