"""Experts' products: many small matrices, each for the tokens that were routed to it.

Owns the op `experts`. The reference sorts the step's pairs of token and expert by expert and multiplies each group with
its expert's matrices, without a loop over tokens. Called by `sgl.runtime.models.experts` through the registry. Steps
that are recorded in CUDA graphs compute with Triton's kernel (`triton/experts.py`): for some dtypes and sizes the
library asks the device how large the groups are.

Shapes: T tokens of the step, N hidden size, E experts, K experts of a token, I inner size, P = T K pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.nn import functional

from sgl.kernels import deterministic

if TYPE_CHECKING:
    from sgl.kernels.native.weights import PackedWeight

Activation: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Matrices: TypeAlias = "torch.Tensor | Mapping[int, PackedWeight]"
"""Of all experts, by expert."""


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


def _one_by_one(
    multiply: Callable[[torch.Tensor, Any], torch.Tensor],
    multiple: int,
    x_TN: torch.Tensor,
    ids_TK: torch.Tensor,
    shares_TK: torch.Tensor,
    gate: Matrices,
    up: Matrices,
    down: Matrices,
    activate: Activation,
) -> torch.Tensor:
    """As `experts`, one expert after another, those that have tokens.

    Args:
        multiply: rows with one expert's matrix.
        multiple: rows are filled up to one of this; even an activation rounds otherwise at the end of a shorter tensor.
    """
    order_P = ids_TK.reshape(-1).argsort(stable=True)
    rows_PN = x_TN[order_P // ids_TK.shape[1]]
    out_PN = torch.empty_like(rows_PN)
    begin = 0
    for expert, size in enumerate(ids_TK.reshape(-1).bincount().tolist()):
        if size:
            rows_RN = functional.pad(rows_PN[begin : begin + size], (0, 0, 0, -size % multiple))
            inner_RI = activate(multiply(rows_RN, gate[expert]), multiply(rows_RN, up[expert]))
            out_PN[begin : begin + size] = multiply(inner_RI, down[expert])[:size]
        begin += size
    return _combined(out_PN, order_P, shares_TK)


def _multiply_packed(rows_RN: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    from sgl.kernels.native.ops import linear

    return linear(rows_RN, weight)


experts_alike = partial(_one_by_one, deterministic.linear, deterministic.ROWS)
"""As `experts`, a token's result to the bit the same whoever shares its experts: each group is filled up to products of
a fixed number of rows (`kernels/deterministic.py`)."""
experts_native = partial(_one_by_one, _multiply_packed, 1)
"""As `experts`, with matrices packed for the native kernels, by expert."""


def _combined(out_PN: torch.Tensor, order_P: torch.Tensor, shares_TK: torch.Tensor) -> torch.Tensor:
    """Back in the order of tokens, and each token's results added up in the order of its ids."""
    placed_PN = torch.empty_like(out_PN).index_copy_(0, order_P, out_PN)
    num_tokens, per_token = shares_TK.shape
    weighted_TKN = placed_PN.view(num_tokens, per_token, -1) * shares_TK.to(out_PN.dtype).unsqueeze(-1)
    total_TN = weighted_TKN[:, 0]
    for rank in range(1, per_token):  # one order for every token, whatever a reduction over the step would choose
        total_TN = total_TN + weighted_TKN[:, rank]
    return total_TN
