"""Layers that decoder models share.

Owns linear and embedding tables, norm, attention over the KV pool, and the gated feed-forward block. What differs from
one attention to another (a window, a soft cap, norms of queries and keys, layers without rotation) follows from the
configuration. Parameters are allocated on the meta device; the loader replaces each one, so weights exist once in
memory. Ops come from the kernel registry, chosen once per model. Parameter names are Hugging Face's.

Shapes: T tokens of the step, N hidden size, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from sgl.errors import UnsupportedModel
from sgl.kernels import deterministic, prepacked, registry
from sgl.kernels.native.ops import linear
from sgl.kernels.native.weights import PackedWeight
from sgl.kernels.registry import Function, OpFacts
from sgl.runtime.models.registry import ModelConfig
from sgl.runtime.numerics import Kernels

if TYPE_CHECKING:
    from sgl.runtime.model_runner import ForwardBatch, KVCache


Angles: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the step's tokens, `[T, D]` each."""

GATED_ACTIVATIONS = {
    "silu": "silu_mul",
    "gelu_pytorch_tanh": "gelu_tanh_mul",
    "gelu_tanh": "gelu_tanh_mul",
}
"""`hidden_act` of a config -> the op that computes `act(gate) * up`."""


def gated_activation(config: ModelConfig, facts: OpFacts) -> Function:
    """The op between the products of a gated feed-forward block.

    Raises:
        UnsupportedModel: an activation that is not known here.
    """
    if config.hidden_act not in GATED_ACTIVATIONS:
        raise UnsupportedModel(
            f"hidden_act is {config.hidden_act!r}", hint=f"supported are {', '.join(GATED_ACTIVATIONS)}"
        )
    return registry.get(GATED_ACTIVATIONS[config.hidden_act], facts)


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """One that the loader will replace."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False)


def op_facts(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, deterministic: bool, kernels: Kernels = "torch"
) -> OpFacts:
    """What the registry may decide on for this model."""
    return OpFacts(
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        head_dim=config.head_dim,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        window=config.longest_window,
        softcap=config.attention_softcap,
        deterministic=deterministic,
        native=kernels == "native",
        triton=kernels == "triton",
    )


class Linear(nn.Module):
    """`x @ weight.T + bias`; weight `[out, in]`, a parameter or packed for the native kernels.

    Args:
        is_head: its products are logits, which bear less rounding.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, is_head: bool = False
    ) -> None:
        super().__init__()
        self.product: Function = functional.linear
        self.weight = parameter(out_features, in_features, dtype=dtype)
        self.bias = parameter(out_features, dtype=dtype) if bias else None
        self.packed: PackedWeight | None = None
        self.is_head = is_head

    def hold(self, packed: PackedWeight) -> None:
        """Compute with packed weights from now on; the bias, if any, is theirs to add."""
        del self.weight
        self.packed = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return linear(x, self.packed)
        return self.product(x, self.weight, self.bias)


class Embedding(nn.Module):
    """Rows of a table by token id; weight `[vocabulary, N]`, a parameter or packed for the native kernels."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.product: Function = functional.linear
        self.weight = parameter(vocab_size, hidden_size, dtype=dtype)
        self.packed: PackedWeight | None = None

    def hold(self, packed: PackedWeight) -> None:
        """Read from a packed table from now on."""
        del self.weight
        self.packed = packed

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return self.packed.take(token_ids)
        return functional.embedding(token_ids, self.weight)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Products with every row: the table as a head."""
        if self.packed is not None:
            return linear(x, self.packed)
        return self.product(x, self.weight)


def compute_alike(model: nn.Module, kernels: Kernels) -> None:
    """Have every product of a model's weights be one of a fixed number of rows (deterministic mode)."""
    product: Function = deterministic.linear
    if kernels == "triton":
        from sgl.kernels.triton.invariant import linear as product
    for module in model.modules():
        if isinstance(module, (Linear, Embedding)):
            module.product = product


def prepack(model: nn.Module) -> None:
    """Have oneDNN keep the weights of a model's products in its own order. A table stays as it is, because its rows are
    read; so does a head that is one. Again is nothing: several runners may share a model."""
    for module in model.modules():
        if isinstance(module, Linear) and module.product is functional.linear and module.packed is None:
            module.weight = nn.Parameter(prepacked.pack(module.weight), requires_grad=False)
            module.product = prepacked.linear


class RMSNorm(nn.Module):
    """Root mean square norm with a learned scale."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, facts: OpFacts) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=dtype)
        self.eps = eps
        self.rms_norm = registry.get("rms_norm", facts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention of one layer over its part of the KV pool.

    Args:
        norm_dtype: of the norms of queries and keys, where the model has them; the model's by default.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        dtype: torch.dtype,
        facts: OpFacts,
        norm_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.scale = config.scale
        hidden, bias = config.hidden_size, config.attention_bias
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(hidden, query_size, bias=bias, dtype=dtype)
        self.k_proj = Linear(hidden, kv_size, bias=bias, dtype=dtype)
        self.v_proj = Linear(hidden, kv_size, bias=bias, dtype=dtype)
        self.o_proj = Linear(query_size, hidden, bias=config.output_bias, dtype=dtype)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(config.head_dim, config.rms_norm_eps, dtype=norm_dtype or dtype, facts=facts) for _ in range(2)
            )
        self.rotary = registry.get("rotary", facts)
        self.kv_write = registry.get("kv_write", facts)
        self.paged_attention = _attention(config, layer, facts)
        # Which of the model's rotary tables: the second one is of layers with a window, where these have their own.
        is_local = config.local_rope_theta is not None and bool(config.windows) and config.windows[layer] > 0
        self.rotary_table = None if layer in config.unrotated_layers else int(is_local)

    def forward(
        self, x_TN: torch.Tensor, angles: Sequence[Angles], batch: ForwardBatch, cache: KVCache
    ) -> torch.Tensor:
        """`[T, N]`; keys and values of the step are written to the pool."""
        num_tokens = x_TN.shape[0]
        query_THD = self.q_proj(x_TN).view(num_tokens, -1, self.head_dim)
        key_TKD = self.k_proj(x_TN).view(num_tokens, -1, self.head_dim)
        value_TKD = self.v_proj(x_TN).view(num_tokens, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            query_THD = self.q_norm(query_THD.view(-1, self.head_dim)).view(query_THD.shape)
            key_TKD = self.k_norm(key_TKD.view(-1, self.head_dim)).view(key_TKD.shape)
        query_THD, key_TKD = self.positioned(query_THD, key_TKD, angles)
        keys_SKD, values_SKD = cache.layer(self.layer)
        slots = batch.attention.write_slots
        self.kv_write(keys_SKD, values_SKD, key_TKD[: len(slots)], value_TKD[: len(slots)], slots)
        mixed_THD = self.paged_attention(query_THD, keys_SKD, values_SKD, batch.attention, self.scale)
        return self.o_proj(mixed_THD.reshape(num_tokens, -1))

    def positioned(
        self, query_THD: torch.Tensor, key_TKD: torch.Tensor, angles: Sequence[Angles]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys of the step with their places in them. What is cached is the key as it comes out."""
        if self.rotary_table is None:
            return query_THD, key_TKD
        cos_sin = angles[self.rotary_table]
        return self.rotary(query_THD, *cos_sin), self.rotary(key_TKD, *cos_sin)


def _attention(config: ModelConfig, layer: int, facts: OpFacts) -> Function:
    """The op with what this layer's scores are subject to."""
    attend = registry.get("paged_attention", facts)
    subject_to: dict[str, float] = {}
    if window := config.window(layer):
        subject_to["window"] = window
    if config.attention_softcap:
        subject_to["softcap"] = config.attention_softcap
    return partial(attend, **subject_to) if subject_to else attend


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, facts: OpFacts) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, bias=bias, dtype=dtype)
        self.up_proj = Linear(hidden, inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype)
        self.activate = gated_activation(config, facts)

    def forward(self, x_TN: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activate(self.gate_proj(x_TN), self.up_proj(x_TN)))
