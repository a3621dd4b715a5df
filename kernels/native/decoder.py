"""All layers of a decoder in one native call per step, over packed weights.

Owns the C description of a model's layers, made once. A model of pre-norm layers with grouped-query attention, rotary
embedding and a gated feed-forward block is described by `LayerWeights`; `Decoder.forward` then computes a step.

Shapes: T tokens of the step, N hidden size, D head size, K key/value heads, S slots of the pool.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sgl.kernels.native.library import library
from sgl.kernels.native.ops import CChunk, CHeads, NativePlan, heads
from sgl.kernels.native.weights import CWeight, PackedWeight


class CLayer(ctypes.Structure):
    """`struct Layer` of decoder.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("attention_norm", "query_norm", "key_norm", "feed_forward_norm")),
        *((name, CWeight) for name in ("query", "key", "value", "output", "gate", "up", "down")),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
    ]


class CShape(ctypes.Structure):
    """`struct Shape` of decoder.h."""

    _fields_ = [
        ("hidden", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("heads", CHeads),
    ]


class CStep(ctypes.Structure):
    """`struct Step` of decoder.h."""

    _fields_ = [
        ("tokens", ctypes.c_int64),
        ("chunks", ctypes.c_int64),
        ("chunk", ctypes.POINTER(CChunk)),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer. Norms are float32 `[N]`, those of queries and keys `[D]`."""

    attention_norm: torch.Tensor
    query: PackedWeight
    key: PackedWeight
    value: PackedWeight
    output: PackedWeight
    feed_forward_norm: torch.Tensor
    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None


class Decoder:
    """The layers of a model over its KV pool.

    Args:
        layers: their weights, which live as long as this.
        pool: `layer -> (keys, values)`, `[S, K, D]` each, float32 or bfloat16.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        pool: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        eps: float,
        scale: float,
    ) -> None:
        self._held = (layers, [pool(i) for i in range(len(layers))])
        self._layers = (CLayer * len(layers))(
            *(_layer(layer, *kv) for layer, kv in zip(layers, self._held[1], strict=True))
        )
        self._shape = CShape(
            layers[0].query.shape[1],
            layers[0].gate.shape[0],
            eps,
            scale,
            heads(num_heads, num_kv_heads, head_dim, page_size, self._held[1][0][0].dtype),
        )
        self._function = library().sgl_decoder

    def forward(self, x_TN: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], plan: NativePlan) -> torch.Tensor:
        """The residual stream after the last layer; `x` is overwritten with it."""
        cos, sin = (angle.contiguous() for angle in angles)
        step = CStep(plan.num_tokens, len(plan.chunks), plan.chunks, cos.data_ptr(), sin.data_ptr(), x_TN.data_ptr())
        self._function(ctypes.byref(self._shape), self._layers, len(self._layers), ctypes.byref(step))
        return x_TN


def _layer(weights: LayerWeights, keys: torch.Tensor, values: torch.Tensor) -> CLayer:
    layer = CLayer(keys=keys.data_ptr(), values=values.data_ptr())
    for name in ("attention_norm", "query_norm", "key_norm", "feed_forward_norm"):
        norm = getattr(weights, name)
        setattr(layer, name, None if norm is None else norm.data_ptr())
    for name in ("query", "key", "value", "output", "gate", "up", "down"):
        setattr(layer, name, getattr(weights, name).c)
    return layer
