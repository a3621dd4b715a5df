"""The fields that are read of a `config.json`, their types and bounds.

Owns `Fields` in Hugging Face's names, which is also what `json_model_override_args` may replace and what GGUF metadata
are translated into. Read by `shapes` and, for what only some architectures have, by `models/architectures.py`. No torch
here; what is not a field is not looked at.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

# Bounds far above any model, and far below what would exhaust memory before a weight is read.
Size = Annotated[int, Meta(ge=1, le=2**24)]
Number = Annotated[int, Meta(ge=1, le=2**12)]
Tokens = Annotated[int, Meta(ge=1, le=2**31)]
Positive = Annotated[float, Meta(gt=0, lt=1e30)]
Finite = Annotated[float, Meta(gt=-1e30, lt=1e30)]
MAX_FACTORS = 2**12
Factors = Annotated[tuple[Positive, ...], Meta(max_length=MAX_FACTORS)]
PerLayer = Meta(max_length=2**12)

TOY_FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
"""Shape of the built-in `dummy` model; its vocabulary is the tokenizer's `Tokenizer.toy()`."""


class RopeFields(msgspec.Struct, kw_only=True):
    """`rope_scaling` or `rope_parameters` of a config."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    original_max_position_embeddings: Tokens | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    short_factor: Factors = ()
    long_factor: Factors = ()
    factors: Factors = ()
    partial_rotary_factor: Positive | None = None


class Fields(msgspec.Struct, kw_only=True):
    """What is read of a `config.json`. transformers 5 writes base and scaling of the rotary embedding as
    `rope_parameters`, earlier versions as `rope_theta` and `rope_scaling`. What some architectures take for set when a
    config leaves it out is `UNSET` then, and `None` where the config says `null`."""

    architectures: list[str] | None = None
    vocab_size: Size | None = None
    hidden_size: Size | None = None
    intermediate_size: Size | None = None
    num_hidden_layers: Number | None = None
    num_attention_heads: Number | None = None
    num_key_value_heads: Number | None = None
    head_dim: Number | None = None
    max_position_embeddings: Tokens | None = None
    original_max_position_embeddings: Tokens | None = None
    rms_norm_eps: Positive | None = None
    rope_theta: Positive | None = None
    rope_scaling: RopeFields | None = None
    rope_parameters: RopeFields | None = None
    partial_rotary_factor: Positive | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    attention_output_bias: bool | None = None
    mlp_bias: bool | None = None
    use_bias: bool | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    sliding_window: Size | UnsetType | None = UNSET
    use_sliding_window: bool | None = None
    use_bidirectional_attention: bool | None = None
    max_window_layers: Annotated[int, Meta(ge=0, le=2**12)] | None = None
    layer_types: Annotated[list[str], PerLayer] | None = None
    sliding_window_pattern: Number | None = None
    rope_local_base_freq: Positive | None = None
    no_rope_layers: Annotated[list[int], PerLayer] | None = None
    no_rope_layer_interval: Number | None = None
    query_pre_attn_scalar: Positive | None = None
    attn_logit_softcapping: Positive | UnsetType | None = UNSET
    final_logit_softcapping: Positive | UnsetType | None = UNSET
    num_experts: Number | None = None
    num_local_experts: Number | None = None
    num_experts_per_tok: Number | None = None
    moe_intermediate_size: Size | None = None
    norm_topk_prob: bool | None = None
    decoder_sparse_step: Number | None = None
    mlp_only_layers: Annotated[list[int], PerLayer] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: dict[str, Any] | None = None


class CompleteFields(Fields, kw_only=True):
    """`Fields` without which there is no model."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Number
    num_attention_heads: Number
    max_position_embeddings: Tokens = 2048
    own: dict[str, Finite] = {}
    """`Architecture.own`, gathered from the config beside the fields that all may have."""

    def softcap(self, name: str, default: float) -> float:
        """The soft cap in field `name`; 0 where the config says that there is none."""
        value = getattr(self, name)
        return default if value is UNSET else value or 0.0
