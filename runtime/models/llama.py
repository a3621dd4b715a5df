"""Llama and the checkpoints of its architecture (SmolLM2 among them).

A pre-norm decoder: grouped-query attention with rotary embedding, gated feed-forward, RMS norms. Parameters carry
Hugging Face's names. With `tie_word_embeddings` the head is the embedding table and has no parameter of its own.

Shapes: T tokens of the step, R rows of logits, N hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from sgl.errors import UnsupportedModel
from sgl.kernels.registry import OpFacts
from sgl.runtime.models.fused import fused_layers
from sgl.runtime.models.layers import Attention, Embedding, GatedMLP, Linear, RMSNorm, compute_alike, op_facts
from sgl.runtime.models.registry import ModelConfig, register_model
from sgl.runtime.models.rope import rotary
from sgl.runtime.numerics import Kernels

if TYPE_CHECKING:
    from sgl.runtime.model_runner import ForwardBatch, KVCache


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, facts: OpFacts) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, facts=facts)
        self.self_attn = Attention(config, layer, dtype=dtype, facts=facts)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, facts=facts)
        self.mlp = GatedMLP(config, dtype=dtype, facts=facts)

    def forward(
        self, x_TN: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], batch: ForwardBatch, cache: KVCache
    ) -> torch.Tensor:
        x_TN = x_TN + self.self_attn(self.input_layernorm(x_TN), angles, batch, cache)
        return x_TN + self.mlp(self.post_attention_layernorm(x_TN))


class LlamaModel(nn.Module):
    """Everything below the head."""

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, deterministic: bool, kernels: Kernels
    ) -> None:
        super().__init__()
        facts = op_facts(config, dtype, device, deterministic=deterministic, kernels=kernels)
        self.dtype = dtype
        self.fused = fused_layers(config, facts)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, dtype=dtype, facts=facts) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, facts=facts)
        self.rotary = rotary(config, device)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """Hidden states `[T, N]`, before the last norm."""
        x_TN = self.embed_tokens(batch.token_ids)
        angles = self.rotary.angles(batch.positions, self.dtype)
        if self.fused is not None:
            return self.fused(self.layers, x_TN, angles, batch, cache)
        for layer in self.layers:
            x_TN = layer(x_TN, angles, batch, cache)
        return x_TN


@register_model("LlamaForCausalLM")
class LlamaForCausalLM(nn.Module):
    """The model runner's view: a batch in, float32 logits of the wanted rows out.

    Args:
        dtype: of weights and activations.
        device: where the weights will be put by the loader; parameters stay on the meta device until then.
        deterministic: choose ops whose rows do not depend on what else is in the step.
        kernels: for `native` ones the loader packs the weights; these and `triton` ones compute all layers in one call.

    Raises:
        UnsupportedModel: an activation that is not known here.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool = False,
        kernels: Kernels = "torch",
    ) -> None:
        super().__init__()
        if config.hidden_act != "silu":
            raise UnsupportedModel(f"hidden_act is {config.hidden_act!r}", hint="supported is silu")
        self.vocab_size = config.vocab_size
        self.model = LlamaModel(config, dtype=dtype, device=device, deterministic=deterministic, kernels=kernels)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, is_head=True)
        )
        if deterministic:
            compute_alike(self)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """See `CausalLM`. Without wanted rows the head is not computed."""
        x_TN = self.model(batch, cache)
        if not len(batch.logit_rows):
            return torch.empty(0, self.vocab_size, dtype=torch.float32, device=x_TN.device)
        x_RN = self.model.norm(x_TN[batch.logit_rows])
        head = self.model.embed_tokens.project if self.lm_head is None else self.lm_head
        return head(x_RN).float()
