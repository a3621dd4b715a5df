"""Mixtral and Qwen3-MoE: Llama's layers with experts behind attention.

They differ in what their configurations say (`architectures.py`): the experts' inner size, whether the shares of the
picked ones are scaled to one, layers that stay dense, and Qwen3's norms of queries and keys.
"""

from __future__ import annotations

import torch
from torch import nn

from sgl.kernels.registry import OpFacts
from sgl.runtime.models.decoder import DecoderForCausalLM, DecoderLayer
from sgl.runtime.models.experts import SparseMLP
from sgl.runtime.models.registry import ModelConfig, register_model


class MoELayer(DecoderLayer):
    """A pre-norm layer whose feed-forward block has experts, except where the configuration leaves it dense."""

    def feed_forward(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, facts: OpFacts) -> nn.Module:
        if config.experts is None or layer not in config.experts.layers:
            return super().feed_forward(config, layer, dtype=dtype, facts=facts)
        return SparseMLP(config, dtype=dtype, facts=facts)


@register_model("MixtralForCausalLM", "Qwen3MoeForCausalLM")
class MoEForCausalLM(DecoderForCausalLM):
    """The plain decoder with experts."""

    layer_class = MoELayer
