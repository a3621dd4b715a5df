"""For which sizes decoding steps and verifications are recorded as CUDA graphs, and what these hold in memory.

Owns the sizes; `gpu_steps.py` and `gpu_verification.py` record and replay. Imports no torch: the memory plan asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sgl.runtime.numerics import Kernels

GRAPH_ROWS = (
    1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512
)  # fmt: skip
"""Numbers of rows that graphs are recorded for; a step is filled up to the next."""
MAX_ROWS = 256
"""Rows up to which they are, unless the user says otherwise: beyond, launching kernels one by one costs little."""
PAGES_PER_ROW = 8192
"""Entries of page tables on the device, per row; steps that need more send their tables and are launched kernel by
kernel."""
INTEGERS_PER_ROW = 8
"""What a graph is sent per row, as int32: token, its source, position, slot, first page, length; a new page and its
place."""

VERIFIED_TOKENS = (2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of tokens for which steps of short chunks are recorded where drafts are verified: few, since to record one
costs as much as a hundred steps, and tokens that fill a step up cost little."""
VERIFIED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
VERIFIED_WIDTHS = (4, 16)
"""Tokens of a chunk at most: those of a step decide how its attention is cut."""
MOST_VERIFIED = 48
"""Recorded verifications at most: others are launched kernel by kernel."""
INTEGERS_PER_VERIFIED = 15
"""What a recorded verification is sent per token at most, as int32: nine for the token, six for a row."""


class VerifiedSize(NamedTuple):
    """Of a step in which rows have few tokens each: rows, tokens of a row and of all rows at most."""

    rows: int
    width: int
    tokens: int


def verified_size(num_rows: int, longest: int, num_tokens: int) -> VerifiedSize | None:
    """The smallest size that a step fits into; `None` when it is too large to be recorded.

    Example:
        >>> verified_size(3, 9, 20), verified_size(1, 4, 4), verified_size(2, 40, 41)
        (VerifiedSize(rows=4, width=16, tokens=32), VerifiedSize(rows=1, width=4, tokens=4), None)
    """
    rows = next((each for each in VERIFIED_ROWS if each >= num_rows), 0)
    width = next((each for each in VERIFIED_WIDTHS if each >= longest), 0)
    tokens = next((each for each in VERIFIED_TOKENS if each >= num_tokens), 0)
    return VerifiedSize(rows, width, tokens) if rows and width and tokens else None


def early_verified(most: int) -> tuple[VerifiedSize, ...]:
    """Sizes that are recorded at start, where steps of up to `most` rows are: for each number of rows the largest,
    which any step of so many rows fits into until its own size is recorded.

    Example:
        >>> early_verified(3)
        (VerifiedSize(rows=1, width=16, tokens=16), VerifiedSize(rows=2, width=16, tokens=32), \
VerifiedSize(rows=4, width=16, tokens=64))
    """
    needed = next((i for i, rows in enumerate(VERIFIED_ROWS) if rows >= most), len(VERIFIED_ROWS) - 1)
    width = VERIFIED_WIDTHS[-1]
    rows = VERIFIED_ROWS[: needed + 1] if most else ()
    return tuple(VerifiedSize(each, width, min(width * each, VERIFIED_TOKENS[-1])) for each in rows)


def holding(size: VerifiedSize, sizes: Iterable[VerifiedSize]) -> VerifiedSize | None:
    """The smallest of `sizes` that a step of `size` fits into.

    Example:
        >>> holding(VerifiedSize(2, 4, 8), early_verified(4))
        VerifiedSize(rows=2, width=16, tokens=32)
    """
    fitting = (each for each in sizes if all(has >= needs for has, needs in zip(each, size, strict=True)))
    return min(fitting, key=lambda each: (each.tokens, each.rows, each.width), default=None)


def verified_bytes(vocab_size: int) -> int:
    """What recorded verifications hold: logits in float32, which all of them share, and integers, each its own."""
    return 4 * VERIFIED_TOKENS[-1] * (vocab_size + MOST_VERIFIED * INTEGERS_PER_VERIFIED)


def max_graph_rows(
    device: str, kernels: Kernels, given: int | None, running: int, *, disabled: bool
) -> tuple[int, str]:
    """Rows up to which decoding steps are recorded (0: none are), and why.

    Args:
        given: the user's own number.
        running: most rows of a step.
    """
    if device != "cuda" or kernels != "triton":
        return 0, "only steps of Triton's kernels can be recorded"
    if disabled:
        return 0, "disable_decode_cuda_graph"
    if given is not None:
        return min(given, GRAPH_ROWS[-1]), "as given"
    return min(running, MAX_ROWS), "larger steps gain nothing by being recorded"


def graph_rows(most: int) -> tuple[int, ...]:
    """Sizes of graphs, for steps of up to `most` rows.

    Example:
        >>> graph_rows(20), graph_rows(0)
        ((1, 2, 4, 8, 12, 16, 24), ())
    """
    needed = next((i for i, rows in enumerate(GRAPH_ROWS) if rows >= most), len(GRAPH_ROWS) - 1)
    return GRAPH_ROWS[: needed + 1] if most else ()


def early_rows(most: int) -> tuple[int, ...]:
    """Those that are recorded at start, powers of two and the largest; the others are at their first use.

    Example:
        >>> early_rows(24)
        (1, 2, 4, 8, 16, 24)
    """
    rows = graph_rows(most)
    return tuple(each for each in rows if each & (each - 1) == 0 or each == rows[-1])


def table_entries(most: int) -> int:
    """Entries of page tables that are kept on the device, int32, where steps of up to `most` rows are recorded.

    Example:
        >>> table_entries(20), table_entries(0)
        (196608, 0)
    """
    return max(graph_rows(most), default=0) * PAGES_PER_ROW


def graph_bytes(most: int, vocab_size: int) -> int:
    """What all of them hold: logits in float32 and integers, each its own, and the page tables. The rest they share
    with other steps. A step whose rows read together is recorded beside the one in which each reads for itself."""
    return 4 * (2 * sum(graph_rows(most)) * (vocab_size + INTEGERS_PER_ROW) + table_entries(most))
