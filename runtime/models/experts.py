"""Feed-forward blocks with a router: each token is computed by a few of many experts.

Owns the routing and the parameters of all experts of a layer, `[E, out, in]` under the names that they have in a dense
block. Products of many small matrices are one op of the registry (`experts`); a token's result is the sum of what
its experts say, weighted, in the order in which the router ranked them.

Shapes: T tokens of the step, N hidden size, E experts, K experts of a token, I inner size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from sgl.kernels import registry
from sgl.kernels.registry import OpFacts
from sgl.runtime.models.layers import Linear, gated_activation, parameter
from sgl.runtime.models.registry import Experts, ModelConfig

if TYPE_CHECKING:
    from sgl.kernels.native.weights import PackedWeight


class ExpertLinear(nn.Module):
    """One product of each expert; weight `[E, out, in]`, a parameter or packed for the native kernels."""

    def __init__(self, count: int, in_features: int, out_features: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(count, out_features, in_features, dtype=dtype)
        self._packed: dict[int, PackedWeight] = {}

    def hold(self, packed: PackedWeight, expert: int) -> None:
        """Compute with packed weights from now on."""
        if not self._packed:
            del self.weight
        self._packed[expert] = packed

    @property
    def matrices(self) -> torch.Tensor | dict[int, PackedWeight]:
        """By expert, as the op takes them."""
        return self._packed or self.weight


class ExpertProducts(nn.Module):
    """The three products of a gated block, of all experts of a layer."""

    def __init__(self, experts: Experts, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        count, inner = experts.count, experts.inner_size
        self.gate_proj = ExpertLinear(count, hidden_size, inner, dtype=dtype)
        self.up_proj = ExpertLinear(count, hidden_size, inner, dtype=dtype)
        self.down_proj = ExpertLinear(count, inner, hidden_size, dtype=dtype)


class SparseMLP(nn.Module):
    """A router and its experts."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, facts: OpFacts) -> None:
        super().__init__()
        if config.experts is None:
            raise ValueError("the configuration has no experts")
        self._per_token = config.experts.per_token
        self._normalized = config.experts.normalized
        self.gate = Linear(config.hidden_size, config.experts.count, bias=False, dtype=dtype)
        self.experts = ExpertProducts(config.experts, config.hidden_size, dtype=dtype)
        self.activate = gated_activation(config, facts)
        self.compute = registry.get("experts", facts)

    def forward(self, x_TN: torch.Tensor) -> torch.Tensor:
        ids_TK, shares_TK = route(self.gate(x_TN), self._per_token, normalized=self._normalized)
        experts = self.experts
        return self.compute(
            x_TN,
            ids_TK,
            shares_TK,
            experts.gate_proj.matrices,
            experts.up_proj.matrices,
            experts.down_proj.matrices,
            self.activate,
        )


def route(logits_TE: torch.Tensor, per_token: int, *, normalized: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token and their shares in its result, `[T, K]` each, shares in float32.

    Shares are probabilities among all experts. Scaled to a sum of one, they are the softmax over the picked experts'
    logits, which other models write down in that order.

    Example:
        >>> ids, shares = route(torch.tensor([[0.0, 2.0, 1.0]]), 2, normalized=True)
        >>> ids.tolist(), round(float(shares.sum()), 3)
        ([[1, 2]], 1.0)
    """
    probabilities_TE = logits_TE.softmax(dim=-1, dtype=torch.float32)
    shares_TK, ids_TK = probabilities_TE.topk(per_token, dim=-1)
    if normalized:
        shares_TK = shares_TK / shares_TK.sum(dim=-1, keepdim=True)
    return ids_TK, shares_TK
