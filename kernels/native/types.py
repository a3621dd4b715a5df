"""Types of weights that the native kernels multiply, and their sizes. No torch here: the client half plans with it."""

from __future__ import annotations

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "BF16": 30}
"""With their numbers in GGUF files (weights.h)."""
COLUMNS = {"Q4_0": 32, "Q4_1": 32, "Q8_0": 32, "Q4_K": 256, "Q6_K": 256}
"""Columns of a quantized type's block."""
ROW_BYTES = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
}
"""Type -> (columns, bytes) of the smallest unit of a row in a file."""
_UNIT_BYTES_HERE = {"Q4_K": 148}
"""Where the kernels' order takes more: scales of 6 bits lie in bytes."""
_ROWS_TOGETHER = 16
"""The largest group of rows; the last one is filled up."""


def packed_bytes(type_name: str, rows: int, cols: int) -> int:
    """What a packed matrix takes, at most.

    Example:
        >>> packed_bytes("Q4_1", 576, 576), packed_bytes("BF16", 1, 4)
        (207424, 192)
    """
    unit, unit_bytes = ROW_BYTES[type_name]
    units = -(-cols // unit) if unit > 1 else -(-cols // 2) * 2
    return -(-rows // _ROWS_TOGETHER) * _ROWS_TOGETHER * units * _UNIT_BYTES_HERE.get(type_name, unit_bytes) + 64
