"""The kernels of paged attention in Triton: rows of one token, prefixes of groups, chunks in blocks of queries, and
chunks of a few tokens, such as drafts that are verified. `attention.py` has the plans and launches them.

All do the same inside (`attend`): go through keys of one head, block by block, with a running softmax (base 2). What is
cut into parts leaves weighted values, the largest score and the sum of weights of each part; `join` and `gather` put
such parts together. Launches may overlap (`chaining.py`).

Shapes: as in `attention.py`; a program has M queries, rows and heads together.
"""

from __future__ import annotations

import triton
import triton.language as tl

# How much of a block of keys each query sees.
_ALL = tl.constexpr(0)
_INSIDE = tl.constexpr(1)
_CAUSAL = tl.constexpr(2)
_TREE = tl.constexpr(3)


@triton.jit
def attend(
    query_MD,
    mixed,
    largest,
    total,
    keys,
    values,
    pages,
    begin,
    end,
    stride_slot,
    scale,
    last_M,
    tree,
    low_M,
    high_M,
    SEES: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Look at keys `begin .. end` of one head too: all of them (whole blocks), those up to `end`, of these each row `m`
    up to place `last_M`, or of these behind `tree` those of its bits.

    Returns the weighted values (not divided), the largest score (base 2) and the sum of weights, as they come in.
    """
    ids_d = tl.arange(0, D)
    for first in range(begin, end, BLOCK_KEYS):
        places = first + tl.arange(0, BLOCK_KEYS)
        if SEES == _ALL:
            page = tl.load(pages + places // PAGE)
            slot = page.to(tl.int64) * PAGE + places % PAGE
            where = slot[:, None] * stride_slot + ids_d[None, :]
            key = tl.load(keys + where)
            value = tl.load(values + where)
        else:
            inside = places < end
            page = tl.load(pages + places // PAGE, mask=inside, other=0)
            slot = page.to(tl.int64) * PAGE + places % PAGE
            where = slot[:, None] * stride_slot + ids_d[None, :]
            key = tl.load(keys + where, mask=inside[:, None], other=0.0)
            value = tl.load(values + where, mask=inside[:, None], other=0.0)
        scores = tl.dot(query_MD, tl.trans(key), input_precision=PRECISION)
        if SEES == _INSIDE:
            scores = tl.where(inside[None, :], scores, float("-inf"))
        elif SEES != _ALL:
            visible = inside[None, :] & (places[None, :] <= last_M[:, None])
            if SEES == _TREE:
                bit = (places - tree)[None, :]
                bits = tl.where(bit < 32, low_M[:, None], high_M[:, None])
                visible = visible & ((bit < 0) | (((bits >> (bit & 31)) & 1) == 1))
            scores = tl.where(visible, scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, axis=1) * scale)
        known = now
        if SEES != _ALL:
            known = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(scores * scale - known[:, None])
        shrink = tl.exp2(largest - known)
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = tl.dot(weights.to(value.dtype), value, mixed * shrink[:, None], input_precision=PRECISION)
        largest = now
    return mixed, largest, total


@triton.jit
def join(mixed, largest, total, partial, sums, part, more, ids_d, D: tl.constexpr):
    """Put the partial results `part` (`[M]`) beside what there is, for rows that have `more`."""
    top = tl.load(sums + part * 2, mask=more, other=float("-inf"))
    weight = tl.load(sums + part * 2 + 1, mask=more, other=0.0)
    other = tl.load(partial + part[:, None].to(tl.int64) * D + ids_d[None, :], mask=more[:, None], other=0.0)
    now = tl.maximum(largest, top)
    known = tl.where(now == float("-inf"), 0.0, now)
    fade = tl.exp2(largest - known)
    share = tl.exp2(top - known)
    return mixed * fade[:, None] + other * share[:, None], now, total * fade + weight * share


@triton.jit
def own_share(length, first, SPLITS: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Keys of each part of what a row reads by itself; parts behind the last key are empty."""
    return tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK_KEYS) * BLOCK_KEYS


@triton.jit
def attend_singles(
    query,
    keys,
    values,
    out,
    partial,
    sums,
    rows,
    row_pages,
    row_lengths,
    pages,
    row_shared,
    row_parts,
    shared_partial,
    shared_sums,
    stride_slot,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARED: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One part of what one row reads by itself, for the query heads that share a key head. What its group reads is
    joined with it here, unless it is put together `APART`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        # The kernel of the groups had waited for everything before it when this one was launched.
        if not SHARED:
            tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(row_lengths + b)
    first = 0
    if SHARED:
        first = tl.load(row_shared + b)
    share = own_share(length, first, SPLITS, BLOCK_KEYS)
    begin = first + split * share
    end = tl.minimum(begin + share, length)
    ids_g = tl.arange(0, BLOCK_G)
    ids_d = tl.arange(0, D)
    row = tl.load(rows + b).to(tl.int64)
    heads = (row * H + head * G + ids_g)[:, None] * D + ids_d[None, :]
    is_head = ids_g < G
    query_GD = tl.load(query + heads, mask=is_head[:, None], other=0.0)
    largest = tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_G,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK_G, D), dtype=tl.float32)
    mixed, largest, total = attend(
        query_GD, mixed, largest, total, keys + head * D, values + head * D, pages + tl.load(row_pages + b), begin, end,
        stride_slot, scale, ids_g, 0, ids_g, ids_g, _INSIDE, PAGE, D, BLOCK_KEYS, PRECISION,
    )  # fmt: skip
    if PDL and SHARED:
        if APART:
            # Nothing of the groups is read here, but this must not be over before their kernel: the last program waits.
            is_last = (b == tl.num_programs(0) - 1) & (head == tl.num_programs(1) - 1)
            if is_last:
                tl.extra.cuda.gdc_wait()
        else:
            tl.extra.cuda.gdc_wait()
    if not APART:
        if SHARED:
            part = tl.load(row_parts + b * 3)
            stride = tl.load(row_parts + b * 3 + 1)
            count = tl.load(row_parts + b * 3 + 2)
            for i in range(count):
                place = (part + i * stride) * H + head * G + ids_g
                mixed, largest, total = join(
                    mixed, largest, total, shared_partial, shared_sums, place, is_head, ids_d, D
                )
        result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + heads, result.to(out.dtype.element_ty), mask=is_head[:, None])
    else:
        part = (b * SPLITS + split) * H + head * G + ids_g
        tl.store(partial + part[:, None].to(tl.int64) * D + ids_d[None, :], mixed, mask=is_head[:, None])
        tl.store(sums + part * 2, largest, mask=is_head)
        tl.store(sums + part * 2 + 1, total, mask=is_head)


@triton.jit
def merge_splits(
    partial,
    sums,
    out,
    rows,
    row_lengths,
    row_shared,
    row_parts,
    shared_partial,
    shared_sums,
    H: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Put one row's and head's parts together, and those of its group, some at a time."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(row_lengths + b)
    first = 0
    if SHARED:
        first = tl.load(row_shared + b)
    count = tl.cdiv(length - first, tl.maximum(own_share(length, first, SPLITS, BLOCK_KEYS), 1))
    ids_d = tl.arange(0, D)
    largest = tl.full((1,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((1,), dtype=tl.float32)
    mixed = tl.zeros((1, D), dtype=tl.float32)
    mixed, largest, total = gather(
        mixed, largest, total, partial, sums, b * SPLITS * H + head, H, count, ids_d, D, BLOCK_PARTS
    )
    if SHARED:
        part = tl.load(row_parts + b * 3)
        stride = tl.load(row_parts + b * 3 + 1)
        count = tl.load(row_parts + b * 3 + 2)
        mixed, largest, total = gather(
            mixed,
            largest,
            total,
            shared_partial,
            shared_sums,
            part * H + head,
            stride * H,
            count,
            ids_d,
            D,
            BLOCK_PARTS,
        )
    row = tl.load(rows + b).to(tl.int64)
    result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    places = (row * H + head) * D + tl.arange(0, 1)[:, None] + ids_d[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty))


@triton.jit
def gather(
    mixed, largest, total, partial, sums, part, stride, count, ids_d, D: tl.constexpr, BLOCK_PARTS: tl.constexpr
):
    """Put `count` partial results from `part` on, `stride` apart, beside what there is of one row."""
    for first in range(0, count, BLOCK_PARTS):
        ids = first + tl.arange(0, BLOCK_PARTS)
        is_part = ids < count
        place = part + ids * stride
        top = tl.load(sums + place * 2, mask=is_part, other=float("-inf"))
        weight = tl.load(sums + place * 2 + 1, mask=is_part, other=0.0)
        others = tl.load(partial + place[:, None].to(tl.int64) * D + ids_d[None, :], mask=is_part[:, None], other=0.0)
        now = tl.maximum(largest, tl.max(top, axis=0))
        known = tl.where(now == float("-inf"), 0.0, now)
        share = tl.exp2(top - known)
        fade = tl.exp2(largest - known)
        mixed = mixed * fade[:, None] + tl.sum(others * share[:, None], axis=0)[None, :]
        total = total * fade + tl.sum(weight * share, axis=0)
        largest = now
    return mixed, largest, total


@triton.jit
def attend_groups(
    query,
    keys,
    values,
    partial,
    sums,
    rows,
    row_pages,
    pages,
    members,
    items,
    stride_slot,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One part of what some rows of a group have in common, for their query heads that share a key head."""
    if PDL:
        # In this order: the rows' own keys are read by a kernel that begins once all programs here have waited.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    item = items + tl.program_id(0) * 6
    head = tl.program_id(1)
    count = tl.load(item + 1)
    if count > 0:
        ids_m = tl.arange(0, BLOCK_M)
        ids_d = tl.arange(0, D)
        member = ids_m // G
        is_row = member < count
        b = tl.load(members + tl.load(item) + member, mask=is_row, other=0)
        row = tl.load(rows + b, mask=is_row, other=0).to(tl.int64)
        of_head = head * G + ids_m % G
        query_MD = tl.load(query + (row * H + of_head)[:, None] * D + ids_d[None, :], mask=is_row[:, None], other=0.0)
        begin = tl.load(item + 3)
        end = tl.load(item + 4)
        whole = begin + (end - begin) // BLOCK_KEYS * BLOCK_KEYS
        own_pages = pages + tl.load(row_pages + tl.load(item + 2))
        largest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        mixed = tl.zeros((BLOCK_M, D), dtype=tl.float32)
        mixed, largest, total = attend(
            query_MD, mixed, largest, total, keys + head * D, values + head * D, own_pages, begin, whole, stride_slot,
            scale, ids_m, 0, ids_m, ids_m, _ALL, PAGE, D, BLOCK_KEYS, PRECISION,
        )  # fmt: skip
        mixed, largest, total = attend(
            query_MD, mixed, largest, total, keys + head * D, values + head * D, own_pages, whole, end, stride_slot,
            scale, ids_m, 0, ids_m, ids_m, _INSIDE, PAGE, D, BLOCK_KEYS, PRECISION,
        )  # fmt: skip
        part = (tl.load(item + 5) + member) * H + of_head
        tl.store(partial + part[:, None].to(tl.int64) * D + ids_d[None, :], mixed, mask=is_row[:, None])
        tl.store(sums + part * 2, largest, mask=is_row)
        tl.store(sums + part * 2 + 1, total, mask=is_row)


@triton.jit
def attend_blocks(
    query,
    keys,
    values,
    out,
    blocks,
    pages,
    trees,
    stride_slot,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_TREES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of queries of one chunk and head, over all keys up to the last of them."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = blocks + tl.program_id(0) * 6
    head = tl.program_id(1)
    first_row = tl.load(block).to(tl.int64)
    count = tl.load(block + 1)
    start = tl.load(block + 2)
    ids_m = tl.arange(0, BLOCK_M)
    ids_d = tl.arange(0, D)
    places = ((first_row + ids_m) * H + head)[:, None] * D + ids_d[None, :]
    is_query = ids_m < count
    query_MD = tl.load(query + places, mask=is_query[:, None], other=0.0)
    own_pages = pages + tl.load(block + 3)
    keys += head // G * D
    values += head // G * D
    # Keys that all queries see come first, in whole blocks.
    seen_by_all = start + 1
    tree = 0
    low_M = ids_m
    high_M = ids_m
    if HAS_TREES:
        tree = tl.load(block + 4)
        seen_by_all = tl.minimum(seen_by_all, tree)
        in_tree = is_query & (start + ids_m >= tree)
        own_bits = trees + (tl.load(block + 5) + ids_m) * 2
        low_M = tl.load(own_bits, mask=in_tree, other=-1)
        high_M = tl.load(own_bits + 1, mask=in_tree, other=-1)
    whole = seen_by_all // BLOCK_KEYS * BLOCK_KEYS
    largest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    mixed, largest, total = attend(
        query_MD, mixed, largest, total, keys, values, own_pages, 0, whole, stride_slot, scale,
        ids_m, 0, ids_m, ids_m, _ALL, PAGE, D, BLOCK_KEYS, PRECISION,
    )  # fmt: skip
    mixed, largest, total = attend(
        query_MD, mixed, largest, total, keys, values, own_pages, whole, start + count, stride_slot, scale,
        start + ids_m, tree, low_M, high_M, _TREE if HAS_TREES else _CAUSAL, PAGE, D, BLOCK_KEYS, PRECISION,
    )  # fmt: skip
    result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=is_query[:, None])


@triton.jit
def attend_runs(
    query,
    keys,
    values,
    out,
    partial,
    sums,
    runs,
    pages,
    trees,
    stride_slot,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_TREES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One part of the context of a chunk of up to `QUERIES` tokens, for all of them and the query heads that share a
    key head. Chunks are described as blocks of queries are."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    r = tl.program_id(0)
    run = runs + r * 6
    head = tl.program_id(1)
    split = tl.program_id(2)
    first_row = tl.load(run).to(tl.int64)
    count = tl.load(run + 1)
    start = tl.load(run + 2)
    ids_m = tl.arange(0, BLOCK_M)
    ids_d = tl.arange(0, D)
    token = ids_m // G
    of_head = head * G + ids_m % G
    is_query = token < count
    places = ((first_row + token) * H + of_head)[:, None] * D + ids_d[None, :]
    query_MD = tl.load(query + places, mask=is_query[:, None], other=0.0)
    tree = 0
    low_M = ids_m
    high_M = ids_m
    if HAS_TREES:
        tree = tl.load(run + 4)
        in_tree = is_query & (start + token >= tree)
        own_bits = trees + (tl.load(run + 5) + token) * 2
        low_M = tl.load(own_bits, mask=in_tree, other=-1)
        high_M = tl.load(own_bits + 1, mask=in_tree, other=-1)
    share = own_share(start + count, 0, SPLITS, BLOCK_KEYS)
    begin = split * share
    end = tl.minimum(begin + share, start + count)
    largest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    mixed, largest, total = attend(
        query_MD, mixed, largest, total, keys + head * D, values + head * D, pages + tl.load(run + 3), begin, end,
        stride_slot, scale, start + token, tree, low_M, high_M, _TREE if HAS_TREES else _CAUSAL, PAGE, D, BLOCK_KEYS,
        PRECISION,
    )  # fmt: skip
    if SPLITS == 1:
        result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + places, result.to(out.dtype.element_ty), mask=is_query[:, None])
    else:
        part = ((r * SPLITS + split) * QUERIES + token) * H + of_head
        tl.store(partial + part[:, None].to(tl.int64) * D + ids_d[None, :], mixed, mask=is_query[:, None])
        tl.store(sums + part * 2, largest, mask=is_query)
        tl.store(sums + part * 2 + 1, total, mask=is_query)


@triton.jit
def merge_runs(
    partial,
    sums,
    out,
    runs,
    H: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Put the parts of one token of a chunk together, for one head."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    r = tl.program_id(0)
    token = tl.program_id(1)
    head = tl.program_id(2)
    run = runs + r * 6
    tokens = tl.load(run + 1)
    if token < tokens:
        length = tl.load(run + 2) + tokens
        count = tl.cdiv(length, own_share(length, 0, SPLITS, BLOCK_KEYS))
        ids_d = tl.arange(0, D)
        largest = tl.full((1,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((1,), dtype=tl.float32)
        mixed = tl.zeros((1, D), dtype=tl.float32)
        first = (r * SPLITS * QUERIES + token) * H + head
        mixed, largest, total = gather(
            mixed, largest, total, partial, sums, first, QUERIES * H, count, ids_d, D, BLOCK_PARTS
        )
        result = mixed / total[:, None]
        row = (tl.load(run).to(tl.int64) + token) * H + head
        tl.store(out + row * D + tl.arange(0, 1)[:, None] + ids_d[None, :], result.to(out.dtype.element_ty))
