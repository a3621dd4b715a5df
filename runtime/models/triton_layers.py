"""All decoder layers of a model on a GPU, with fused Triton kernels.

Owns the packing of a layer's weights, once they are loaded: query, key and value are one matrix, gate and up another,
and the layers' own parameters become views of these, so that nothing is held twice. Steps of few rows go through
kernels that read each weight once and do everything around the product on the way (`kernels/triton/matmul.py`); larger
ones through the library's products with fused passes between them. In deterministic mode steps of all sizes go the
second way, with products and attention whose bits do not depend on the size (`kernels/triton/invariant.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from sgl.kernels.registry import Function
from sgl.runtime.models.registry import ModelConfig

if TYPE_CHECKING:
    from sgl.runtime.model_runner import ForwardBatch, KVCache


def obstacle(config: ModelConfig) -> str | None:
    """Why these layers cannot run a model, whose layers are then computed op by op; `None` when they can."""
    if config.attention_bias or config.output_bias or config.mlp_bias:
        return "its products have no bias"
    return None


def product(x_TN: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `torch.nn.functional.linear`: what reads a large matrix fastest for so many rows."""
    from sgl.kernels.triton.matmul import MAX_ROWS, linear_rows

    if bias is None and len(x_TN) <= MAX_ROWS:
        return linear_rows(x_TN, weight)
    return functional.linear(x_TN, weight, bias)


@dataclass(frozen=True)
class _Layer:
    """A layer's weights as the kernels want them."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    feed_forward_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    """Of each query head and each key head, where the model has them."""


class TritonLayers:
    """Runs a stack of pre-norm decoder layers over one KV pool."""

    def __init__(self, config: ModelConfig, *, deterministic: bool = False) -> None:
        from sgl.kernels.triton import attention, invariant
        from sgl.kernels.triton.matmul import MAX_ROWS

        self._eps = config.rms_norm_eps
        self._num_heads = config.num_attention_heads
        self._scale = config.scale
        self._layers: list[_Layer] = []
        self._few = 0 if deterministic else MAX_ROWS
        self._linear: Function = invariant.linear if deterministic else functional.linear
        self._paged_attention: Function = (invariant if deterministic else attention).paged_attention

    def __call__(
        self,
        layers: Iterable[Any],
        x_TN: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        cache: KVCache,
    ) -> torch.Tensor:
        """`x` after the last layer. `x` itself may be changed."""
        if not self._layers:
            self._layers = [_packed(layer) for layer in layers]
        if len(x_TN) <= self._few:
            return self._few_rows(x_TN, angles, batch, cache)
        return self._many_rows(x_TN, angles, batch, cache)

    def _few_rows(
        self, x_TN: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], batch: ForwardBatch, cache: KVCache
    ) -> torch.Tensor:
        from sgl.kernels.triton.elementwise import rms_norm
        from sgl.kernels.triton.matmul import linear_rows

        eps = self._eps
        for index, layer in enumerate(self._layers):
            qkv = linear_rows(rms_norm(x_TN, layer.attention_norm, eps), layer.qkv)
            x_TN = linear_rows(self._attend(index, layer, qkv, angles, batch, cache), layer.output, residual=x_TN)
            inner = linear_rows(rms_norm(x_TN, layer.feed_forward_norm, eps), layer.gate_up, gated=True)
            x_TN = linear_rows(inner, layer.down, residual=x_TN)
        return x_TN

    def _many_rows(
        self, x_TN: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], batch: ForwardBatch, cache: KVCache
    ) -> torch.Tensor:
        from sgl.kernels.triton.elementwise import add_rms_norm, rms_norm, silu_mul_packed

        eps, linear = self._eps, self._linear
        residual, added = x_TN, None
        for index, layer in enumerate(self._layers):
            if added is None:
                normed = rms_norm(residual, layer.attention_norm, eps)
            else:
                normed = add_rms_norm(added, residual, layer.attention_norm, eps)
            mixed = self._attend(index, layer, linear(normed, layer.qkv), angles, batch, cache)
            normed = add_rms_norm(linear(mixed, layer.output), residual, layer.feed_forward_norm, eps)
            added = linear(silu_mul_packed(linear(normed, layer.gate_up)), layer.down)
        return residual if added is None else residual + added

    def _attend(
        self,
        index: int,
        layer: _Layer,
        qkv_TN: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        cache: KVCache,
    ) -> torch.Tensor:
        """Write keys and values, then attend; `[T, H D]`."""
        from sgl.kernels.triton.elementwise import rotate_and_write

        plan: Any = batch.attention
        keys, values = cache.layer(index)
        query = rotate_and_write(
            qkv_TN, *angles, plan.write_slots, keys, values, self._num_heads, layer.head_norms, self._eps
        )
        mixed = self._paged_attention(query, keys, values, plan, self._scale)
        return mixed.view(len(mixed), -1)


def _packed(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        attention_norm=layer.input_layernorm.weight,
        qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj),
        output=attention.o_proj.weight,
        feed_forward_norm=layer.post_attention_layernorm.weight,
        gate_up=_joined(mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj.weight,
        head_norms=None if attention.q_norm is None else (attention.q_norm.weight, attention.k_norm.weight),
    )


def _joined(*linears: Any) -> torch.Tensor:
    """The weights of several products as one matrix, of which theirs become parts."""
    joined = torch.cat([linear.weight for linear in linears])
    first = 0
    for linear in linears:
        linear.weight.data = joined[first : first + len(linear.weight)]
        first += len(linear.weight)
    return joined
