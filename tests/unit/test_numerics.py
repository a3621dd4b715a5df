"""Which dtype, quantization and kernels an engine gets, from invented facts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sgl.errors import ConfigError
from sgl.runtime.config import EngineConfig, Facts
from sgl.runtime.engine_start import _resolve_and_load_kernels
from sgl.runtime.numerics import Dtype, decide_numerics
from sgl.runtime.resolution import resolve

FACTS = Facts(
    cpu_count=2,
    available_bytes=8 * 2**30,
    model_context_len=2048,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=64,
    intermediate_size=128,
    vocab_size=256,
    num_parameters=100_000,
    weights_kind="gguf",
    packed_bytes=70_000,
    native="avx2, g++ 12",
    native_obstacle="",
)
GPU = {"cuda_bytes": 2**34, "triton": "3.6"}


def facts(**changes: Any) -> Facts:
    return msgspec.structs.replace(FACTS, **changes)


@pytest.mark.parametrize(
    ("wish", "found", "expected"),
    [
        ({}, {}, ("bfloat16", "gguf", "native")),
        ({"kernels": "native"}, {}, ("bfloat16", "gguf", "native")),
        ({"kernels": "torch"}, {}, ("float32", "none", "torch")),
        ({}, {"native_obstacle": "there is no compiler"}, ("float32", "none", "torch")),
        ({"dtype": "float32"}, {}, ("float32", "none", "torch")),
        ({"dtype": "bfloat16", "quantization": "none"}, {}, ("bfloat16", "none", "native")),
        ({"dtype": "bfloat16", "kernels": "torch"}, {}, ("bfloat16", "none", "torch")),
        ({"dtype": "float16"}, {}, ("float16", "none", "torch")),
        ({"dtype": "float32", "kernels": "native"}, {}, ("float32", "none", "native")),
        ({"quantization": "gguf"}, {}, ("bfloat16", "gguf", "native")),
        ({"quantization": "gguf", "dtype": "float32"}, {}, ("float32", "gguf", "native")),
        ({"quantization": "int8"}, {"weights_kind": "safetensors"}, ("bfloat16", "int8", "native")),
        ({}, {"weights_kind": "safetensors"}, ("float32", "none", "torch")),
        ({"dtype": "bfloat16"}, {"native_obstacle": "there is no compiler"}, ("bfloat16", "none", "torch")),
        ({"enable_deterministic_inference": True}, {}, ("float32", "none", "torch")),
        ({"device": "cuda"}, GPU, ("bfloat16", "none", "triton")),
        ({"device": "cuda", "kernels": "torch"}, GPU, ("bfloat16", "none", "torch")),
        ({"device": "cuda"}, {**GPU, "triton": ""}, ("bfloat16", "none", "torch")),
        ({"device": "cuda"}, {**GPU, "head_dim": 80}, ("bfloat16", "none", "torch")),
        ({"device": "cuda"}, {**GPU, "attention_window": 512}, ("bfloat16", "none", "torch")),
        ({"device": "cuda"}, {**GPU, "attention_softcap": 50.0}, ("bfloat16", "none", "torch")),
        ({}, {"attention_window": 512, "attention_softcap": 50.0}, ("bfloat16", "gguf", "native")),
    ],
)
def test_the_path_follows_from_wish_and_facts(
    wish: dict[str, Any], found: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    resolved = resolve(EngineConfig(**wish), facts(**found))
    assert (resolved.dtype, resolved.quantization, resolved.kernels) == expected
    explained = {reason.field for reason in resolved.reasons}
    assert explained.isdisjoint(wish)
    assert {"dtype", "quantization", "kernels"} <= explained | set(wish)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("float32", "there is no compiler; oneDNN keeps the weights in its own order"),
        ("bfloat16", "there is no compiler; weights are not prepacked: it does not"),
    ],
)
def test_without_a_compiler_it_is_said_what_torch_does_with_the_weights(dtype: Dtype, message: str) -> None:
    found = facts(native_obstacle="there is no compiler", prepacked_obstacles={"bfloat16": "it does not"})
    resolved = resolve(EngineConfig(dtype=dtype), found)
    assert [reason.why for reason in resolved.reasons if reason.field == "kernels"] == [message]
    assert resolved.prepacked == ("oneDNN keeps" in message)


def test_who_asks_for_torch_gets_plain_torch() -> None:
    assert resolve(EngineConfig(dtype="float32"), facts()).prepacked
    assert not resolve(EngineConfig(dtype="float32", kernels="torch"), facts()).prepacked
    assert not resolve(EngineConfig(enable_deterministic_inference=True, dtype="float32"), facts()).prepacked


@pytest.mark.parametrize(
    ("wish", "found", "message"),
    [
        ({"quantization": "gguf"}, {"weights_kind": "safetensors"}, "the weights are safetensors"),
        ({"quantization": "int8"}, {"native_obstacle": "there is no compiler"}, "there is no compiler"),
        ({"quantization": "int8", "dtype": "float16"}, {}, "not in float16"),
        ({"quantization": "int4", "kernels": "torch"}, {}, "kernels is torch"),
        ({"quantization": "gguf", "enable_deterministic_inference": True}, {}, "deterministic mode"),
        ({"kernels": "native"}, {"native_obstacle": "there is no compiler"}, "kernels is native, but there is no"),
        ({"quantization": "gguf", "device": "cuda"}, {"cuda_bytes": 2**34}, "not on cuda"),
        ({"kernels": "native", "device": "cuda"}, {"cuda_bytes": 2**34}, "compute on the CPU"),
        ({"kernels": "triton", "device": "cuda"}, {"cuda_bytes": 2**34}, "Triton is not installed"),
        ({"kernels": "triton", "device": "cuda"}, {**GPU, "head_dim": 8}, "a power of two from 16, not of 8"),
        ({"kernels": "triton"}, {"triton": "3.6"}, "the device is cpu"),
        ({"kernels": "triton", "device": "cuda"}, {**GPU, "attention_window": 512}, "layers of this model at 512"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(
    wish: dict[str, Any], found: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        decide_numerics(EngineConfig(**wish), facts(**found), wish.get("device", "cpu"))
    assert caught.value.hint
    assert caught.value.param in ("quantization", "kernels")


def test_a_compiler_that_does_not_work_is_one_fact_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The model runs on torch, which is said once; what was asked for by name is refused with the compiler's words."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && echo broken 1.0 || { echo 'error: no header' >&2; exit 1; }\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SGL_CACHE", str(tmp_path))
    with caplog.at_level("WARNING", logger="sgl"):
        resolved = _resolve_and_load_kernels(EngineConfig(), FACTS, lambda text: None)
    assert (resolved.dtype, resolved.quantization, resolved.kernels) == ("float32", "none", "torch")
    [said] = caplog.messages
    assert "error: no header" in said
    with pytest.raises(ConfigError, match="error: no header"):
        _resolve_and_load_kernels(EngineConfig(quantization="gguf"), FACTS, lambda text: None)


def test_the_memory_plan_counts_what_is_kept() -> None:
    def size(**wish: Any) -> int:
        return resolve(EngineConfig(**wish), FACTS).weights_bytes

    assert size(dtype="float32") == 400_000
    assert size(dtype="bfloat16") == 200_000
    assert size(quantization="gguf") == 70_000
    assert size(quantization="int8") == 100_000 * 34 // 32
    assert size(quantization="int4") == (2 * 256 * 64 * 34 + (100_000 - 2 * 256 * 64) * 20) // 32
