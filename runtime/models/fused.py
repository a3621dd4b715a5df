"""All decoder layers of a model in one call: of the native kernels here, of Triton's in `triton_layers`.

Owns the choice, and the translation of layers (`models/layers.py`) whose weights are packed into the kernels'
description of a decoder, made at the first step, when the KV pool is known. Layers may have biases; norms of queries
and keys where the attention has them as `q_norm` and `k_norm`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sgl.errors import InternalError
from sgl.kernels.native.decoder import Decoder, LayerWeights
from sgl.kernels.native.ops import NativePlan
from sgl.kernels.native.weights import PackedWeight
from sgl.kernels.registry import OpFacts
from sgl.runtime.models import triton_layers
from sgl.runtime.models.registry import ModelConfig

if TYPE_CHECKING:
    from sgl.runtime.model_runner import ForwardBatch, KVCache


class FusedLayers(Protocol):
    """All decoder layers in one call."""

    def __call__(
        self,
        layers: Iterable[Any],
        x_TN: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        cache: KVCache,
    ) -> torch.Tensor:
        """`x` after the last layer; `x` itself may be changed."""


def fused_layers(config: ModelConfig, facts: OpFacts) -> FusedLayers | None:
    """What computes the layers of a model in one call; `None` when they are computed op by op."""
    if obstacle(config) is not None:
        return None
    if facts.native:
        return NativeLayers(config)
    if facts.triton and triton_layers.obstacle(config) is None:
        return triton_layers.TritonLayers(config, deterministic=facts.deterministic)
    return None


def obstacle(config: ModelConfig) -> str | None:
    """Why a model of plain layers cannot be computed in one call, of whichever kernels; `None` when it can."""
    if config.longest_window or config.attention_softcap:
        return "it attends with the whole context, and without soft caps"
    if config.unrotated_layers or config.local_rope_theta is not None:
        return "it rotates all layers alike"
    if config.hidden_act != "silu":
        return "its activation is silu"
    return None


class NativeLayers:
    """Runs a stack of pre-norm decoder layers over one KV pool."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._decoder: Decoder | None = None
        self._cache: KVCache | None = None

    def __call__(
        self,
        layers: Iterable[Any],
        x_TN: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        cache: KVCache,
    ) -> torch.Tensor:
        """`x` after the last layer, in its own memory."""
        if self._decoder is None or self._cache is not cache:
            config = self._config
            self._cache = cache
            self._decoder = Decoder(
                [_weights(layer) for layer in layers],
                cache.layer,
                num_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                page_size=cache.page_size,
                eps=config.rms_norm_eps,
                scale=config.scale,
            )
        plan = batch.attention
        if not isinstance(plan, NativePlan):
            raise InternalError("a native model was given another attention's plan")
        return self._decoder.forward(x_TN, angles, plan)


def _weights(layer: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    return LayerWeights(
        attention_norm=layer.input_layernorm.weight,
        query=_packed(attention.q_proj),
        key=_packed(attention.k_proj),
        value=_packed(attention.v_proj),
        output=_packed(attention.o_proj),
        feed_forward_norm=layer.post_attention_layernorm.weight,
        gate=_packed(mlp.gate_proj),
        up=_packed(mlp.up_proj),
        down=_packed(mlp.down_proj),
        query_norm=_norm(attention, "q_norm"),
        key_norm=_norm(attention, "k_norm"),
    )


def _packed(linear: Any) -> PackedWeight:
    packed = linear.packed
    if not isinstance(packed, PackedWeight):
        raise InternalError("a layer of a native model has no packed weights")
    return packed


def _norm(attention: Any, name: str) -> torch.Tensor | None:
    norm = getattr(attention, name, None)
    return None if norm is None else norm.weight
