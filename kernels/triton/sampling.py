"""Drawing a token from each row of logits, in Triton, without a sort and without the host.

Owns the draw that `runtime/device_sampler.py` asks for: greedy, or by temperature, top-k, top-p and min-p with a
uniform number per row, under a packed mask where a row has one. One program per row; each pass reads the row once: one
for the largest, one for the sum, about a dozen that close in on the smallest logit that is kept (where top-k or top-p
cut), two for the draw. What a row gets does not depend on the others.

The kept tokens are those of `runtime/sampler.py` (ties rank by id). They are drawn from in the order of their ids,
there in that of their probability: the same distribution, but not the same token for the same uniform number.

Besides, what turns logits into log-probabilities (`log_sums`), and what a step finds on the device: ids that the step
before drew (`follow`), entries of page tables (`enter`).

Shapes: R rows of logits, V vocabulary, B rows that are drawn, M rows of packed masks, W words of each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

INVALID = -1
"""Of a row with a NaN, or without a finite logit."""
DENIED = -2
"""Of a row whose mask leaves nothing."""
FIELDS = 7
"""Numbers per drawn row: its row of logits, that of its mask (-1: none), temperature (0: greedy), top-k (0: off),
top-p, min-p, uniform number."""
_BLOCK = 8192


@triton.jit
def _logits(row, words, masked, first, V, BLOCK: tl.constexpr):
    """A block of a row as it is, and with -infinity where its mask denies; ids of the block."""
    ids = first + tl.arange(0, BLOCK)
    inside = ids < V
    raw = tl.load(row + ids, mask=inside, other=float("-inf"))
    word = tl.load(words + ids // 32, mask=ids < masked, other=-1)
    allowed = ((word >> (ids % 32)) & 1) != 0
    return raw, tl.where(allowed, raw, float("-inf")), ids


@triton.jit(do_not_specialize=["B", "stride_words"])
def _draw(
    logits,
    stride,
    fields,
    words,
    stride_words,
    codes,
    ids_out,
    B,
    V,
    BLOCK: tl.constexpr,
):
    """One row: its token, or why there is none; and an id that is valid whatever came of it."""
    b = tl.program_id(0)
    row = logits + tl.load(fields + b).to(tl.int64) * stride
    mask_row = tl.load(fields + B + b).to(tl.int64)
    masked = tl.where(mask_row >= 0, V, 0)  # ids below are masked
    row_words = words + tl.maximum(mask_row, 0) * stride_words
    temperature = tl.load(fields + 2 * B + b).to(tl.float32)
    top_k = tl.load(fields + 3 * B + b).to(tl.int32)
    top_p = tl.load(fields + 4 * B + b)
    min_p = tl.load(fields + 5 * B + b).to(tl.float32)
    uniform = tl.load(fields + 6 * B + b)

    # Kept per lane of a block and put together at the end, so that nothing waits within a pass.
    top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    top_ids = tl.zeros((BLOCK,), dtype=tl.int32)
    raw_top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    nans = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, V, BLOCK):
        raw, x, ids = _logits(row, row_words, masked, first, V, BLOCK)
        nans |= (raw != raw).to(tl.int32)
        raw_top = tl.maximum(raw_top, raw)
        top_ids = tl.where(x > top, ids, top_ids)
        top = tl.maximum(top, x)
    best = tl.max(top, axis=0)
    best_id = tl.min(tl.where(top == best, top_ids, V), axis=0)
    num_nan = tl.sum(nans, axis=0)
    raw_best = tl.max(raw_top, axis=0)
    code = best_id
    if (num_nan > 0) | (raw_best == float("-inf")):
        code = -1
    elif best == float("-inf"):
        code = -2
    elif (temperature > 0.0) & (best < float("inf")):
        code = _random(
            row, row_words, masked, best, best_id, temperature, top_k, top_p, min_p, uniform, V, BLOCK
        )  # fmt: skip
    tl.store(codes + b, code)
    tl.store(ids_out + b, tl.maximum(code, 0).to(tl.int64))


@triton.jit
def _random(
    row,
    words,
    masked,
    best,
    best_id,
    temperature,
    top_k,
    top_p,
    min_p,
    uniform,
    V,
    BLOCK: tl.constexpr,
):
    """The token of a row whose largest logit `best` is finite."""
    scale = 1.0 / temperature
    # Weights are probabilities but for a factor: that of the most probable token is 1.
    wanted_mass = tl.full((), float("inf"), dtype=tl.float64)
    wanted_count = tl.where(top_k > 0, top_k, 2147483647)
    threshold = tl.full((), float("-inf"), dtype=tl.float32)
    if (top_k > 0) | (top_p < 1.0):
        masses = tl.zeros((BLOCK,), dtype=tl.float32)
        least = tl.zeros((BLOCK,), dtype=tl.float32) + best
        for first in range(0, V, BLOCK):
            _, x, _ = _logits(row, words, masked, first, V, BLOCK)
            masses += tl.exp((x - best) * scale)
            least = tl.minimum(least, tl.where(x > float("-inf"), x, best))
        low = tl.min(least, axis=0)  # the smallest logit that has a weight
        if top_p < 1.0:
            wanted_mass = tl.sum(masses.to(tl.float64), axis=0) * top_p
        # The largest logit from which on upwards there is enough. `low` is one that is low enough, unless none is;
        # `high` is the largest that may be.
        high = best
        while low < high:
            middle = low + (high - low) / 2
            middle = tl.where(middle > low, middle, high)
            masses = tl.zeros((BLOCK,), dtype=tl.float32)
            counts = tl.zeros((BLOCK,), dtype=tl.int32)
            above = tl.zeros((BLOCK,), dtype=tl.float32) + high
            below = tl.zeros((BLOCK,), dtype=tl.float32) + low
            for first in range(0, V, BLOCK):
                _, x, _ = _logits(row, words, masked, first, V, BLOCK)
                is_above = x >= middle
                masses += tl.where(is_above, tl.exp((x - best) * scale), 0.0)
                counts += is_above.to(tl.int32)
                above = tl.minimum(above, tl.where(is_above, x, high))
                below = tl.maximum(below, tl.where(is_above, low, x))
            is_enough = tl.sum(masses.to(tl.float64), axis=0) >= wanted_mass
            is_enough |= tl.sum(counts, axis=0) >= wanted_count
            low = tl.where(is_enough, tl.min(above, axis=0), low)
            high = tl.where(is_enough, high, tl.max(below, axis=0))
        threshold = low
    # What is kept: all above the threshold, the first of those on it, nothing below.
    masses = tl.zeros((BLOCK,), dtype=tl.float32)
    counts = tl.zeros((BLOCK,), dtype=tl.int32)
    ties = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, V, BLOCK):
        _, x, _ = _logits(row, words, masked, first, V, BLOCK)
        weight = tl.exp((x - best) * scale)
        is_above = (x > threshold) & (weight >= min_p)
        masses += tl.where(is_above, weight, 0.0)
        counts += is_above.to(tl.int32)
        ties += (x == threshold).to(tl.int32)
    mass = tl.sum(masses.to(tl.float64), axis=0)
    count = tl.sum(counts, axis=0)
    tie = tl.exp((threshold - best) * scale)
    num_ties = 0
    if (threshold > float("-inf")) & (tie >= min_p):
        missing = tl.minimum((wanted_mass - mass) / tie, 2147483646.0)
        num_ties = tl.minimum(wanted_count - count, tl.ceil(missing).to(tl.int32))
    num_ties = tl.maximum(num_ties, (count == 0).to(tl.int32))
    left = tl.minimum(num_ties, tl.sum(ties, axis=0))
    target = uniform * (mass + left * tie.to(tl.float64))
    token = -1
    last = best_id  # of those that are kept, as far as looked at
    passed = tl.zeros((), dtype=tl.float64)
    for first in range(0, V, BLOCK):
        if token < 0:
            _, x, ids = _logits(row, words, masked, first, V, BLOCK)
            weight = tl.exp((x - best) * scale)
            is_tie = x == threshold
            is_above = (x > threshold) & (weight >= min_p)
            here = tl.minimum(tl.sum(is_tie.to(tl.int32), axis=0), left)
            added = tl.sum(tl.where(is_above, weight, 0.0), axis=0).to(tl.float64) + here * tie.to(tl.float64)
            if passed + added > target:
                is_kept = is_above | (is_tie & (tl.cumsum(is_tie.to(tl.int32), axis=0) <= left))
                sums = tl.cumsum(tl.where(is_kept, weight, 0.0).to(tl.float64), axis=0)
                token = tl.min(tl.where(is_kept & (passed + sums > target), ids, V), axis=0)
                token = tl.where(token < V, token, tl.max(tl.where(is_kept, ids, -1), axis=0))
            last_here = tl.max(tl.where(is_above | (is_tie & (here > 0)), ids, -1), axis=0)
            last = tl.where(last_here >= 0, last_here, last)
            passed += added
            left -= here
    # Sums in another order may just miss the target: then it is the last that is kept.
    return tl.where(token < 0, last, token)


def draw(
    logits_RV: torch.Tensor, fields_FB: torch.Tensor, words_MW: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of each row, `[B]` int32, or `INVALID` or `DENIED`; and `[B]` int64, the same with 0 for those.

    Args:
        logits_RV: float32, rows contiguous; not changed.
        fields_FB: float64, see `FIELDS`.
        words_MW: packed masks, int32, as for `apply_bitmask`; empty where no row has one.
        vocab_size: ids that may be drawn.
    """
    num_rows = fields_FB.shape[1]
    codes = torch.empty(num_rows, dtype=torch.int32, device=logits_RV.device)
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
    if num_rows:
        _draw[(num_rows,)](
            logits_RV, logits_RV.stride(0), fields_FB, words_MW, words_MW.stride(0) if words_MW.numel() else 0,
            codes, ids, num_rows, vocab_size, BLOCK=_BLOCK, num_warps=16,
        )  # fmt: skip
    return codes, ids


@triton.jit
def _log_sum(logits, stride, rows, sums, V, BLOCK: tl.constexpr):
    n = tl.program_id(0)
    row = logits + tl.load(rows + n).to(tl.int64) * stride
    top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for first in range(0, V, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.load(row + ids, mask=ids < V, other=float("-inf")))
    best = tl.max(top, axis=0)
    masses = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, V, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        masses += tl.exp(tl.load(row + ids, mask=ids < V, other=float("-inf")) - best)
    tl.store(sums + n, best + tl.log(tl.sum(masses, axis=0)))


def log_sums(logits_RV: torch.Tensor, rows_N: torch.Tensor) -> torch.Tensor:
    """Logarithm of the sum of a row's exponentials, `[N]`, what its logits exceed their log-probabilities by; NaN for a
    row with a NaN or without a finite logit. A row's bits do not depend on the others.

    Args:
        logits_RV: float32, rows contiguous.
        rows_N: which of them.
    """
    sums = torch.empty(len(rows_N), dtype=torch.float32, device=logits_RV.device)
    if len(rows_N):
        _log_sum[(len(rows_N),)](
            logits_RV, logits_RV.stride(0), rows_N, sums, logits_RV.shape[1], BLOCK=_BLOCK, num_warps=16
        )
    return sums


@triton.jit
def _follow(ids, sources, drawn, T, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + rows, mask=rows < T, other=-1)
    follows = source >= 0
    token = tl.load(drawn + source, mask=follows, other=0)
    tl.store(ids + rows, token.to(ids.dtype.element_ty), mask=follows)


def follow(ids_T: torch.Tensor, sources_T: torch.Tensor, drawn: torch.Tensor) -> None:
    """Put `drawn[source]` in the place of the ids of a step that have a source (not negative), in place."""
    block = 256
    _follow[(triton.cdiv(len(ids_T), block),)](ids_T, sources_T, drawn, len(ids_T), BLOCK=block, num_warps=2)


@triton.jit
def _enter(table, targets, values, U, BLOCK: tl.constexpr):
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets + ids, mask=ids < U, other=-1)
    tl.store(table + target, tl.load(values + ids, mask=ids < U, other=0), mask=target >= 0)


def enter(table: torch.Tensor, targets_U: torch.Tensor, values_U: torch.Tensor) -> None:
    """Put values in their places of a table, in place; a negative place is none."""
    block = 256
    if len(targets_U):
        _enter[(triton.cdiv(len(targets_U), block),)](
            table, targets_U, values_U, len(targets_U), BLOCK=block, num_warps=2
        )
