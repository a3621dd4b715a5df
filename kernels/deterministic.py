"""Attention whose result for a query does not depend on anything but the query and its context, to the bit.

Owns the one path of deterministic mode. Called by the layers of a model through the registry when the facts say
`deterministic`. Two things make a sum differ between runs: another order of addition, and a matmul that picks another
inner loop for another number of rows. So keys are taken in blocks of `BLOCK` counted from the sequence's beginning, one
after another with a running softmax (Milakov and Gimelshein 2018), and rows are padded to a multiple of `ROWS`: torch's
matmuls give equal rows for such numbers of rows, and not for others (below 8, and at 9).

Shapes: T tokens of the step, S slots, H query heads, K key/value heads, G = H / K, D head size, M padded rows.
"""

from __future__ import annotations

import torch

from sgl.kernels.attention import AttentionPlan

BLOCK = 64
ROWS = 8


def padded(rows: int) -> int:
    """The next multiple of `ROWS`.

    Example:
        >>> padded(1), padded(8), padded(9)
        (8, 8, 16)
    """
    return -(-rows // ROWS) * ROWS


def paged_attention(
    query_THD: torch.Tensor, keys_SKD: torch.Tensor, values_SKD: torch.Tensor, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """As the op's reference; rows of the step that belong to no chunk (padding) give zeros."""
    out_THD = torch.zeros_like(query_THD)
    for i, row in enumerate(plan.single_rows.tolist()):
        slots = plan.single_slots[i]
        if plan.single_mask is not None:
            slots = slots[plan.single_mask[i, 0, 0]]
        out_THD[row : row + 1] = _attend(query_THD[row : row + 1], keys_SKD, values_SKD, slots, scale)
    for span in plan.spans:
        query = query_THD[span.begin : span.end]
        out_THD[span.begin : span.end] = _attend(query, keys_SKD, values_SKD, span.slots, scale)
    return out_THD


def _attend(
    query_NHD: torch.Tensor, keys_SKD: torch.Tensor, values_SKD: torch.Tensor, slots: torch.Tensor, scale: float
) -> torch.Tensor:
    """The last N positions of a sequence whose whole context lies in `slots`."""
    num_queries, num_heads, head_dim = query_NHD.shape
    num_kv_heads = keys_SKD.shape[1]
    group = num_heads // num_kv_heads
    length = len(slots)
    rows = padded(num_queries * group)
    query_KMD = query_NHD.new_zeros(num_kv_heads, rows, head_dim)
    grouped = query_NHD.view(num_queries, num_kv_heads, group, head_dim).transpose(0, 1)
    query_KMD[:, : num_queries * group] = grouped.reshape(num_kv_heads, num_queries * group, head_dim) * scale
    position_M = torch.full((rows,), length - 1, device=slots.device)
    position_M[: num_queries * group] = torch.arange(
        length - num_queries, length, device=slots.device
    ).repeat_interleave(group)

    top_KM1 = query_KMD.new_full((num_kv_heads, rows, 1), -torch.inf)
    mass_KM1 = torch.zeros_like(top_KM1)
    mixed_KMD = torch.zeros_like(query_KMD)
    for begin in range(0, length, BLOCK):
        block = slots[begin : begin + BLOCK]
        if len(block) < BLOCK:  # a slot of the sequence's own stands for those that are not there yet
            block = torch.cat([block, block[-1:].expand(BLOCK - len(block))])
        key_KBD = keys_SKD[block].transpose(0, 1)
        value_KBD = values_SKD[block].transpose(0, 1)
        hidden = torch.arange(begin, begin + BLOCK, device=slots.device) > position_M[:, None]
        score_KMB = torch.bmm(query_KMD, key_KBD.transpose(1, 2)).masked_fill_(hidden, -torch.inf)
        new_top = torch.maximum(top_KM1, score_KMB.amax(dim=-1, keepdim=True))
        weight_KMB = torch.exp(score_KMB - new_top)
        fade = torch.exp(top_KM1 - new_top)
        mass_KM1 = mass_KM1 * fade + weight_KMB.sum(dim=-1, keepdim=True)
        mixed_KMD = mixed_KMD * fade + torch.bmm(weight_KMB, value_KBD)
        top_KM1 = new_top
    mixed_KMD = (mixed_KMD / mass_KM1)[:, : num_queries * group]
    return mixed_KMD.view(num_kv_heads, num_queries, group, head_dim).transpose(0, 1).reshape(query_NHD.shape)
