"""How much memory the ops that need much take beside their inputs and results, in bytes.

Owns the bounds that the engine plans its memory with, and the constants that make them hold; the ops read the same
constants. Standard library only, so that the client half and `sgl doctor` can plan without torch.
"""

from __future__ import annotations

GATHERED_SLOTS = 65_536
"""Slots of the pool that attention of single tokens gathers at a time. Sequences are taken in groups below it: without
that bound, 64 sequences that share a long prefix would copy it 64 times at once."""

CAPPED_SCORES = 2**21
"""Scores that attention with a soft cap holds at a time, heads times queries times keys; one query's at least."""

NATIVE_SPLIT = 512
"""Keys of one part of a context that the native kernels compute apart (`SPLIT` of attention.h)."""


def rows_at_once(context_len: int) -> int:
    """Sequences of `context_len` tokens that attention of single tokens takes in one go.

    Example:
        >>> rows_at_once(100), rows_at_once(8192), rows_at_once(1_000_000)
        (655, 8, 1)
    """
    return max(1, GATHERED_SLOTS // max(1, context_len))


def decode_attention_bytes(rows: int, context_len: int, num_kv_heads: int, head_dim: int, each: int) -> int:
    """Attention of `rows` single tokens over `context_len` tokens each: keys and values of one group of sequences,
    and for all of them the numbers of the slots and the mask. `each` is the size of a number.

    Example:
        >>> decode_attention_bytes(1, 10, num_kv_heads=2, head_dim=4, each=4)
        730
    """
    group = min(rows, rows_at_once(context_len))
    return 2 * group * context_len * num_kv_heads * head_dim * each + rows * context_len * (8 + 1)


def prefill_attention_bytes(
    num_tokens: int, context_len: int, num_heads: int, num_kv_heads: int, head_dim: int, each: int
) -> int:
    """Attention of `num_tokens` consecutive tokens over `context_len`: keys and values gathered, then repeated for
    every head, and the mask as booleans and as numbers."""
    copies = num_kv_heads + (num_heads if num_heads != num_kv_heads else 0)
    return 2 * context_len * copies * head_dim * each + num_tokens * context_len * (1 + each)


def capped_rows_at_once(num_heads: int, context_len: int) -> int:
    """Queries over `context_len` tokens that attention with a soft cap takes in one go.

    Example:
        >>> capped_rows_at_once(8, 4096), capped_rows_at_once(32, 1_000_000)
        (64, 1)
    """
    return max(1, CAPPED_SCORES // (num_heads * max(1, context_len)))


def capped_attention_bytes(num_heads: int, context_len: int) -> int:
    """What a soft cap adds: scores in their own dtype, in float32 and, once they are probabilities, again in theirs.

    Example:
        >>> capped_attention_bytes(8, 4096)
        25165824
    """
    return 3 * 4 * max(CAPPED_SCORES, num_heads * context_len)


def native_attention_bytes(rows: int, context_len: int, num_heads: int, head_dim: int) -> int:
    """The native kernels' attention of `rows` single tokens: a partial result for each head and `NATIVE_SPLIT` keys.

    Example:
        >>> native_attention_bytes(1, 1000, num_heads=2, head_dim=4)
        352
    """
    return rows * -(-context_len // NATIVE_SPLIT) * num_heads * (head_dim + 18) * 4
