"""For which numbers of rows decoding steps are recorded as CUDA graphs, and what the recordings hold in memory.

Owns the sizes; `gpu_steps.py` records and replays. Imports no torch: the memory plan asks.
"""

from __future__ import annotations

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
