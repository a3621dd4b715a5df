"""Attention over KV pages: the plan made once per step on the host, and the torch reference that runs it per layer.

Owns `AttentionPlan`, `kv_write` and `paged_attention`. The model runner makes the plan; each layer of a model writes
the keys and values of the whole step, then attends. That order is the contract that lets a chunk read pages which
another chunk of the same step writes.

A slot is one position in the pool: position `p` of a sequence lies in slot `page_table[p // page_size] * page_size +
p % page_size`. Slots beyond a sequence's end are never read (a padded row repeats a slot of its own sequence), so the
pool need not be cleared and no sequence sees another's NaN.

A layer may see a part of the context only (`window`), and bound its scores (`softcap`): both are arguments of the op. A
window is another plan over the same slots, so the pool keeps all keys and values.

A chunk may end in a *tree*: up to `MAX_TREE` drafted tokens, of which each sees the cached prefix, the chunk's tokens
before the tree, and of the tree its own ancestors and itself. Which those are is an argument of the plan (`Ancestors`);
what computes is the same op.

What rows of one token have in common at the beginning may be read once for all of them (`cascade_attention`): the plan
says which rows these are (`PrefixGroup`), and the numbers are those of `paged_attention` up to rounding.

Shapes: T tokens of the step, S slots of the pool, H query heads, K key/value heads, G = H / K, D head size, B rows of
one token, L longest context among them, Q queries of one span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from sgl.errors import InternalError
from sgl.kernels.prefix_groups import PrefixGroup
from sgl.kernels.workspace import capped_rows_at_once, rows_at_once

Ancestors = npt.NDArray[np.uint64]
"""Which tokens of a tree each of them sees: bit `j` of row `i` stands for the j-th. A token sees itself; parents come
before their children. See `ancestors_of`."""
MAX_TREE = 64
"""Tokens of a tree at most: one bit each."""


def ancestors_of(parents: Sequence[int]) -> Ancestors:
    """The rows of a tree whose i-th token continues the one at `parents[i]`, or what is before the tree (-1).

    Raises:
        InternalError: more than `MAX_TREE` tokens, or a parent that does not come before its child.

    Example:
        >>> [bin(row) for row in ancestors_of([-1, 0, 0, 1])]
        ['0b1', '0b11', '0b101', '0b1011']
    """
    if len(parents) > MAX_TREE:
        raise InternalError(f"a tree has {len(parents)} tokens; expected at most {MAX_TREE}")
    rows: list[int] = []
    for index, parent in enumerate(parents):
        if not -1 <= parent < index:
            raise InternalError(f"token {index} of a tree has parent {parent}; expected one before it, or -1")
        rows.append((rows[parent] if parent >= 0 else 0) | 1 << index)
    return np.array(rows, dtype=np.uint64)


def chunk_positions(start: int, length: int, ancestors: Ancestors | None = None) -> npt.NDArray[np.int32]:
    """Position of each token of a chunk in its text: in a tree one behind its parent, whatever slot it lies in.

    Example:
        >>> chunk_positions(7, 3).tolist(), chunk_positions(7, 4, ancestors_of([-1, 0, 0])).tolist()
        ([7, 8, 9], [7, 8, 9, 9])
    """
    positions = np.arange(start, start + length, dtype=np.int32)
    if ancestors is not None and len(ancestors):
        depths = np.bitwise_count(ancestors).astype(np.int32)
        positions[-len(ancestors) :] = positions[-len(ancestors)] + depths - 1
    return positions


@dataclass(frozen=True)
class Span:
    """Consecutive queries of one sequence: rows `begin .. end` of the step, reading `slots` (its whole context)."""

    begin: int
    end: int
    slots: torch.Tensor
    mask: torch.Tensor | None
    """`[queries, context]`, true where a query may look; `None` when the queries are the whole context."""
    tree: torch.Tensor | None = None
    """`[N, N]`, true where one of the last N tokens sees another, when these are a tree. It is in `mask`, too."""

    @property
    def positions(self) -> torch.Tensor:
        """`[context]`, each key's position in its text."""
        positions_L = torch.arange(len(self.slots), device=self.slots.device)
        if self.tree is not None:
            size = len(self.tree)
            positions_L[-size:] = len(self.slots) - size + self.tree.sum(dim=1) - 1
        return positions_L


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
    groups: tuple[PrefixGroup, ...] = ()
    """Of single rows, for `cascade_attention`."""
    _windowed: dict[int, AttentionPlan] = field(default_factory=dict, repr=False, compare=False)

    def windowed(self, window: int) -> AttentionPlan:
        """The plan of layers whose queries see `window` keys, their own included. Made at first use, then kept."""
        if window not in self._windowed:
            slots, mask = self._last_slots(window)
            spans = tuple(_windowed_span(span, window) for span in self.spans)
            self._windowed[window] = replace(self, single_slots=slots, single_mask=mask, spans=spans, _windowed={})
        return self._windowed[window]

    def _last_slots(self, window: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`single_slots` and `single_mask` of the last `window` keys of each context."""
        longest = self.single_slots.shape[1]
        if longest <= window:
            return self.single_slots, self.single_mask
        if self.single_mask is None:
            return self.single_slots[:, -window:], None
        lengths_B1 = self.single_mask[:, 0, 0].sum(dim=-1, keepdim=True)
        positions = (lengths_B1 - window).clamp(min=0) + torch.arange(window, device=lengths_B1.device)
        slots = self.single_slots.gather(1, positions.minimum(lengths_B1 - 1))
        return slots, (positions < lengths_B1)[:, None, None, :]


def _windowed_span(span: Span, window: int) -> Span:
    context, num_queries = len(span.slots), span.end - span.begin
    if context <= window:
        return span
    first_query = context - num_queries
    first_key = max(0, first_query - window + 1)
    positions_L = span.positions
    queries_Q1 = positions_L[first_query:, None]
    mask_QL = positions_L[first_key:] > queries_Q1 - window
    if span.mask is None:
        mask_QL = mask_QL.tril(diagonal=first_query - first_key)
    else:
        mask_QL &= span.mask[:, first_key:]
    return Span(span.begin, span.end, span.slots[first_key:], mask_QL)


def plan_attention(
    starts: Sequence[int],
    lengths: Sequence[int],
    page_tables: Sequence[npt.NDArray[np.int32]],
    page_size: int,
    device: torch.device | str = "cpu",
    ancestors: Sequence[Ancestors | None] | None = None,
    groups: Sequence[PrefixGroup] = (),
) -> AttentionPlan:
    """Plan a step of chunks: chunk `i` computes positions `starts[i] .. starts[i] + lengths[i]` of its sequence.

    Args:
        page_tables: per chunk the pages of its sequence, at least up to the chunk's end.
        ancestors: per chunk the tree that its last tokens are; `None` where there is none, or for all. A tree lies in
            slots one after another, as if its tokens stood at positions one after another; see `chunk_positions`.
        groups: chunks of one token with a common prefix, counted among such chunks.
    """
    writes: list[npt.NDArray[np.int64]] = []
    rows: list[int] = []
    contexts: list[npt.NDArray[np.int64]] = []
    spans: list[Span] = []
    begin = 0
    trees = [None] * len(starts) if ancestors is None else ancestors
    for start, length, table, bits in zip(starts, lengths, page_tables, trees, strict=True):
        end = start + length
        slots = slots_of(table, page_size, 0, end)
        writes.append(slots[start:])
        if length == 1:
            rows.append(begin)
            contexts.append(slots)
        else:
            mask, tree = None, None
            if start > 0 or bits is not None:
                mask = torch.ones(length, end, dtype=torch.bool, device=device).tril(diagonal=start)
            if mask is not None and bits is not None:
                tree = torch.from_numpy(seen_in_tree(bits, length)).to(device)
                mask[-len(tree) :, -len(tree) :] = tree
            spans.append(Span(begin, begin + length, torch.from_numpy(slots).to(device), mask, tree))
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
        groups=tuple(groups),
    )


def seen_in_tree(ancestors: Ancestors, length: int) -> npt.NDArray[np.bool_]:
    """`[N, N]`, true where the i-th token of a tree sees the j-th.

    Raises:
        InternalError: the tree is longer than its chunk or than `MAX_TREE`, or a token does not see itself, or sees a
            later one.
    """
    size = len(ancestors)
    if not 1 <= size <= min(length, MAX_TREE):
        raise InternalError(f"a tree has {size} tokens; expected 1 to {min(length, MAX_TREE)}, those of its chunk")
    seen = (ancestors[:, None] >> np.arange(size, dtype=np.uint64)) & np.uint64(1) > 0
    if not seen.diagonal().all() or np.triu(seen, 1).any() or (ancestors >> np.uint64(size - 1) > np.uint64(1)).any():
        raise InternalError("a token of a tree must see itself and none behind it; make the rows with ancestors_of")
    return seen


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
    """Store the step's keys and values in the pool of one layer, in place. Slots are distinct, but for those of rows
    that only fill a step up."""
    slots_T = slots_T.to(torch.int64)  # of another plan they may be int32
    keys_SKD.index_copy_(0, slots_T, key_TKD)
    values_SKD.index_copy_(0, slots_T, value_TKD)


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
    """Causal attention of every token of the step over its sequence's pages; `[T, H, D]`.

    Args:
        window: keys that a query sees, its own included; 0 for all.
        softcap: scores are bounded as `softcap * tanh(score / softcap)`; 0 for none.
    """
    _, num_heads, head_dim = query_THD.shape
    if window:
        plan = plan.windowed(window)
    num_kv_heads = keys_SKD.shape[1]
    group = num_heads // num_kv_heads
    out_THD = torch.empty_like(query_THD)

    at_once = rows_at_once(plan.single_slots.shape[1])
    for first in range(0, len(plan.single_rows), at_once):
        group_rows = slice(first, first + at_once)
        rows, slots = plan.single_rows[group_rows], plan.single_slots[group_rows]
        # The heads that share a key head become its queries: nothing is repeated in memory.
        query_BKGD = query_THD[rows].view(-1, num_kv_heads, group, head_dim)
        key_BKLD = keys_SKD[slots].transpose(1, 2).to(query_THD.dtype)
        value_BKLD = values_SKD[slots].transpose(1, 2).to(query_THD.dtype)
        mask = None if plan.single_mask is None else plan.single_mask[group_rows]
        if softcap:
            mixed_BKGD = _capped(query_BKGD, key_BKLD, value_BKLD, mask, scale, softcap)
        else:
            mixed_BKGD = scaled_dot_product_attention(query_BKGD, key_BKLD, value_BKLD, attn_mask=mask, scale=scale)
        out_THD[rows] = mixed_BKGD.reshape(-1, num_heads, head_dim)

    for span in plan.spans:
        query = query_THD[span.begin : span.end].transpose(0, 1).unsqueeze(0)
        key = keys_SKD[span.slots].to(query.dtype).transpose(0, 1).repeat_interleave(group, dim=0).unsqueeze(0)
        value = values_SKD[span.slots].to(query.dtype).transpose(0, 1).repeat_interleave(group, dim=0).unsqueeze(0)
        if softcap:
            mixed = _capped_span(query, key, value, span, scale, softcap)
        else:
            mixed = scaled_dot_product_attention(
                query, key, value, attn_mask=span.mask, is_causal=span.mask is None, scale=scale
            )
        out_THD[span.begin : span.end] = mixed.squeeze(0).transpose(0, 1)
    return out_THD


def cascade_attention(
    query_THD: torch.Tensor, keys_SKD: torch.Tensor, values_SKD: torch.Tensor, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """As `paged_attention`, where each of the plan's groups reads its prefix once: each row's part of it and of its own
    keys are joined by their sums of weights. A row is in one group at most, and its context is longer than the prefix.
    """
    alone = torch.ones(len(plan.single_rows), dtype=torch.bool, device=query_THD.device)
    for group in plan.groups:
        alone[list(group.rows)] = False
    mask = plan.single_mask
    others = replace(
        plan,
        single_rows=plan.single_rows[alone],
        single_slots=plan.single_slots[alone],
        single_mask=None if mask is None else mask[alone],
    )
    out_THD = paged_attention(query_THD, keys_SKD, values_SKD, others, scale)
    for group in plan.groups:
        members, prefix = list(group.rows), group.num_keys
        rows_B = plan.single_rows[members]
        slots_BL = plan.single_slots[members]
        seen = None if mask is None else mask[members][..., prefix:]
        query_BKGD = query_THD[rows_B].unflatten(1, (keys_SKD.shape[1], -1))
        parts = [
            _part(query_BKGD, keys_SKD[slots], values_SKD[slots], scale, visible)
            for slots, visible in ((slots_BL[:1, :prefix], None), (slots_BL[:, prefix:], seen))
        ]
        shares = torch.stack([mass for _, mass in parts]).softmax(dim=0)
        mixed_BKGD = sum(part * share for (part, _), share in zip(parts, shares, strict=True))
        out_THD[rows_B] = torch.as_tensor(mixed_BKGD).flatten(1, 2).to(out_THD.dtype)
    return out_THD


def _part(
    query_BKGD: torch.Tensor,
    key_BLKD: torch.Tensor,
    value_BLKD: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a part of the context, in float32, and the logarithm of its sum of weights (`[B, K, G, 1]`)."""
    key_BKDL = key_BLKD.permute(0, 2, 3, 1).float()
    scores_BKGL = query_BKGD.float() @ key_BKDL * scale
    if mask is not None:
        scores_BKGL = scores_BKGL.masked_fill(~mask, -torch.inf)
    return scores_BKGL.softmax(dim=-1) @ value_BLKD.transpose(1, 2).float(), scores_BKGL.logsumexp(-1, keepdim=True)


def _capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """`scaled_dot_product_attention` with bounded scores, the softmax in float32."""
    scores = (query @ key.transpose(-1, -2)).mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    return scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ value


def _capped_span(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: Span, scale: float, softcap: float
) -> torch.Tensor:
    """Scores are held for some queries at a time: `[H, Q, L]` of a long prompt would be the largest tensor of all."""
    num_heads, num_queries, context = query.shape[1], query.shape[2], key.shape[2]
    mask_QL = span.mask
    if mask_QL is None:
        mask_QL = torch.ones(num_queries, context, dtype=torch.bool, device=query.device).tril()
    at_once = capped_rows_at_once(num_heads, context)
    parts = [
        _capped(query[:, :, rows], key, value, mask_QL[rows], scale, softcap)
        for rows in (slice(first, first + at_once) for first in range(0, num_queries, at_once))
    ]
    return torch.cat(parts, dim=2)
