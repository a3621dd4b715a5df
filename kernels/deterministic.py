"""Products and attention whose result for a row does not depend on anything but the row and its context, to the bit.

Owns the one path of deterministic mode. Called by the layers of a model, attention through the registry when the facts
say `deterministic`. Two things make a sum differ between runs: another order of addition, and a matmul that picks
another inner loop for another number of rows. So keys are taken in blocks of `BLOCK` counted from the sequence's
beginning, one after another with a running softmax (Milakov and Gimelshein 2018), and every product is one of exactly
`ROWS` rows: which numbers of rows a library computes alike differs from processor to processor (on an AMD one all
multiples of 8 were, on an Intel one with AMX they were not), and one number always is.

Shapes: T tokens of the step, S slots, H query heads, K key/value heads, G = H / K, D head size, B sequences computed
together, N queries of each, L slots of each (a multiple of `BLOCK`), M padded rows, R = B * K.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn import functional

from sgl.kernels.attention import AttentionPlan

BLOCK = 64
ROWS = 16


def padded(rows: int) -> int:
    """The next multiple of `ROWS`.

    Example:
        >>> padded(1), padded(16), padded(17)
        (16, 16, 32)
    """
    return -(-rows // ROWS) * ROWS


def linear(x_TN: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`, `ROWS` rows at a time; T is a multiple of that."""
    return torch.cat([functional.linear(rows, weight, bias) for rows in x_TN.split(ROWS)])


def paged_attention(
    query_THD: torch.Tensor,
    keys_SKD: torch.Tensor,
    values_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """As the op's reference; rows of the step that belong to no chunk (padding) give zeros.

    A window hides keys of the same blocks: one that begins with the window would have other sums at every position.
    """
    out_THD = torch.zeros_like(query_THD)
    sight = _Sight(scale, window, softcap)
    for rows_B, slots_BL, lengths_B in _singles(plan):
        out_THD[rows_B] = _attend(query_THD[rows_B].unsqueeze(1), keys_SKD, values_SKD, slots_BL, lengths_B, sight)[
            :, 0
        ]
    for span in plan.spans:
        query_BNHD = query_THD[span.begin : span.end].unsqueeze(0)
        lengths_B = torch.tensor([len(span.slots)], device=query_THD.device)
        slots_BL = _whole_blocks(span.slots.unsqueeze(0))
        mixed_BNHD = _attend(query_BNHD, keys_SKD, values_SKD, slots_BL, lengths_B, sight, span.tree)
        out_THD[span.begin : span.end] = mixed_BNHD[0]
    return out_THD


class _Sight(NamedTuple):
    """How a query looks at its context; see the op's arguments."""

    scale: float
    window: int
    softcap: float


def _singles(plan: AttentionPlan) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Rows of one token, those with equally many blocks together: rows, slots, lengths of the contexts."""
    if not len(plan.single_rows):
        return
    longest = plan.single_slots.shape[1]
    lengths = torch.full_like(plan.single_rows, longest)
    if plan.single_mask is not None:
        lengths = plan.single_mask[:, 0, 0].sum(dim=-1)
    blocks = (lengths + BLOCK - 1) // BLOCK
    for num_blocks in blocks.unique().tolist():
        chosen = (blocks == num_blocks).nonzero()[:, 0]
        yield plan.single_rows[chosen], _whole_blocks(plan.single_slots[chosen, : num_blocks * BLOCK]), lengths[chosen]


def _whole_blocks(slots_BL: torch.Tensor) -> torch.Tensor:
    """A slot of the sequence's own stands for those that are not there yet."""
    missing = -slots_BL.shape[1] % BLOCK
    return torch.cat([slots_BL, slots_BL[:, -1:].expand(-1, missing)], dim=1) if missing else slots_BL


def _attend(
    query_BNHD: torch.Tensor,
    keys_SKD: torch.Tensor,
    values_SKD: torch.Tensor,
    slots_BL: torch.Tensor,
    lengths_B: torch.Tensor,
    sight: _Sight,
    tree: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last N positions of sequences whose whole context lies in `slots_BL`; the last of one may be a tree."""
    num_sequences, num_queries, num_heads, head_dim = query_BNHD.shape
    num_kv_heads = keys_SKD.shape[1]
    group = num_heads // num_kv_heads
    num_rows = num_queries * group
    rows = padded(num_rows)
    batch = num_sequences * num_kv_heads
    query_RMD = query_BNHD.new_zeros(batch, rows, head_dim)
    grouped_BKNGD = query_BNHD.view(num_sequences, num_queries, num_kv_heads, group, head_dim).transpose(1, 2)
    query_RMD[:, :num_rows] = grouped_BKNGD.reshape(batch, num_rows, head_dim) * sight.scale
    blocks = rows // ROWS
    last_B1 = (lengths_B - 1)[:, None]
    back_M = torch.zeros(rows, dtype=torch.int64, device=slots_BL.device)
    back_M[:num_rows] = torch.arange(num_queries - 1, -1, -1, device=slots_BL.device).repeat_interleave(group)
    place_BM = last_B1 - back_M
    length = int(lengths_B[0]) if tree is not None else 0
    hidden_by_tree_ML, positions_L = _in_tree(tree, place_BM[0], length, slots_BL.shape[1])
    position_BM = positions_L[place_BM]

    # Finite, so that a block of which a row sees nothing leaves its sums as they are, to the bit.
    top_RM1 = query_RMD.new_full((batch, rows, 1), torch.finfo(query_RMD.dtype).min)
    mass_RM1 = torch.zeros_like(top_RM1)
    mixed_RMD = torch.zeros_like(query_RMD)
    for begin in range(0, slots_BL.shape[1], BLOCK):
        block_BL = slots_BL[:, begin : begin + BLOCK]
        key_RLD = keys_SKD[block_BL].transpose(1, 2).reshape(batch, BLOCK, head_dim)
        value_RLD = values_SKD[block_BL].transpose(1, 2).reshape(batch, BLOCK, head_dim)
        block = slice(begin, begin + BLOCK)
        hidden_BML = torch.arange(begin, begin + BLOCK, device=slots_BL.device) > place_BM[:, :, None]
        if hidden_by_tree_ML is not None:
            hidden_BML |= hidden_by_tree_ML[:, block]
        if sight.window:
            hidden_BML |= positions_L[block] <= position_BM[:, :, None] - sight.window
        hidden_RML = hidden_BML.repeat_interleave(num_kv_heads, dim=0)
        score_RML = _products(query_RMD, key_RLD.transpose(1, 2), blocks)
        if sight.softcap:
            score_RML = torch.tanh(score_RML / sight.softcap) * sight.softcap
        score_RML = score_RML.masked_fill_(hidden_RML, -torch.inf)
        new_top = torch.maximum(top_RM1, score_RML.amax(dim=-1, keepdim=True))
        weight_RML = torch.exp(score_RML - new_top)
        fade = torch.exp(top_RM1 - new_top)
        mass_RM1 = mass_RM1 * fade + weight_RML.sum(dim=-1, keepdim=True)
        mixed_RMD = mixed_RMD * fade + _products(weight_RML, value_RLD, blocks)
        top_RM1 = new_top
    mixed_RMD = (mixed_RMD / mass_RM1)[:, :num_rows]
    mixed_BKNGD = mixed_RMD.reshape(num_sequences, num_kv_heads, num_queries, group, head_dim)
    return mixed_BKNGD.transpose(1, 2).reshape(query_BNHD.shape)


def _in_tree(
    tree: torch.Tensor | None, place_M: torch.Tensor, length: int, num_slots: int
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Of queries at places `place_M` of a sequence of `length` that ends in a tree: what the tree hides from each
    (`[M, L]`; `None` without one), and the position of each place in its text."""
    positions_L = torch.arange(num_slots, device=place_M.device)
    if tree is None:
        return None, positions_L
    first = length - len(tree)
    positions_L[first:length] = first + tree.sum(dim=1) - 1
    hidden_ML = torch.zeros(len(place_M), num_slots, dtype=torch.bool, device=place_M.device)
    of_tree = place_M >= first
    hidden_ML[of_tree, first:length] = ~tree[place_M[of_tree] - first]
    return hidden_ML, positions_L


def _products(left_RML: torch.Tensor, right_RLN: torch.Tensor, blocks: int) -> torch.Tensor:
    """Batched product, of `ROWS` rows each."""
    if blocks == 1:
        return torch.bmm(left_RML, right_RLN)
    batch, rows, size = left_RML.shape
    split = left_RML.reshape(batch * blocks, ROWS, size)
    return torch.bmm(split, right_RLN.repeat_interleave(blocks, dim=0)).view(batch, rows, -1)
