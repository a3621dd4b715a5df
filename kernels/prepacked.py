"""Products of weights that oneDNN keeps in its own order: what torch's CPU path has where nothing can be compiled.

Called by the model runner, once, after loading. Plain weights are put in order anew for each product; put in order
once, they are multiplied as they are. README.md has figures.

A packed weight is a tensor that only `linear` understands. Sums differ from a plain product's in their last bits.

oneDNN makes code for each number of rows that it meets, some 600 KB a weight, and keeps it for good: a server that sees
hundreds of numbers grew by as many. So numbers of rows are rounded up to a few.
"""

from __future__ import annotations

import torch


def obstacle(dtype: torch.dtype | str, device: str = "cpu") -> str | None:
    """Why weights of `dtype` are not packed here; `None` when they are."""
    if device != "cpu":
        return "oneDNN computes on the CPU"
    name = str(dtype).removeprefix("torch.")
    if name not in ("float32", "bfloat16"):
        return f"weights of {name} stay as they are"
    if not torch.backends.mkldnn.is_available() or not _has_ops():
        return "this build of torch has no oneDNN that packs"
    if name == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "oneDNN does not multiply bfloat16 on this processor"
    return None


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A matrix `[out, in]` in oneDNN's order."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
    return packed


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias` of the weight that was packed; `x` is `[rows, in]` of its dtype."""
    rows = x.shape[0]
    more = rounded(rows) - rows
    padded = torch.nn.functional.pad(x, (0, 0, 0, more)) if more else x
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(padded, packed, bias, "none", [], "")
    return out[:rows] if more else out


def rounded(rows: int) -> int:
    """The number of rows that is computed in place of `rows`: four between a power of two and the next, so at most a
    quarter more.

    Example:
        >>> [rounded(rows) for rows in (1, 7, 8, 9, 100, 512)]
        [1, 7, 8, 10, 112, 512]
        >>> len({rounded(rows) for rows in range(1, 2049)})
        40
    """
    step = 1 << max((rows - 1).bit_length() - 3, 0)
    return -(-rows // step) * step


def _has_ops() -> bool:
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    return all(hasattr(torch.ops.mkldnn, name) for name in names)
