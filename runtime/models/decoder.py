"""The decoder that model files are variations of: embedding, layers, norm, head.

Owns the pass over the layers and the pre-norm layer itself, which Llama and its relatives share as it is. A model file
derives from `DecoderForCausalLM` and says what is different: another `layer_class`, a scale of the embedding, norms in
another dtype. Parameters carry Hugging Face's names. With `tie_word_embeddings` the head is the embedding table and has
no parameter of its own.

Shapes: T tokens of the step, R rows of logits, N hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from sgl.kernels.registry import OpFacts
from sgl.runtime.models.fused import fused_layers
from sgl.runtime.models.layers import Angles, Attention, Embedding, GatedMLP, Linear, RMSNorm, compute_alike, op_facts
from sgl.runtime.models.registry import ModelConfig
from sgl.runtime.models.rope import rotary_tables
from sgl.runtime.models.triton_layers import product
from sgl.runtime.numerics import Kernels

if TYPE_CHECKING:
    from sgl.runtime.model_runner import ForwardBatch, KVCache


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, facts: OpFacts) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, facts=facts)
        self.self_attn = self.attention(config, layer, dtype=dtype, facts=facts)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, facts=facts)
        self.mlp = self.feed_forward(config, layer, dtype=dtype, facts=facts)

    def attention(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, facts: OpFacts) -> nn.Module:
        """The block that looks at other tokens; called as `Attention` is."""
        return Attention(config, layer, dtype=dtype, facts=facts)

    def feed_forward(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, facts: OpFacts) -> nn.Module:
        """The block behind attention, `[T, N]` to `[T, N]`."""
        return GatedMLP(config, dtype=dtype, facts=facts)

    def forward(
        self, x_TN: torch.Tensor, angles: Sequence[Angles], batch: ForwardBatch, cache: KVCache
    ) -> torch.Tensor:
        """The residual stream `[T, N]` after this layer."""
        x_TN = x_TN + self.self_attn(self.input_layernorm(x_TN), angles, batch, cache)
        return x_TN + self.mlp(self.post_attention_layernorm(x_TN))


class Decoder(nn.Module):
    """Everything below the head.

    Args:
        layer_class: made for each layer as `layer_class(config, layer, dtype=..., facts=...)`.
        embedding_scale: what the embedding's rows are multiplied by.
        norm_dtype: of the last norm.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_class: type[nn.Module],
        *,
        dtype: torch.dtype,
        device: torch.device,
        facts: OpFacts,
        embedding_scale: float,
        norm_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.fused = fused_layers(config, facts) if layer_class is DecoderLayer else None
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        # Rounded as the rows are, so that 16-bit products are those of the checkpoint's makers.
        self.embedding_scale = float(torch.tensor(embedding_scale, dtype=dtype))
        self.layers = nn.ModuleList(
            layer_class(config, layer, dtype=dtype, facts=facts) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=norm_dtype, facts=facts)
        self.rotary = rotary_tables(config, device)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """Hidden states `[T, N]`, before the last norm."""
        x_TN = self.embed_tokens(batch.token_ids)
        if self.embedding_scale != 1.0:
            x_TN = x_TN * self.embedding_scale
        angles = [table.angles(batch.positions, self.dtype) for table in self.rotary]
        if self.fused is not None:
            return self.fused(self.layers, x_TN, angles[0], batch, cache)
        for layer in self.layers:
            x_TN = layer(x_TN, angles, batch, cache)
        return x_TN


class DecoderForCausalLM(nn.Module):
    """The model runner's view: a batch in, float32 logits of the wanted rows out.

    Args:
        dtype: of weights and activations.
        device: where the weights will be put by the loader; parameters stay on the meta device until then.
        deterministic: choose ops whose rows do not depend on what else is in the step.
        kernels: for `native` ones the loader packs the weights; these and `triton` ones may compute all layers in one
            call.

    Raises:
        UnsupportedModel: an activation that is not known here.
    """

    layer_class: ClassVar[type[nn.Module]] = DecoderLayer
    norm_dtype: ClassVar[torch.dtype | None] = None
    """Of the last norm; `None` is the model's."""

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
        self.vocab_size = config.vocab_size
        self.logit_softcap = config.logit_softcap
        self.scale_of_logits = self.logit_scale(config)
        self.model = Decoder(
            config,
            self.layer_class,
            dtype=dtype,
            device=device,
            facts=op_facts(config, dtype, device, deterministic=deterministic, kernels=kernels),
            embedding_scale=self.embedding_scale(config),
            norm_dtype=self.norm_dtype or dtype,
        )
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, is_head=True)
        )
        if kernels == "triton":
            (self.lm_head or self.model.embed_tokens).product = product
        if deterministic:
            compute_alike(self, kernels)

    def embedding_scale(self, config: ModelConfig) -> float:
        """What the embedding's rows are multiplied by."""
        return 1.0

    def logit_scale(self, config: ModelConfig) -> float:
        """What logits are multiplied by."""
        return 1.0

    def forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """See `CausalLM`. Without wanted rows the head is not computed."""
        x_TN = self.model(batch, cache)
        if not len(batch.logit_rows):
            return torch.empty(0, self.vocab_size, dtype=torch.float32, device=x_TN.device)
        x_RN = self.model.norm(x_TN[batch.logit_rows])
        head = self.model.embed_tokens.project if self.lm_head is None else self.lm_head
        logits_RV: torch.Tensor = head(x_RN).float()
        if self.scale_of_logits != 1.0:
            logits_RV.mul_(self.scale_of_logits)
        if self.logit_softcap:
            logits_RV.div_(self.logit_softcap).tanh_().mul_(self.logit_softcap)
        return logits_RV
