"""Torch references of the ops that work on one row at a time: norm, rotary embedding, gated activation, largest logit.

Called by the layers of `sgl.runtime.models` through the registry. Inputs are never changed. Statistics are computed in
at least float32 whatever the dtype of the data, as Hugging Face's Llama does, so that 16-bit runs agree with it.

Shapes: T tokens, N features, H heads, D head size.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from sgl.kernels.bitmask import denied


def rms_norm(x_TN: torch.Tensor, weight_N: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension; dtype of `x`.

    The norm is rounded to the weight's dtype before it is scaled: Llama keeps weights in the model's, Gemma in float32.
    """
    wide = x_TN.to(torch.promote_types(x_TN.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (weight_N * normed.to(weight_N.dtype)).to(x_TN.dtype)


def rotary(x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Rotate each head by its token's angles (RoFormer, Su et al. 2021), halves layout.

    Feature `i` is paired with `i + D/2`, as in Hugging Face checkpoints (not with `i + 1`, as in GGUF files of Llama).
    `cos` and `sin` are `[T, D]` with both halves equal.
    """
    cos, sin = cos_TD.unsqueeze(1), sin_TD.unsqueeze(1)
    first, second = x_THD.chunk(2, dim=-1)
    return x_THD * cos + torch.cat((-second, first), dim=-1) * sin


def silu_mul(gate_TN: torch.Tensor, up_TN: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, the gated activation of Llama's feed-forward layer."""
    return functional.silu(gate_TN) * up_TN


def gelu_tanh_mul(gate_TN: torch.Tensor, up_TN: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up` with the tangent's approximation, the gated activation of Gemma's feed-forward layer."""
    return functional.gelu(gate_TN, approximate="tanh") * up_TN


def argmax(logits_RV: torch.Tensor, words_RW: torch.Tensor | None = None) -> torch.Tensor:
    """The first of the largest numbers of each row, `[R]`; -1 for a row with a NaN, or with nothing above -infinity.

    Args:
        words_RW: packed masks as in `bitmask.apply_bitmask`, on the same device; what they deny is not looked for.
    """
    largest_R = logits_RV.amax(dim=-1)
    if words_RW is not None:
        logits_RV = logits_RV.masked_fill(denied(words_RW, logits_RV.shape[1]), -torch.inf)
    best_R, ids_R = logits_RV.max(dim=-1)
    return torch.where(torch.isnan(largest_R) | (best_R == -torch.inf), -1, ids_R)
