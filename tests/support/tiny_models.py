"""Random tiny models of every architecture, made by transformers with the ratios of a real one.

`SHAPES` holds their configurations; `write_folder` saves one as its makers would, `write_gguf` as llama.cpp's converter
would, under the names of the `gguf` package's own tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from sgl.runtime.models.registry import architectures

VOCAB_SIZE = 96
CONTEXT_LEN = 96
_WINDOW = 16

SHAPES: dict[str, dict[str, Any]] = {
    # name: class of transformers and what differs from the plain shape; after which model.
    "llama": {  # Llama-3.2-1B
        "architecture": "Llama",
        "num_attention_heads": 8,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        },
        "tie_word_embeddings": True,
    },
    "mistral": {"architecture": "Mistral", "num_attention_heads": 8, "sliding_window": _WINDOW},  # 7B v0.1
    "qwen2": {  # 0.5B
        "architecture": "Qwen2",
        "hidden_size": 56,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "qwen2-window": {  # 7B, with the window that its makers left off
        "architecture": "Qwen2",
        "use_sliding_window": True,
        "sliding_window": _WINDOW,
        "max_window_layers": 1,
    },
    "qwen3": {  # 0.6B
        "architecture": "Qwen3",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "tie_word_embeddings": True,
    },
    "smollm3": {  # 3B
        "architecture": "SmolLM3",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "tie_word_embeddings": True,
    },
    "ernie4.5": {  # 0.3B, with the biases that its makers left off
        "architecture": "Ernie4_5",
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "use_bias": True,
        "tie_word_embeddings": True,
    },
    "phi3": {  # mini-128k
        "architecture": "Phi3",
        "hidden_size": 48,
        "num_key_value_heads": 4,
        "original_max_position_embeddings": 8,
        "sliding_window": _WINDOW,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.02, 1.05, 1.1, 1.3, 1.5],
            "long_factor": [1.1, 1.5, 2.0, 3.0, 4.0, 4.0],
        },
    },
    "phi4-mini": {  # rotates a part of each head
        "architecture": "Phi3",
        "num_attention_heads": 3,
        "hidden_size": 48,
        "num_key_value_heads": 1,
        "original_max_position_embeddings": 8,
        "partial_rotary_factor": 0.75,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.02, 1.05, 1.1, 1.3, 1.5],
            "long_factor": [1.1, 1.5, 2.0, 3.0, 4.0, 4.0],
        },
        "tie_word_embeddings": True,
    },
    "gemma2": {  # 2B, the query scale of 27B, and caps that are felt
        "architecture": "Gemma2",
        "hidden_size": 72,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "query_pre_attn_scalar": 9,
        "sliding_window": _WINDOW,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {  # 1B; one layer in three sees everything
        "architecture": "Gemma3",
        "config": "Gemma3TextConfig",
        "hidden_size": 72,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": _WINDOW,
        "sliding_window_pattern": 3,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "qwen3-moe": {  # 30B-A3B
        "architecture": "Qwen3Moe",
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "qwen3-moe-mixed": {  # a dense layer between sparse ones, shares as they are
        "architecture": "Qwen3Moe",
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [1],
    },
    "mixtral": {  # 8x7B
        "architecture": "Mixtral",
        "num_attention_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
_PLAIN = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LEN,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


def make_model(name: str, **changes: Any) -> Any:
    """A random model of transformers, with `changes` of its shape.

    Norms and biases are random too: where they are ones and zeros, mistakes hide.
    """
    import transformers

    shape = dict(SHAPES[name])
    architecture = shape.pop("architecture")
    config = getattr(transformers, shape.pop("config", f"{architecture}Config"))(**{**_PLAIN, **shape, **changes})
    config._attn_implementation = "eager"  # the only one that knows soft caps
    torch.manual_seed(11)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def write_folder(folder: Path, model: Any) -> None:
    """As its makers publish it, in several files."""
    model.save_pretrained(folder, max_shard_size="60KB")


def write_gguf(path: Path, model: Any) -> None:
    """As llama.cpp's converter writes it, in float32."""
    config = model.config
    kind = _gguf_kind(model)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    _write_metadata(writer, config, kind)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, value in _converted(model, kind):
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        writer.add_tensor(theirs, np.ascontiguousarray(value.float().numpy()))
    scaling = _full_rope(config)
    for part in ("long", "short"):
        if factors := scaling.get(f"{part}_factor"):
            writer.add_tensor(f"rope_factors_{part}.weight", np.array(factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def has_gguf(name: str) -> bool:
    """Whether there are GGUF files of the architecture, by its entry."""
    return bool(architectures()[f"{SHAPES[name]['architecture']}ForCausalLM"].gguf)


def _gguf_kind(model: Any) -> Any:
    kinds = {kind_name: kind for kind, kind_name in gguf.MODEL_ARCH_NAMES.items()}
    return kinds[architectures()[type(model).__name__].gguf]


def _full_rope(config: Any) -> dict[str, Any]:
    rope: dict[str, Any] = config.rope_parameters
    return rope.get("full_attention", rope)


def _write_metadata(writer: gguf.GGUFWriter, config: Any, kind: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = _full_rope(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if original := rope.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    ):
        writer.add_rope_scaling_orig_ctx_len(original)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if experts := getattr(config, "num_local_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if kind == gguf.MODEL_ARCH.QWEN3MOE:
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "gemma3_text":  # a key of newer files
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 3)


_PAIRED = (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.SMOLLM3)


def _converted(model: Any, kind: Any) -> list[tuple[str, torch.Tensor]]:
    """The model's tensors as a converter changes them: experts together, rows of heads in pairs, `1 + w`."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = []
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        part = name.split(".")[-2]
        if kind in _PAIRED and part in heads:
            value = value.reshape(heads[part], 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        if "gemma" in config.model_type and name.endswith("norm.weight"):
            value = value + 1
        name = name.replace("block_sparse_moe", "mlp")
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            gate, up = value.chunk(2, dim=1)
            found += [(f"{stem}gate_proj.weight", gate), (f"{stem}up_proj.weight", up)]
        else:
            found.append((name + ".weight" if name.endswith("experts.down_proj") else name, value))
    return found
