"""Attention over KV pages: the plan made once per step on the host, and the torch reference that runs it per layer.

Owns `AttentionPlan`, `kv_write` and `paged_attention`. The model runner makes the plan; each layer of a model writes
the keys and values of the whole step, then attends. That order is the contract that lets a chunk read pages which
another chunk of the same step writes.

A slot is one position in the pool: position `p` of a sequence lies in slot `page_table[p // page_size] * page_size +
p % page_size`. Slots beyond a sequence's end are never read (a padded row repeats a slot of its own sequence), so the
pool need not be cleared and no sequence sees another's NaN.

Shapes: T tokens of the step, S slots of the pool, H query heads, K key/value heads, G = H / K, D head size, B rows of
one token, L longest context among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from sgl.kernels.workspace import rows_at_once


@dataclass(frozen=True)
class Span:
    """Consecutive queries of one sequence: rows `begin .. end` of the step, reading `slots` (its whole context)."""

    begin: int
    end: int
    slots: torch.Tensor
    mask: torch.Tensor | None
    """`[queries, context]`, true where a query may look; `None` when the queries are the whole context."""


@dataclass(frozen=True)
class AttentionPlan:
    """Where the step's tokens are written and what each may read. Made once, used by every layer.

    Chunks of one token are computed together (`single_*`), longer ones one by one (`spans`).
    """

    write_slots: torch.Tensor
    """`[T]`, slot of each token of the step."""
    single_rows: torch.Tensor
    """`[B]`, rows of the step that are chunks of one token."""
    single_slots: torch.Tensor
    """`[B, L]`, their contexts; short ones repeat their own last slot."""
    single_mask: torch.Tensor | None
    """`[B, 1, 1, L]`, true where the slot counts; `None` when all contexts are equally long."""
    spans: tuple[Span, ...]


def plan_attention(
    starts: Sequence[int],
    lengths: Sequence[int],
    page_tables: Sequence[npt.NDArray[np.int32]],
    page_size: int,
    device: torch.device | str = "cpu",
) -> AttentionPlan:
    """Plan a step of chunks: chunk `i` computes positions `starts[i] .. starts[i] + lengths[i]` of its sequence.

    Args:
        page_tables: per chunk the pages of its sequence, at least up to the chunk's end.
    """
    writes: list[npt.NDArray[np.int64]] = []
    rows: list[int] = []
    contexts: list[npt.NDArray[np.int64]] = []
    spans: list[Span] = []
    begin = 0
    for start, length, table in zip(starts, lengths, page_tables, strict=True):
        end = start + length
        slots = slots_of(table, page_size, 0, end)
        writes.append(slots[start:])
        if length == 1:
            rows.append(begin)
            contexts.append(slots)
        else:
            mask = None
            if start > 0:
                mask = torch.ones(length, end, dtype=torch.bool, device=device).tril(diagonal=start)
            spans.append(Span(begin, begin + length, torch.from_numpy(slots).to(device), mask))
        begin += length

    longest = max((len(context) for context in contexts), default=0)
    single_slots = np.empty((len(contexts), longest), dtype=np.int64)
    counts = np.array([len(context) for context in contexts], dtype=np.int64)
    for row, context in enumerate(contexts):
        single_slots[row, : len(context)] = context
        single_slots[row, len(context) :] = context[-1]
    single_mask = None
    if (counts != longest).any():
        single_mask = torch.from_numpy(np.arange(longest) < counts[:, None])[:, None, None, :].to(device)
    return AttentionPlan(
        write_slots=torch.from_numpy(np.concatenate(writes) if writes else np.empty(0, dtype=np.int64)).to(device),
        single_rows=torch.tensor(rows, dtype=torch.int64, device=device),
        single_slots=torch.from_numpy(single_slots).to(device),
        single_mask=single_mask,
        spans=tuple(spans),
    )


def slots_of(page_table: npt.NDArray[np.int32], page_size: int, start: int, end: int) -> npt.NDArray[np.int64]:
    """Slots of a sequence's positions `start .. end - 1`."""
    if page_size == 1:
        return page_table[start:end].astype(np.int64)
    positions = np.arange(start, end)
    return page_table[positions // page_size].astype(np.int64) * page_size + positions % page_size


def kv_write(
    keys_SKD: torch.Tensor,
    values_SKD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    slots_T: torch.Tensor,
) -> None:
    """Store the step's keys and values in the pool of one layer, in place. Slots are distinct."""
    keys_SKD.index_copy_(0, slots_T, key_TKD)
    values_SKD.index_copy_(0, slots_T, value_TKD)


def paged_attention(
    query_THD: torch.Tensor,
    keys_SKD: torch.Tensor,
    values_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
) -> torch.Tensor:
    """Causal attention of every token of the step over its sequence's pages; `[T, H, D]`."""
    _, num_heads, head_dim = query_THD.shape
    num_kv_heads = keys_SKD.shape[1]
    group = num_heads // num_kv_heads
    out_THD = torch.empty_like(query_THD)

    at_once = rows_at_once(plan.single_slots.shape[1])
    for first in range(0, len(plan.single_rows), at_once):
        group_rows = slice(first, first + at_once)
        rows, slots = plan.single_rows[group_rows], plan.single_slots[group_rows]
        # The heads that share a key head become its queries: nothing is repeated in memory.
        query_BKGD = query_THD[rows].view(-1, num_kv_heads, group, head_dim)
        key_BKLD = keys_SKD[slots].transpose(1, 2)
        value_BKLD = values_SKD[slots].transpose(1, 2)
        mask = None if plan.single_mask is None else plan.single_mask[group_rows]
        mixed_BKGD = scaled_dot_product_attention(query_BKGD, key_BKLD, value_BKLD, attn_mask=mask, scale=scale)
        out_THD[rows] = mixed_BKGD.reshape(-1, num_heads, head_dim)

    for span in plan.spans:
        query = query_THD[span.begin : span.end].transpose(0, 1).unsqueeze(0)
        key = keys_SKD[span.slots].transpose(0, 1).repeat_interleave(group, dim=0).unsqueeze(0)
        value = values_SKD[span.slots].transpose(0, 1).repeat_interleave(group, dim=0).unsqueeze(0)
        mixed = scaled_dot_product_attention(
            query, key, value, attn_mask=span.mask, is_causal=span.mask is None, scale=scale
        )
        out_THD[span.begin : span.end] = mixed.squeeze(0).transpose(0, 1)
    return out_THD
