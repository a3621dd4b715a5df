"""What the metadata of a GGUF file say about its model, in the names of a `config.json`.

Owns the translation of keys, for all architectures alike where the format has one key for one thing. Called by
`checkpoint`. What llama.cpp holds as constants of an architecture is filled in by the architecture's own reading.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from sgl.errors import CorruptModel, UnsupportedModel
from sgl.runtime.loading.fields import MAX_FACTORS
from sgl.runtime.loading.gguf_reader import GGUFFile
from sgl.runtime.loading.shapes import model_config
from sgl.runtime.models.registry import Architecture, ModelConfig, architectures

_GGUF_DTYPES = {"F16": "float16", "BF16": "bfloat16"}
GGUF_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong to the rotary embedding's configuration, not to the weights."""


def config_from_gguf(file: GGUFFile, override: Mapping[str, Any]) -> ModelConfig:
    """The model of a GGUF file. Raises as `model_config`."""
    kind = str(file.metadata.get("general.architecture"))
    has_experts = bool(file.metadata.get(f"{kind}.expert_count"))
    architecture = _architecture(file, kind, has_experts=has_experts)
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise CorruptModel(f"{file.path} lacks tensor token_embd.weight", hint="fetch the file again")

    def value(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{kind}.{key}", default)

    hidden, heads = value("embedding_length"), value("attention.head_count")
    head_dim = value("attention.key_length")
    if head_dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        head_dim = hidden // heads
    types = {info.type_name for info in file.tensors.values() if len(info.shape) > 1}
    fields = {
        "architectures": [architecture.name],
        "vocab_size": table.shape[0],
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": value("rope.freq_base"),
        "rope_local_base_freq": value("rope.freq_base_swa"),
        "rope_scaling": _gguf_scaling(file, kind),
        "partial_rotary_factor": _share(value("rope.dimension_count"), head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "attention_output_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "sliding_window": value("attention.sliding_window"),
        "use_sliding_window": value("attention.sliding_window") is not None,
        **_pattern(value("attention.sliding_window_pattern")),
        "attn_logit_softcapping": value("attn_logit_softcapping"),
        "final_logit_softcapping": value("final_logit_softcapping"),
        "query_pre_attn_scalar": _query_scalar(kind, hidden, heads, head_dim, value("block_count")),
        "dtype": _GGUF_DTYPES.get(types.pop(), "float32") if len(types) == 1 else "float32",
    }
    if has_experts:
        fields |= {
            "num_local_experts": value("expert_count"),
            "num_experts_per_tok": value("expert_used_count"),
            "moe_intermediate_size": value("expert_feed_forward_length"),
            "norm_topk_prob": value("expert_weights_norm", True),
        }
    return model_config({key: given for key, given in fields.items() if given is not None}, file.path, override)


def _architecture(file: GGUFFile, kind: str, *, has_experts: bool) -> Architecture:
    """The one that writes such files; the format calls Mixtral a Llama that has experts."""
    known = [architecture for architecture in architectures().values() if architecture.gguf]
    if kind == "llama" and has_experts:
        return next(architecture for architecture in known if architecture.name == "MixtralForCausalLM")
    for architecture in known:
        if architecture.gguf == kind:
            return architecture
    kinds = sorted({architecture.gguf for architecture in known})
    near = difflib.get_close_matches(kind, kinds, n=1)
    raise UnsupportedModel(
        f"{file.path} is of GGUF architecture {kind!r}",
        hint=(f"the nearest is {near[0]}; " if near else "") + f"supported are {', '.join(kinds)}",
    )


def _pattern(given: Any) -> dict[str, Any]:
    """Which layers have a window: one in so many has none, or a truth value for each layer."""
    if isinstance(given, list):
        return {"layer_types": ["sliding_attention" if is_local else "full_attention" for is_local in given]}
    return {"sliding_window_pattern": given}


def _share(rotated: Any, head_dim: Any) -> float | None:
    """Of a head's features that are rotated; `None` for all, and where the file is of the wrong type."""
    if not isinstance(rotated, int) or not isinstance(head_dim, int) or head_dim < 1 or rotated == head_dim:
        return None
    return rotated / head_dim


_GEMMAS = ("gemma2", "gemma3")
_GEMMAS_OF_27B = (46, 62)
"""Layers of the sizes whose queries are scaled by another number than a head's size: llama.cpp tells them by that."""


def _query_scalar(kind: str, hidden: Any, heads: Any, head_dim: Any, num_layers: Any) -> Any:
    """Gemma's `query_pre_attn_scalar`, which the format has no key for."""
    if kind not in _GEMMAS:
        return None
    if num_layers in _GEMMAS_OF_27B and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        return hidden / heads
    return head_dim


def _gguf_scaling(file: GGUFFile, kind: str) -> dict[str, Any] | None:
    """`rope.scaling.*` and the factor tensors of a GGUF file, in Hugging Face's names."""

    def value(key: str) -> Any:
        return file.metadata.get(f"{kind}.rope.{key}")

    found = [file.tensors[name] for name in GGUF_ROPE_TENSORS if name in file.tensors]
    for info in found:
        if len(info.shape) != 1 or info.shape[0] > MAX_FACTORS:  # before it is read: a file may claim anything
            raise CorruptModel(
                f"tensor {info.name} of {file.path} has shape {info.shape}; expected one number per frequency",
                hint="fetch the file again",
            )
    tensors = {info.name: tuple(file.load(info.name).tolist()) for info in found}
    linear = value("scale_linear")  # how old files say it
    rope_type = value("scaling.type") or ("linear" if linear not in (None, 1.0) else "none")
    scaling = {
        "rope_type": rope_type,
        "factor": value("scaling.factor") or linear,
        "original_max_position_embeddings": value("scaling.original_context_length"),
        "beta_fast": value("scaling.yarn_beta_fast"),
        "beta_slow": value("scaling.yarn_beta_slow"),
    }
    if "rope_factors_long.weight" in tensors:
        return {
            **scaling,
            "rope_type": "longrope",
            "long_factor": tensors["rope_factors_long.weight"],
            "short_factor": tensors.get("rope_factors_short.weight", ()),
            "attention_factor": value("scaling.attn_factor"),
        }
    if "rope_freqs.weight" in tensors:
        if rope_type not in ("none", "linear"):
            raise UnsupportedModel(
                f"{file.path} has both rope_freqs.weight and rope scaling {rope_type!r}",
                hint="convert the model again without one of them",
            )
        return {"rope_type": "factors", "factor": scaling["factor"], "factors": tensors["rope_freqs.weight"]}
    return None if rope_type == "none" else scaling
