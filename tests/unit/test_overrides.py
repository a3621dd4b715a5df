"""What may change while an engine runs: names, values, memory, and that a step sees it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.scripted import Rig, small_config

from sgl.errors import ConfigError
from sgl.lang.graph import Gen, Graph, LiteralText, ProgramOptions, Sampling, Text
from sgl.limits import Limits
from sgl.runtime.config import EngineConfig, Facts
from sgl.runtime.engine import Engine
from sgl.runtime.memory_plan import MiB
from sgl.runtime.overrides import OVERRIDABLE, Settings, override
from sgl.runtime.resolution import resolve

SETTINGS = Settings(config=small_config(), limits=Limits())


def test_a_change_is_a_new_value_and_a_record() -> None:
    changed, (first, second) = override(
        SETTINGS, {"chunked_prefill_size": 8, "max_queue": 5}, why="a busy hour", at=12.5
    )
    assert changed.config.chunked_prefill_size == 8
    assert changed.limits.max_queue == 5
    assert (first.field, first.value, first.was, first.why, first.at) == (
        "chunked_prefill_size",
        8,
        64,
        "a busy hour",
        12.5,
    )
    assert (second.field, second.was) == ("max_queue", Limits().max_queue)
    assert SETTINGS.config.chunked_prefill_size == 64
    assert msgspec.structs.replace(changed.config, chunked_prefill_size=64) == SETTINGS.config  # and nothing else


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 2}, "page_size is fixed while an engine runs"),
        ({"max_total_tokens": 9}, "max_total_tokens is fixed"),
        ({"max_stops": 9}, "unknown engine option 'max_stops'"),
        ({"max_runing_requests": 9}, "did you mean 'max_running_requests'"),
        ({"max_running_requests": 0}, "max_running_requests is 0"),
        ({"max_running_requests": None}, "expected a value"),
        ({"chunked_prefill_size": "8"}, "chunked_prefill_size is '8'"),
        ({"max_queue_s": -1.0}, "max_queue_s is -1.0"),
        ({"log_level": "loud"}, "log_level is 'loud'"),
        ({"max_queue": 5, "log_level": 3}, "log_level is 3"),
    ],
)
def test_what_cannot_change_is_refused_whole(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        override(SETTINGS, changes, why="a test", at=0.0)
    assert caught.value.param in changes
    assert caught.value.hint


def test_a_reason_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="needs a reason"):
        override(SETTINGS, {"max_queue": 5}, why="  ", at=0.0)


def test_a_larger_step_must_fit_in_memory() -> None:
    facts = Facts(
        cpu_count=2,
        available_bytes=600 * MiB,
        model_context_len=512,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        hidden_size=256,
        intermediate_size=512,
        vocab_size=50_000,
        num_parameters=10**6,
    )
    config = resolve(EngineConfig(chunked_prefill_size=64), facts)
    settings = Settings(config=config, limits=Limits())
    with pytest.raises(ConfigError, match="chunked_prefill_size of 4096 needs") as caught:
        override(settings, {"chunked_prefill_size": 4096}, why="a test", at=0.0)
    most = int((caught.value.hint or "").rpartition(" ")[2])
    assert 64 <= most < 4096
    changed, _ = override(settings, {"chunked_prefill_size": most}, why="as advised", at=0.0)
    assert changed.config.chunked_prefill_size == most
    smaller, _ = override(settings, {"chunked_prefill_size": 16}, why="less always fits", at=0.0)
    assert smaller.config.chunked_prefill_size == 16


def test_the_next_step_sees_it() -> None:
    rig = Rig(chunked_prefill_size=64)
    rig.core.open(1, ProgramOptions())
    prompt = Text(id=0, segments=(LiteralText("x" * 150),))
    sampling = Sampling(max_new_tokens=1, temperature=0.0)
    rig.core.submit(1, Graph(nodes=(prompt, Gen(id=1, name="y", sampling=sampling))), finish=True)
    rig.core.step()
    changed, _ = override(SETTINGS, {"chunked_prefill_size": 5, "max_queue": 7}, why="shorter steps", at=0.0)
    rig.core.apply(changed.config, changed.limits)
    rig.run()
    assert [plan.num_tokens for plan in rig.runner.plans][:3] == [64, 5, 5]
    assert rig.core.scheduler.limits.max_queue == rig.core.limits.max_queue == 7


def test_an_engine_shows_what_was_changed(dummy_engine: Engine) -> None:
    before = dummy_engine.server_info()
    assert before["resolved"]["memory"]["items"]
    was = before["resolved"]["max_running_requests"]
    dummy_engine.override(max_running_requests=was, max_queue=90_000, why="a test")
    with pytest.raises(ConfigError, match="page_size is fixed"):
        dummy_engine.override(page_size=4, why="a test")
    for shown in (dummy_engine.server_info()["overrides"], dummy_engine.stats()["overrides"]):
        assert [(record["field"], record["value"], record["why"]) for record in shown[-2:]] == [
            ("max_running_requests", was, "a test"),
            ("max_queue", 90_000, "a test"),
        ]
        assert shown[-1]["at"] > 1e9
    assert dummy_engine.server_info()["resolved"] == before["resolved"]
    dummy_engine.override(max_queue=Limits().max_queue, why="back")
    assert set(OVERRIDABLE) >= {record["field"] for record in dummy_engine.server_info()["overrides"]}
