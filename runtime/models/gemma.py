"""Gemma 2 and Gemma 3 (text).

What is different from Llama: norms in front of and behind both blocks of a layer, weights of norms that mean `1 + w`
(the loader adds the one) and are applied in float32, an embedding scaled by the root of the hidden size, layers that
look at a window between layers that look at everything. Gemma 2 bounds scores and logits; Gemma 3 norms each head's
query and key, and gives layers with a window a rotary table of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from sgl.kernels.registry import OpFacts
from sgl.runtime.models.decoder import DecoderForCausalLM
from sgl.runtime.models.layers import Angles, Attention, GatedMLP, RMSNorm
from sgl.runtime.models.registry import ModelConfig, register_model

if TYPE_CHECKING:
    from sgl.runtime.model_runner import ForwardBatch, KVCache

_NORM_DTYPE = torch.float32


class GemmaLayer(nn.Module):
    """Attention and feed-forward, each between two norms and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, facts: OpFacts) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=_NORM_DTYPE, facts=facts)

        self.input_layernorm = norm()
        self.self_attn = Attention(config, layer, dtype=dtype, facts=facts, norm_dtype=_NORM_DTYPE)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = GatedMLP(config, dtype=dtype, facts=facts)
        self.post_feedforward_layernorm = norm()

    def forward(
        self, x_TN: torch.Tensor, angles: Sequence[Angles], batch: ForwardBatch, cache: KVCache
    ) -> torch.Tensor:
        mixed_TN = self.self_attn(self.input_layernorm(x_TN), angles, batch, cache)
        x_TN = x_TN + self.post_attention_layernorm(mixed_TN)
        return x_TN + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x_TN)))


@register_model("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
class GemmaForCausalLM(DecoderForCausalLM):
    """Gemma's layers between a scaled embedding and, in Gemma 2, bounded logits."""

    layer_class = GemmaLayer
    norm_dtype = _NORM_DTYPE

    def embedding_scale(self, config: ModelConfig) -> float:
        return config.hidden_size**0.5
