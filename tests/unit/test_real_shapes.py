"""Configurations as the makers of well-known models publish them: read, and counted against the published number of
parameters. Models are made without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sgl.errors import UnsupportedModel
from sgl.runtime.loading.gguf_config import config_from_gguf
from sgl.runtime.loading.shapes import model_config
from sgl.runtime.models.registry import ModelConfig, architectures, parameter_sizes

PLAIN: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 1e6}
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "Mistral-7B-v0.1": (
        7_241_732_096,
        {
            "architectures": ["MistralForCausalLM"],
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
        },
    ),
    "Qwen2-0.5B": (
        494_032_768,
        {
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 131072,
            "max_window_layers": 24,
            "sliding_window": 131072,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3-0.6B": (
        596_049_920,
        {
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "attention_bias": False,
            "sliding_window": None,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
        },
    ),
    "SmolLM3-3B": (
        3_075_098_624,
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 65536,
            "no_rope_layer_interval": 4,
        },
    ),
    "ERNIE-4.5-0.3B": (
        360_748_032,
        {
            "architectures": ["Ernie4_5ForCausalLM"],
            "vocab_size": 103424,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 18,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "use_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "Phi-3-mini-4k": (
        3_821_079_552,
        {
            "architectures": ["Phi3ForCausalLM"],
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "sliding_window": 2047,
            "tie_word_embeddings": False,
        },
    ),
    "Phi-4-mini": (
        3_836_021_760,
        {
            "architectures": ["Phi3ForCausalLM"],
            "vocab_size": 200064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "sliding_window": 262144,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope", "long_factor": [2.0] * 48, "short_factor": [1.0] * 48},
            "tie_word_embeddings": True,
        },
    ),
    "gemma-2-2b": (
        2_614_341_888,
        {
            "architectures": ["Gemma2ForCausalLM"],
            "vocab_size": 256000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "gemma-3-1b": (
        999_885_952,
        {
            "architectures": ["Gemma3ForCausalLM"],
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "max_position_embeddings": 32768,
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "gemma-3-4b": (  # its text; what the config leaves out is transformers' default
        4_300_079_472 - 416_866_032 - 2_950_272,  # without what sees, and what makes tokens of it
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        },
    ),
    "Mixtral-8x7B": (
        46_702_792_704,
        {
            "architectures": ["MixtralForCausalLM"],
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32768,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
    ),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
        },
    ),
}


def read(name: str, **changes: Any) -> ModelConfig:
    return model_config({**PLAIN, **MODELS[name][1], **changes}, Path(name), {})


@pytest.mark.parametrize("name", MODELS)
def test_published_numbers_of_parameters(name: str) -> None:
    assert sum(parameter_sizes(read(name))) == MODELS[name][0]


def test_windows() -> None:
    assert read("Mistral-7B-v0.1").windows == (4096,) * 32
    assert read("Mistral-7B-v0.1", sliding_window=None).windows == ()
    assert read("Qwen2-0.5B").windows == ()
    assert read("Qwen2-0.5B", use_sliding_window=True, max_window_layers=20).windows == (0,) * 20 + (131072,) * 4
    assert read("gemma-2-2b").windows == (4096, 0) * 13
    assert read("gemma-3-1b").windows == ((512,) * 5 + (0,)) * 4 + (512,) * 2
    assert read("gemma-3-1b", layer_types=["full_attention"] * 26).windows == (0,) * 26
    with pytest.raises(UnsupportedModel, match="layer_types has 2 entries for 26 layers"):
        read("gemma-3-1b", layer_types=["full_attention"] * 2)


def test_a_window_as_long_as_the_context_is_none() -> None:
    """So that kernels without windows are chosen where they do no harm."""
    config = read("Phi-4-mini")
    assert (config.windows[0], config.longest_window) == (262144, 0)
    assert read("Phi-3-mini-4k").longest_window == 2047


def test_what_else_is_particular() -> None:
    assert read("SmolLM3-3B").unrotated_layers == tuple(range(3, 36, 4))
    assert read("SmolLM3-3B", no_rope_layers=[1, 0] * 18).unrotated_layers == tuple(range(1, 36, 2))
    assert read("SmolLM3-3B").tie_word_embeddings
    assert not read("SmolLM3-3B", tie_word_embeddings=False).tie_word_embeddings
    assert read("Phi-4-mini").rotary_dim == 96
    gemma = read("gemma-2-2b")
    assert (gemma.scale, gemma.attention_softcap, gemma.logit_softcap) == (1 / 16, 50.0, 30.0)
    assert read("gemma-2-2b", attn_logit_softcapping=None).attention_softcap == 0.0
    moe = read("Qwen3-30B-A3B", mlp_only_layers=[0], decoder_sparse_step=2)
    assert moe.experts is not None
    assert moe.experts.layers == tuple(range(1, 48, 2))
    with pytest.raises(UnsupportedModel, match="9 of 8 experts"):
        read("Mixtral-8x7B", num_experts_per_tok=9)


class Header:
    """What is read of a GGUF file's header."""

    path = Path("model.gguf")

    def __init__(self, kind: str, **metadata: Any) -> None:
        shape = {"embedding_length": 4608, "attention.head_count": 32, "attention.key_length": 128, "block_count": 46}
        shape |= {"feed_forward_length": 36864, "attention.head_count_kv": 16, "context_length": 8192}
        self.metadata = {"general.architecture": kind}
        self.metadata |= {f"{kind}.{key}": value for key, value in {**shape, **metadata}.items()}
        self.tensors = {"token_embd.weight": type("Info", (), {"shape": (256000, 4608), "type_name": "Q8_0"})()}


def from_gguf(kind: str, **metadata: Any) -> ModelConfig:
    return config_from_gguf(Header(kind, **metadata), {})  # type: ignore[arg-type]


def test_constants_that_the_gguf_format_has_no_key_for() -> None:
    """As llama.cpp holds them: Gemma's query scale of the 27B sizes, windows and layers without rotation by pattern."""
    large = from_gguf("gemma2", **{"attention.sliding_window": 4096})
    assert large.scale == pytest.approx((4608 / 32) ** -0.5)
    assert large.windows == (4096, 0) * 23
    assert from_gguf("gemma2", block_count=42).scale == pytest.approx(128**-0.5)
    pattern = [True, False] * 23
    listed = from_gguf("gemma3", **{"attention.sliding_window": 512, "attention.sliding_window_pattern": pattern})
    assert listed.windows == (512, 0) * 23
    assert from_gguf("smollm3").unrotated_layers == tuple(range(3, 46, 4))
    moe = from_gguf("llama", expert_count=8, expert_used_count=2)
    assert (moe.architecture, moe.experts and moe.experts.normalized) == ("MixtralForCausalLM", True)
    with pytest.raises(UnsupportedModel, match=r"'qwen4'.*the nearest is qwen3; supported are ernie4_5, gemma2"):
        from_gguf("qwen4")


def test_the_page_lists_every_decoder(root: Path) -> None:
    """With the length of its file."""
    page = (root / "runtime" / "README.md").read_text(encoding="utf-8")
    for name, architecture in architectures().items():
        if architecture.kind == "decoder":
            assert f"| `{name}`" in page
            file = root / "runtime" / "models" / f"{architecture.module.rpartition('.')[2]}.py"
            lines = len(file.read_text(encoding="utf-8").splitlines())
            assert f"`{file.name}`, {lines} lines" in page
            assert lines < 200
