"""`resolve(config, facts)`: invented machines and models, and the reasons it gives."""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec
import pytest

from sgl.errors import ConfigError
from sgl.limits import DEFAULT_LIMITS, ENGINE_LIMITS, Limits
from sgl.runtime.config import EngineConfig, Facts, config_from_mapping
from sgl.runtime.resolution import resolve

SMALL = Facts(
    cpu_count=2,
    available_bytes=8 * 2**30,
    model_context_len=8192,
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    num_parameters=135_000_000,
    checkpoint_dtype="bfloat16",
)
GPU = msgspec.structs.replace(SMALL, cuda_bytes=80 * 2**30, cuda_name="a big one")


def test_cpu_defaults_and_reasons() -> None:
    resolved = resolve(EngineConfig(), SMALL)
    assert (resolved.device, resolved.dtype, resolved.num_threads, resolved.page_size) == ("cpu", "float32", 2, 1)
    assert resolved.context_len == 8192
    assert resolved.pool_tokens >= 8192
    assert resolved.kv_bytes_per_token == 2 * 30 * 3 * 64 * 4
    assert resolved.weights_bytes == 4 * SMALL.num_parameters
    assert {reason.field for reason in resolved.reasons} >= {"device", "dtype", "max_total_tokens", "num_threads"}
    assert all(reason.why for reason in resolved.reasons)


def test_cuda_takes_the_checkpoints_half_precision() -> None:
    resolved = resolve(EngineConfig(), GPU)
    assert (resolved.device, resolved.dtype) == ("cuda", "bfloat16")
    memory = resolved.memory
    assert memory is not None
    assert resolved.pool_tokens * resolved.kv_bytes_per_token == memory.bytes_of("KV pool")
    assert 0.89 * GPU.cuda_bytes < memory.serving_bytes <= 0.9 * GPU.cuda_bytes


def test_what_the_user_set_is_taken_and_needs_no_reason() -> None:
    wish = EngineConfig(dtype="bfloat16", context_length=100, max_total_tokens=333, page_size=4, random_seed=7)
    resolved = resolve(wish, SMALL)
    assert (resolved.dtype, resolved.context_len, resolved.num_pages, resolved.random_seed) == ("bfloat16", 100, 83, 7)
    assert not {reason.field for reason in resolved.reasons} & {"dtype", "context_length", "max_total_tokens"}


def test_bounds_are_given_at_the_start_like_everything_else() -> None:
    wish = config_from_mapping({"max_queue": 3, "max_queue_s": 2.5, "max_compile_s": 9})
    resolved = resolve(wish, SMALL)
    assert (resolved.limits.max_queue, resolved.limits.max_queue_s, resolved.limits.max_compile_s) == (3, 2.5, 9.0)
    assert resolve(EngineConfig(), SMALL).limits == DEFAULT_LIMITS
    kinds, options = (get_type_hints(kind, include_extras=True) for kind in (Limits, EngineConfig))
    assert all(kinds[name] == options[name] for name in ENGINE_LIMITS), "one type and one text for both"
    for name, value in (("random_seed", 10**30), ("max_total_tokens", 10**30), ("page_size", 2**40)):
        with pytest.raises(ConfigError, match=f"^{name} is {value}: Expected"):
            config_from_mapping({name: value})
    for name, value in (("max_queue", 0), ("max_queue_s", float("inf")), ("max_compile_s", float("nan"))):
        with pytest.raises(ConfigError, match=name):
            config_from_mapping({name: value})


def test_a_context_longer_than_the_models_own() -> None:
    wish = EngineConfig(context_length=9000)
    with pytest.raises(ConfigError, match=r"trained for 8192.*json_model_override_args, or set allow_longer_context"):
        resolve(wish, SMALL)
    scaled = msgspec.structs.replace(SMALL, longest_context_len=16384)
    assert resolve(wish, scaled).context_len == 9000
    assert resolve(EngineConfig(), scaled).context_len == 8192
    allowed = resolve(EngineConfig(context_length=9000, allow_longer_context=True), SMALL)
    assert allowed.context_len == 9000
    assert "the model was made for 8192" in {reason.field: reason.why for reason in allowed.reasons}["context_length"]


def test_resolve_is_pure() -> None:
    assert resolve(EngineConfig(), SMALL) == resolve(EngineConfig(), SMALL)


@pytest.mark.parametrize(
    ("wish", "facts", "message"),
    [
        ({"device": "cuda"}, SMALL, "no CUDA device was found"),
        ({"context_length": 9000}, SMALL, "trained for 8192"),
        ({"max_total_tokens": 3, "page_size": 16}, SMALL, "less than one page of 16"),
        ({}, msgspec.structs.replace(SMALL, available_bytes=2**29), "this engine needs .* while serving"),
        ({"mem_fraction_static": 0.05}, SMALL, "mem_fraction_static 0.05 of 8.00 GiB available"),
    ],
)
def test_impossible_wishes_name_what_to_change(wish: dict[str, Any], facts: Facts, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(EngineConfig(**wish), facts)
    assert caught.value.hint
    assert caught.value.param in caught.value.hint or caught.value.param in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model_pth": "x"}, "did you mean 'model_path'"),
        ({"zzz": 1}, "unknown engine option 'zzz'"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": "four"}, "page_size"),
        ({"dtype": "float8"}, "dtype"),
        ({"mem_fraction_static": 1.5}, "mem_fraction_static is 1.5: .* such a value"),
        ({"logit_processors": ["a:b", 5]}, "logit_processors is .*'a:b', 5"),
        ({"log_level": "loud"}, "log_level is 'loud': .*one of debug, info, warning, error"),
    ],
)
def test_options_are_checked_by_name_type_and_range(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_mapping(given)


def test_options_come_through() -> None:
    assert config_from_mapping({"model_path": "dummy", "page_size": 2}) == EngineConfig(model_path="dummy", page_size=2)
