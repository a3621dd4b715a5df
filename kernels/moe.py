"""Experts' products: many small matrices, each for the tokens that were routed to it.

Owns the op `experts`. The reference sorts the step's pairs of token and expert by expert and multiplies each group with
its expert's matrices, without a loop over tokens and without asking the device how large the groups are, so that it may
be recorded in a CUDA graph. Called by `sgl.runtime.models.experts` through the registry.

Shapes: T tokens of the step, N hidden size, E experts, K experts of a token, I inner size, P = T K pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from sgl.kernels import deterministic

if TYPE_CHECKING:
    from sgl.kernels.native.weights import PackedWeight

Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def experts(
    x_TN: torch.Tensor,
    ids_TK: torch.Tensor,
    shares_TK: torch.Tensor,
    gate_EIN: torch.Tensor,
    up_EIN: torch.Tensor,
    down_ENI: torch.Tensor,
    activate: Activation,
) -> torch.Tensor:
    """`sum over k of shares[t, k] * down[e](activate(gate[e](x[t]), up[e](x[t])))` with `e = ids[t, k]`; `[T, N]`.

    Args:
        ids_TK: int64, each below E; a token's are distinct.
        shares_TK: float32.
        activate: of gate and up, both `[P, I]`.
    """
    order_P = ids_TK.reshape(-1).argsort(stable=True)
    sizes_E = (ids_TK.reshape(-1, 1) == torch.arange(len(gate_EIN), device=ids_TK.device)).sum(dim=0)
    ends_E = sizes_E.cumsum(0).to(torch.int32)
    rows_PN = x_TN[order_P // ids_TK.shape[1]]
    gate_PI = functional.grouped_mm(rows_PN, gate_EIN.transpose(1, 2), offs=ends_E)
    up_PI = functional.grouped_mm(rows_PN, up_EIN.transpose(1, 2), offs=ends_E)
    out_PN = functional.grouped_mm(activate(gate_PI, up_PI), down_ENI.transpose(1, 2), offs=ends_E)
    return _combined(out_PN, order_P, shares_TK)


def experts_alike(
    x_TN: torch.Tensor,
    ids_TK: torch.Tensor,
    shares_TK: torch.Tensor,
    gate_EIN: torch.Tensor,
    up_EIN: torch.Tensor,
    down_ENI: torch.Tensor,
    activate: Activation,
) -> torch.Tensor:
    """As `experts`, a token's result to the bit the same whoever shares its experts: each group is filled up to
    products of a fixed number of rows (`kernels/deterministic.py`)."""

    def compute(expert: int, rows_RN: torch.Tensor) -> torch.Tensor:
        missing = deterministic.padded(len(rows_RN)) - len(rows_RN)
        filled_MN = functional.pad(rows_RN, (0, 0, 0, missing))
        gate_MI = deterministic.linear(filled_MN, gate_EIN[expert])
        up_MI = deterministic.linear(filled_MN, up_EIN[expert])
        return deterministic.linear(activate(gate_MI, up_MI), down_ENI[expert])[: len(rows_RN)]

    return _one_by_one(x_TN, ids_TK, shares_TK, compute)


def experts_native(
    x_TN: torch.Tensor,
    ids_TK: torch.Tensor,
    shares_TK: torch.Tensor,
    gate: Mapping[int, PackedWeight],
    up: Mapping[int, PackedWeight],
    down: Mapping[int, PackedWeight],
    activate: Activation,
) -> torch.Tensor:
    """As `experts`, with matrices packed for the native kernels, by expert."""
    from sgl.kernels.native.ops import linear

    def compute(expert: int, rows_RN: torch.Tensor) -> torch.Tensor:
        return linear(activate(linear(rows_RN, gate[expert]), linear(rows_RN, up[expert])), down[expert])

    return _one_by_one(x_TN, ids_TK, shares_TK, compute)


def _one_by_one(
    x_TN: torch.Tensor,
    ids_TK: torch.Tensor,
    shares_TK: torch.Tensor,
    compute: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """One expert after another, those that have tokens; `compute` gives `[R, N]` for an expert's rows `[R, N]`."""
    order_P = ids_TK.reshape(-1).argsort(stable=True)
    rows_PN = x_TN[order_P // ids_TK.shape[1]]
    sizes = ids_TK.reshape(-1).bincount().tolist()
    out_PN = torch.empty_like(rows_PN)
    begin = 0
    for expert, size in enumerate(sizes):
        if size:
            out_PN[begin : begin + size] = compute(expert, rows_PN[begin : begin + size])
        begin += size
    return _combined(out_PN, order_P, shares_TK)


def _combined(out_PN: torch.Tensor, order_P: torch.Tensor, shares_TK: torch.Tensor) -> torch.Tensor:
    """Back in the order of tokens, and each token's results added up in the order of its ids."""
    placed_PN = torch.empty_like(out_PN).index_copy_(0, order_P, out_PN)
    num_tokens, per_token = shares_TK.shape
    weighted_TKN = placed_PN.view(num_tokens, per_token, -1) * shares_TK.to(out_PN.dtype).unsqueeze(-1)
    total_TN = weighted_TKN[:, 0]
    for rank in range(1, per_token):  # one order for every token, whatever a reduction over the step would choose
        total_TN = total_TN + weighted_TKN[:, rank]
    return total_TN
