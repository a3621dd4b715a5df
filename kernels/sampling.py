"""Torch references of the ops that help to draw a token from a row of logits.

Called by `sgl.runtime.sampler` through the registry. Inputs are never changed.

Shapes: R rows of logits, V vocabulary.
"""

from __future__ import annotations

import torch


def top_k(logits_RV: torch.Tensor, k: int, scale_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `k` largest logits of each row, largest first, ties by id, and the mass of the whole row.

    Of logits that equal the last one any may have been left out. No logit is NaN or infinity; where fewer than `k` are
    above -infinity, the rest is -infinity, with any ids.

    Args:
        logits_RV: float32.
        k: at most V.
        scale_R: float64, positive; a row's logits are meant times this (the inverse of a temperature).

    Returns:
        Logits `[R, k]` as they are, their ids `[R, k]`, and `logsumexp` of the scaled rows, float64 `[R]`.
    """
    ids_Rk = logits_RV.topk(k, dim=-1, sorted=False).indices.sort(dim=-1).values
    values_Rk, order_Rk = logits_RV.gather(-1, ids_Rk).sort(dim=-1, descending=True, stable=True)
    mass_R = (logits_RV.double() * scale_R.unsqueeze(-1)).logsumexp(dim=-1)
    return values_Rk, ids_Rk.gather(-1, order_Rk), mass_R
