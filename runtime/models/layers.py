"""Layers that decoder models share.

Owns linear and embedding tables, norm, attention over the KV pool, and the gated feed-forward block.
Parameters are allocated on the meta device; the loader replaces each one, so weights exist once in memory. Ops come
from the kernel registry, chosen once per model. Parameter names are Hugging Face's.

Shapes: T tokens of the step, N hidden size, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from sgl.kernels import deterministic, registry
from sgl.kernels.native.ops import linear
from sgl.kernels.native.weights import PackedWeight
from sgl.kernels.registry import Function, OpFacts
from sgl.runtime.models.registry import ModelConfig
from sgl.runtime.numerics import Kernels

if TYPE_CHECKING:
    from sgl.runtime.model_runner import ForwardBatch, KVCache


def _parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
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
        self.weight = _parameter(out_features, in_features, dtype=dtype)
        self.bias = _parameter(out_features, dtype=dtype) if bias else None
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
        self.weight = _parameter(vocab_size, hidden_size, dtype=dtype)
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


def compute_alike(model: nn.Module) -> None:
    """Have every product of a model's weights be one of a fixed number of rows (deterministic mode)."""
    for module in model.modules():
        if isinstance(module, (Linear, Embedding)):
            module.product = deterministic.linear


class RMSNorm(nn.Module):
    """Root mean square norm with a learned scale."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, facts: OpFacts) -> None:
        super().__init__()
        self.weight = _parameter(size, dtype=dtype)
        self.eps = eps
        self.rms_norm = registry.get("rms_norm", facts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention of one layer over its part of the KV pool."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, facts: OpFacts) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        hidden, bias = config.hidden_size, config.attention_bias
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(hidden, query_size, bias=bias, dtype=dtype)
        self.k_proj = Linear(hidden, kv_size, bias=bias, dtype=dtype)
        self.v_proj = Linear(hidden, kv_size, bias=bias, dtype=dtype)
        self.o_proj = Linear(query_size, hidden, bias=bias, dtype=dtype)
        self.rotary = registry.get("rotary", facts)
        self.kv_write = registry.get("kv_write", facts)
        self.paged_attention = registry.get("paged_attention", facts)

    def forward(
        self, x_TN: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], batch: ForwardBatch, cache: KVCache
    ) -> torch.Tensor:
        num_tokens = x_TN.shape[0]
        query_THD = self.rotary(self.q_proj(x_TN).view(num_tokens, -1, self.head_dim), *angles)
        key_TKD = self.rotary(self.k_proj(x_TN).view(num_tokens, -1, self.head_dim), *angles)
        value_TKD = self.v_proj(x_TN).view(num_tokens, -1, self.head_dim)
        keys_SKD, values_SKD = cache.layer(self.layer)
        slots = batch.attention.write_slots
        self.kv_write(keys_SKD, values_SKD, key_TKD[: len(slots)], value_TKD[: len(slots)], slots)
        mixed_THD = self.paged_attention(query_THD, keys_SKD, values_SKD, batch.attention, self.scale)
        return self.o_proj(mixed_THD.reshape(num_tokens, -1))


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, facts: OpFacts) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, bias=bias, dtype=dtype)
        self.up_proj = Linear(hidden, inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype)
        self.silu_mul = registry.get("silu_mul", facts)

    def forward(self, x_TN: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.silu_mul(self.gate_proj(x_TN), self.up_proj(x_TN)))
