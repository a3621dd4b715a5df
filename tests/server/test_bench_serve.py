"""The load of `sgl bench serve`: what is asked, counted and noted; no times."""

from __future__ import annotations

from support.serving import serving

from sgl.bench.serve import Load, default_vocab, measure, served_model
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
        assert measure(served.url, fits, vocab_size=256, ttft_s=0.0).good == 0
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
