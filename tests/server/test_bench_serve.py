"""The load of `sgl bench serve` and its attackers: what is asked, counted and noted; no times."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise

import pytest
from support.serving import serving

from sgl.bench import attackers, attacks
from sgl.bench.client import Answer
from sgl.bench.harness import PairPlan
from sgl.bench.load import Snapshot
from sgl.bench.serve import Load, Objectives, default_vocab, measure, own_environment, report_of, served_model
from sgl.errors import BenchError, InvalidParameter
from sgl.runtime.engine import Engine


def test_every_request_is_made_once_and_its_tokens_are_counted(dummy_engine: Engine) -> None:
    with serving(dummy_engine, served_model_name="tiny") as served:
        for stream in (True, False):
            before = dummy_engine.stats()
            load = Load(requests=6, clients=3, prompt_tokens=20, new_tokens=5, stream=stream)
            report = measure(served.url, load, vocab_size=256)
            after = dummy_engine.stats()
            assert (report.model, report.succeeded, report.good, report.errors) == ("tiny", 6, 6, {})
            assert after["requests"] - before["requests"] == 6
            assert round(report.output_tokens_per_s * report.seconds) == 30
            assert (report.ttft_s is not None) == stream
        assert served_model(served.url) == "tiny"


def test_an_open_loop_and_failures(dummy_engine: Engine) -> None:
    with serving(dummy_engine, max_body_bytes=1024) as served:
        fits = Load(requests=4, rate=1000.0, prompt_tokens=8, new_tokens=2)
        assert measure(served.url, fits, vocab_size=256, objectives=Objectives(ttft_s=0.0)).good == 0
        large = measure(served.url, Load(requests=3, prompt_tokens=900, new_tokens=2), vocab_size=256)
        assert (large.succeeded, large.errors, large.whole_s) == (0, {"status 413": 3}, None)


def test_groups_share_the_beginning_of_their_prompts() -> None:
    prompts = Load(requests=4, prompt_tokens=10, shared_tokens=6, groups=2).prompts(100)
    assert [len(prompt) for prompt in prompts] == [10] * 4
    assert prompts[0][:6] == prompts[2][:6] != prompts[1][:6]
    assert prompts[0][6:] != prompts[2][6:]
    arrivals = Load(requests=50, rate=10.0).arrivals()
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0.0
    assert default_vocab({"model_path": "dummy"}) == 512


def test_arrivals_have_the_rate_that_was_asked_and_the_burstiness() -> None:
    def gaps(burstiness: float) -> list[float]:
        times = Load(requests=4000, rate=10.0, burstiness=burstiness).arrivals()
        return [later - sooner for sooner, later in pairwise(times)]

    for burstiness in (0.25, 1.0, 100.0):
        found = gaps(burstiness)
        assert statistics.fmean(found) == pytest.approx(0.1, rel=0.1)
        # The variation of a gamma distribution is one over the root of its shape.
        assert statistics.stdev(found) / statistics.fmean(found) == pytest.approx(burstiness**-0.5, rel=0.1)


def test_what_is_told_of_the_answers() -> None:
    answers = [
        Answer((0.1, 0.2, 0.6), 0.7, 3),
        Answer((0.5, 0.6, 0.7), 0.7, 3),
        Answer((0.1,), 0.1, 0, "EOFError"),
    ]
    report = report_of("", "m", Load(requests=3, new_tokens=3), answers, 2.0, Objectives(ttft_s=0.3, token_s=0.2))
    assert report.good_requests_per_s == 0.0  # the first is slow between tokens, the second to its first
    assert (report.succeeded, report.errors, report.output_tokens_per_s) == (2, {"EOFError": 1}, 3.0)
    assert report.piece_s is not None
    assert report.token_s is not None
    assert (round(report.piece_s.p99, 6), round(report.piece_s.p50, 6)) == (0.4, 0.1)
    assert round(report.token_s.p99, 6) == 0.25
    assert report_of("", "m", Load(), answers, 1.0, Objectives(whole_s=0.8)).good == 2


@pytest.mark.parametrize("name", sorted({*attackers.ATTACKS} - {"compile-flood"}))  # which is slow-compile, eight times
def test_an_attack_strikes_and_the_server_goes_on(
    dummy_engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attackers, "BYTE_S", 0.05)
    monkeypatch.setattr(attackers, "HOLD_S", 0.1)
    with serving(dummy_engine, header_timeout=0.2) as served:
        target = attackers.Target("127.0.0.1", served.port)

        async def strike() -> None:
            with suppress(OSError, EOFError):
                await asyncio.wait_for(attackers.attack_of(name).strike(target), 60)

        asyncio.run(strike())
        clean = Load(requests=2, clients=2, prompt_tokens=8, new_tokens=2)
        assert measure(served.url, clean, vocab_size=256).errors == {}


def test_attacks_have_the_rows_of_the_table_and_no_other_names() -> None:
    rows = [attack.row for attack in attackers.ATTACKS.values()]
    assert rows == [1, 2, 3, 4, 5, 6, 7, 8, 27, 28, 29, 30]
    with pytest.raises(InvalidParameter, match="no attack 'ddos'"):
        attackers.attack_of("ddos")


class Quiet:
    """Counters of a machine on which nothing else runs."""

    cores = 1

    def __init__(self) -> None:
        self._at_s = 0.0

    def read(self, sides: Collection[int] = ()) -> Snapshot:
        self._at_s += 1.0
        return Snapshot(at_s=self._at_s, busy_s=0.0)


def test_attacks_share_the_warm_up_and_tell_each_row(dummy_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []
    attack: list[str] = []

    @contextmanager
    def own_server(fields: object) -> Iterator[str]:
        yield served.url

    @contextmanager
    def attacking(name: str, url: str, rate: float) -> Iterator[None]:
        attack.append(name)
        yield
        attack.clear()

    async def run_load(*args: object) -> list[Answer]:
        loads.append(attack[0] if attack else "calm")
        return [Answer((0.1,), 0.1, 1)]

    monkeypatch.setattr(attacks, "own_server", own_server)
    monkeypatch.setattr(attacks, "attacking", attacking)
    monkeypatch.setattr(attacks, "run_load", run_load)
    monkeypatch.setattr(attacks.time, "sleep", lambda seconds: None)
    reports: list[int] = []
    plan = PairPlan(pairs=1, attempts=1, turn_s=1e-9, patience_s=0.0, quiet_s=0.0)
    with serving(dummy_engine) as served:
        report = attacks.compare_attacks(
            {"model_path": "dummy"},
            ["huge-head", "slow-compile"],
            Load(requests=1, clients=1),
            plan,
            sampler=Quiet(),
            measured=lambda report: reports.append(len(report.attacks)),
        )
    assert [row.row for row in report.attacks] == [1, 29]
    assert reports == [1, 2]
    assert loads[:2] == ["calm", "calm"]
    assert sorted(loads[2:4]) == ["calm", "huge-head"]
    assert sorted(loads[4:]) == ["calm", "slow-compile"]


def test_a_server_with_keys_wants_one_and_says_so(dummy_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(requests=2, clients=2, prompt_tokens=8, new_tokens=2)
    with serving(dummy_engine, api_key=("secret",)) as served:
        with pytest.raises(BenchError, match=r"wants an API key .*--api-key"):
            measure(served.url, load, vocab_size=256)
        with pytest.raises(BenchError, match="refuses this API key"):
            served_model(served.url, "wrong")
        assert measure(served.url, load, vocab_size=256, api_key="secret").succeeded == 2
    monkeypatch.setenv("SGL_API_KEY", "secret")
    monkeypatch.setenv("SGL_PAGE_SIZE", "4")
    own = own_environment()
    assert ("SGL_API_KEY" in own, own["SGL_PAGE_SIZE"]) == (False, "4")
