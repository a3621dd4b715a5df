"""The architectures that come with sgl: one entry each, read before torch is imported.

Owns what a configuration of each says beyond the plain decoder's fields, and how its checkpoints name and pack their
weights. Loaded by `registry.architectures`. Layers are in the module that an entry names; `tutorials/adding_a_model.md`
shows how a new one comes here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from sgl.errors import UnsupportedModel
from sgl.runtime.models.registry import Architecture, Experts, register_architecture

if TYPE_CHECKING:
    from sgl.runtime.loading.fields import CompleteFields

_LLAMA = "sgl.runtime.models.llama"
_GEMMA = "sgl.runtime.models.gemma"
_MOE = "sgl.runtime.models.moe"
_BERT = "sgl.runtime.models.bert"

_LOCAL = "sliding_attention"
"""Of `layer_types`: layers with a window."""
_DEFAULT_WINDOW = 4096
"""Where a config of Mistral or Gemma does not name it; `null` there means none."""


def _windows(fields: CompleteFields, is_local: list[bool] | bool, default: int | None = None) -> tuple[int, ...]:
    """The window of each layer: `layer_types` says which have one, else `is_local`."""
    window = default if fields.sliding_window is UNSET else fields.sliding_window
    if not window:
        return ()
    if fields.layer_types is not None:
        is_local = [kind == _LOCAL for kind in _per_layer(fields, "layer_types")]
    elif isinstance(is_local, bool):
        is_local = [is_local] * fields.num_hidden_layers
    return tuple(window if local else 0 for local in is_local)


def _per_layer(fields: CompleteFields, name: str) -> list[Any]:
    """A list with an entry for each layer; those of layers that an override has cut off are left out."""
    given: list[Any] = getattr(fields, name)
    if len(given) < fields.num_hidden_layers:
        raise UnsupportedModel(
            f"{name} has {len(given)} entries for {fields.num_hidden_layers} layers",
            hint=f"give {name} one entry for each layer",
        )
    return given[: fields.num_hidden_layers]


def _llama(fields: CompleteFields) -> dict[str, Any]:
    output_bias = fields.attention_output_bias
    return {"output_bias": bool(fields.attention_bias) if output_bias is None else output_bias}


def _mistral(fields: CompleteFields) -> dict[str, Any]:
    return {"windows": _windows(fields, True, _DEFAULT_WINDOW)}


def _qwen(fields: CompleteFields) -> dict[str, Any]:
    """Windows are off unless said otherwise, and then begin above a layer."""
    if not fields.use_sliding_window:
        return {}
    first = fields.num_hidden_layers if fields.max_window_layers is None else fields.max_window_layers
    return {"windows": _windows(fields, [layer >= first for layer in range(fields.num_hidden_layers)])}


def _qwen2(fields: CompleteFields) -> dict[str, Any]:
    return {**_qwen(fields), "attention_bias": True}


def _qwen3(fields: CompleteFields) -> dict[str, Any]:
    return {**_qwen(fields), **_llama(fields), "qk_norm": True}


def _qwen3_moe(fields: CompleteFields) -> dict[str, Any]:
    step, dense = fields.decoder_sparse_step or 1, fields.mlp_only_layers or []
    windows = _windows(fields, True) if fields.use_sliding_window else ()
    return {
        **_llama(fields),
        "qk_norm": True,
        "windows": windows,
        "experts": _experts(
            fields,
            inner_size=fields.moe_intermediate_size or 0,
            normalized=bool(fields.norm_topk_prob),
            layers=tuple(
                layer for layer in range(fields.num_hidden_layers) if layer not in dense and not (layer + 1) % step
            ),
        ),
    }


def _mixtral(fields: CompleteFields) -> dict[str, Any]:
    every = tuple(range(fields.num_hidden_layers))
    return {
        "windows": _windows(fields, True),
        "experts": _experts(fields, inner_size=fields.intermediate_size, normalized=True, layers=every),
    }


def _experts(fields: CompleteFields, *, inner_size: int, normalized: bool, layers: tuple[int, ...]) -> Experts:
    count = fields.num_local_experts or fields.num_experts or 0
    per_token = fields.num_experts_per_tok or 0
    if not (0 < per_token <= count and inner_size > 0):
        raise UnsupportedModel(
            f"no possible model: {per_token} of {count} experts for each token, of {inner_size} inner features",
            hint="give num_experts, num_experts_per_tok and moe_intermediate_size",
        )
    return Experts(count=count, per_token=per_token, inner_size=inner_size, normalized=normalized, layers=layers)


def _phi3(fields: CompleteFields) -> dict[str, Any]:
    return {"windows": _windows(fields, True)}


def _smollm3(fields: CompleteFields) -> dict[str, Any]:
    """`no_rope_layers` is 0 for layers without rotation; only these may have a window."""
    layers, interval = range(fields.num_hidden_layers), fields.no_rope_layer_interval or 4
    rotates = [(layer + 1) % interval for layer in layers]
    if fields.no_rope_layers is not None:
        rotates = _per_layer(fields, "no_rope_layers")
    unrotated = tuple(layer for layer in layers if not rotates[layer])
    windows = _windows(fields, [layer in unrotated for layer in layers]) if fields.use_sliding_window else ()
    return {
        **_llama(fields),
        "unrotated_layers": unrotated,
        "windows": windows,
        "tie_word_embeddings": fields.tie_word_embeddings is not False,
    }


def _ernie(fields: CompleteFields) -> dict[str, Any]:
    biases = {"attention_bias": bool(fields.attention_bias), "output_bias": bool(fields.attention_output_bias)}
    if fields.use_bias:
        biases = {"attention_bias": True, "output_bias": True, "mlp_bias": True}
    return {**biases, "tie_word_embeddings": fields.tie_word_embeddings is not False}


def _gemma(fields: CompleteFields, pattern: int) -> dict[str, Any]:
    """One layer of `pattern` sees everything, the last of each run."""
    if fields.use_bidirectional_attention:
        raise UnsupportedModel("use_bidirectional_attention is set: the model is an encoder", hint="use a decoder")
    is_local = [(layer + 1) % pattern != 0 for layer in range(fields.num_hidden_layers)]
    return {
        **_llama(fields),
        "windows": _windows(fields, is_local, _DEFAULT_WINDOW),
        "attention_scale": (fields.query_pre_attn_scalar or 256.0) ** -0.5,
        "tie_word_embeddings": fields.tie_word_embeddings is not False,
        "hidden_act": fields.hidden_activation or "gelu_pytorch_tanh",
    }


def _gemma2(fields: CompleteFields) -> dict[str, Any]:
    return {
        **_gemma(fields, 2),
        "attention_softcap": fields.softcap("attn_logit_softcapping", 50.0),
        "logit_softcap": fields.softcap("final_logit_softcapping", 30.0),
    }


def _gemma3(fields: CompleteFields) -> dict[str, Any]:
    return {
        **_gemma(fields, fields.sliding_window_pattern or 6),
        "attention_softcap": fields.softcap("attn_logit_softcapping", 0.0),
        "logit_softcap": fields.softcap("final_logit_softcapping", 0.0),
        "qk_norm": True,
        "rope_theta": fields.rope_theta or 1e6,
        "local_rope_theta": fields.rope_local_base_freq or 10000.0,
    }


for _architecture in (
    Architecture(name="LlamaForCausalLM", module=_LLAMA, read=_llama, gguf="llama", gguf_pairs=True),
    Architecture(name="MistralForCausalLM", module=_LLAMA, read=_mistral),
    Architecture(name="Qwen2ForCausalLM", module=_LLAMA, read=_qwen2, gguf="qwen2"),
    Architecture(name="Qwen3ForCausalLM", module=_LLAMA, read=_qwen3, gguf="qwen3"),
    Architecture(name="SmolLM3ForCausalLM", module=_LLAMA, read=_smollm3, gguf="smollm3", gguf_pairs=True),
    Architecture(name="Ernie4_5ForCausalLM", module=_LLAMA, read=_ernie, gguf="ernie4_5", pairs=True, gguf_pairs=True),
    Architecture(
        name="Phi3ForCausalLM",
        module=_LLAMA,
        read=_phi3,
        gguf="phi3",
        fused={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
    ),
    Architecture(name="Gemma2ForCausalLM", module=_GEMMA, read=_gemma2, gguf="gemma2", norm_offset=1.0),
    Architecture(name="Gemma3ForCausalLM", module=_GEMMA, read=_gemma3, gguf="gemma3", norm_offset=1.0),
    Architecture(  # with images, which are not looked at here
        name="Gemma3ForConditionalGeneration",
        module=_GEMMA,
        read=_gemma3,
        text_config="text_config",
        defaults={
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
        },
        renamed={"model.language_model.": "model.", "language_model.model.": "model."},
        ignored=tuple(
            f"{prefix}{part}." for prefix in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
        ),
        norm_offset=1.0,
    ),
    Architecture(name="Qwen3MoeForCausalLM", module=_MOE, read=_qwen3_moe, gguf="qwen3moe"),
    Architecture(
        name="MixtralForCausalLM",
        module=_MOE,
        read=_mixtral,
        gguf="llama",
        gguf_pairs=True,
        renamed={".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."},
    ),
    Architecture(name="BertModel", module=_BERT, kind="encoder"),
    Architecture(name="BertForSequenceClassification", module=_BERT, kind="encoder"),
):
    register_architecture(_architecture)
