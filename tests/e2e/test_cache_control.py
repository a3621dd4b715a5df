"""Pins and flushes through a real worker, on the toy model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

import sgl
from sgl.errors import EngineBusy, InvalidParameter, PinBudgetExceeded
from sgl.runtime.engine import Engine


def cached(engine: Engine, prompt: str) -> int:
    tokens: int = engine.generate(prompt, {"max_new_tokens": 1})["meta_info"]["cached_tokens"]
    return tokens


def test_pins(dummy_engine: Engine) -> None:
    prefix = "pinned through a socket " * 4
    with dummy_engine.pin(prefix) as pinned:
        dummy_engine.flush_cache(wait_s=30)
        assert dummy_engine.stats()["pages_pinned"] == pinned.num_tokens == len(prefix)
        assert cached(dummy_engine, prefix + "and used") == len(prefix)
        with pytest.raises(PinBudgetExceeded) as refused:
            dummy_engine.pin("too long " * 200)
        assert refused.value.max_pinned_tokens == 1024
    dummy_engine.flush_cache(wait_s=30)
    assert dummy_engine.stats()["pages_pinned"] == 0
    assert cached(dummy_engine, prefix + "and used") == 0


def test_wrong_pins_are_refused_before_they_are_sent(dummy_engine: Engine) -> None:
    for arguments in ({"ttl_s": 0}, {"ttl_s": True}, {"cache_salt": 3}):
        with pytest.raises(InvalidParameter):
            dummy_engine.pin("x", **arguments)
    with pytest.raises(InvalidParameter):
        dummy_engine.pin([1.5])
    with pytest.raises(InvalidParameter, match="a string or a sequence"):
        dummy_engine.pin(5)
    with pytest.raises(InvalidParameter):
        dummy_engine.pin([10**6])


def test_a_busy_engine_refuses_to_flush_or_waits(dummy_engine: Engine) -> None:
    params = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0}
    stream = dummy_engine.generate("busy ", params, stream=True)
    next(stream)
    with pytest.raises(EngineBusy, match="1 requests run"):
        dummy_engine.flush_cache()
    with ThreadPoolExecutor(1) as pool:
        flushed = pool.submit(dummy_engine.flush_cache, wait_s=120)
        for _ in stream:
            pass
        assert flushed.result()
    assert dummy_engine.stats()["pages_cached"] == 0


@sgl.function
def read(s, text: str) -> None:  # type: ignore[no-untyped-def]
    s += text + sgl.gen("x", max_tokens=1)


def test_nothing_is_shared_across_salts(dummy_engine: Engine) -> None:
    prompt = "what a tenant says in confidence " * 3
    reused = len(prompt) - 1  # the last token is computed for its logits

    def generated(salt: str) -> int:
        found = dummy_engine.generate(prompt, {"max_new_tokens": 1}, cache_salt=salt)["meta_info"]["cached_tokens"]
        return int(found)

    def run(salt: str) -> int:
        meta = read.run(prompt, backend=dummy_engine, cache_salt=salt).get_meta_info("x")
        return int(meta["cached_tokens"])

    def batch(salt: str) -> int:
        (state,) = read.run_batch([{"text": prompt}], backend=dummy_engine, cache_salt=salt)
        return int(state.get_meta_info("x")["cached_tokens"])

    for ask, salt in ((generated, "a"), (run, "b"), (batch, "c")):
        assert ask(salt) == 0
        assert [again(salt) for again in (generated, run, batch)] == [reused] * 3
    assert [generated(""), generated("d"), run("ab")] == [0, 0, 0]
    for wrong in (generated, run, batch):
        with pytest.raises(InvalidParameter, match="cache_salt is 3"):
            wrong(3)  # type: ignore[arg-type]
