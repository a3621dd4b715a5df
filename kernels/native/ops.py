"""The native implementations of the ops in the registry, over torch tensors, and the products with packed weights.

Tensors are float32 on the CPU (keys and values also bfloat16); what is not contiguous is copied. One caller at a time,
as everywhere in the engine's step.

Shapes: T tokens of the step, N features, H query heads, K key/value heads, D head size, S slots, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from sgl.errors import InternalError
from sgl.kernels.attention import Ancestors, seen_in_tree
from sgl.kernels.native.library import library
from sgl.kernels.native.weights import PackedWeight


class CChunk(ctypes.Structure):
    """`struct Chunk` of attention.h."""

    _fields_ = [
        ("start", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("pages", ctypes.c_void_p),
        ("ancestors", ctypes.c_void_p),
        ("tree", ctypes.c_int64),
    ]


class CHeads(ctypes.Structure):
    """`struct Heads` of attention.h."""

    _fields_ = [
        ("query", ctypes.c_int32),
        ("kv", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("bfloat16", ctypes.c_int32),
        ("padding", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class NativePlan:
    """A step's chunks for the native kernels: they follow the page tables themselves, so nothing is gathered here."""

    chunks: ctypes.Array[CChunk]
    num_tokens: int
    page_size: int
    tables: tuple[npt.NDArray[np.int32], ...]
    """What `chunks` points to, and the trees that it points to."""
    ancestors: tuple[Ancestors | None, ...] = ()

    @cached_property
    def write_slots(self) -> torch.Tensor:
        """`[T]`, slot of each token of the step, for layers that are computed op by op."""
        slots = []
        for chunk, table in zip(self.chunks, self.tables, strict=True):
            positions = np.arange(chunk.start, chunk.start + chunk.length)
            slots.append(
                table[positions // self.page_size].astype(np.int64) * self.page_size + positions % self.page_size
            )
        return torch.from_numpy(np.concatenate(slots))


def plan_attention(
    starts: Sequence[int],
    lengths: Sequence[int],
    page_tables: Sequence[npt.NDArray[np.int32]],
    page_size: int,
    device: torch.device | str = "cpu",
    ancestors: Sequence[Ancestors | None] | None = None,
) -> NativePlan:
    """As `sgl.kernels.attention.plan_attention`, for these kernels.

    Raises:
        InternalError: a page table ends before its chunk; a tree that is none (`seen_in_tree`).
    """
    tables = tuple(np.ascontiguousarray(table, dtype=np.int32) for table in page_tables)
    trees = tuple(None if bits is None else np.ascontiguousarray(bits, dtype=np.uint64) for bits in ancestors or ())
    chunks = (CChunk * len(starts))()
    for chunk, start, length, table in zip(chunks, starts, lengths, tables, strict=True):
        if len(table) * page_size < start + length:
            raise InternalError(f"{len(table)} pages of {page_size} do not reach position {start + length}")
        chunk.start, chunk.length = start, length
        chunk.pages = table.__array_interface__["data"][0]  # `table.ctypes` costs ten times as much
    for chunk, bits in zip(chunks, trees, strict=False):
        if bits is not None:
            seen_in_tree(bits, chunk.length)
            chunk.ancestors, chunk.tree = bits.__array_interface__["data"][0], len(bits)
    return NativePlan(chunks, sum(lengths), page_size, tables, trees)


def linear(x_TN: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """`x @ weight.T + bias`."""
    x_TN = x_TN.contiguous()
    out = torch.empty(x_TN.shape[0], weight.shape[0])
    library().sgl_linear(weight.address, x_TN.data_ptr(), x_TN.shape[0], out.data_ptr())
    return out


def rms_norm(x_TN: torch.Tensor, weight_N: torch.Tensor, eps: float) -> torch.Tensor:
    """See `elementwise.rms_norm`."""
    x_TN = x_TN.contiguous()
    out = torch.empty_like(x_TN)
    size = x_TN.shape[-1]
    library().sgl_rms_norm(
        x_TN.data_ptr(), weight_N.contiguous().data_ptr(), x_TN.numel() // size, size, eps, out.data_ptr()
    )
    return out


def rotary(x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """See `elementwise.rotary`."""
    x_THD, cos_TD, sin_TD = x_THD.contiguous(), cos_TD.contiguous(), sin_TD.contiguous()
    out = torch.empty_like(x_THD)
    library().sgl_rotary(x_THD.data_ptr(), cos_TD.data_ptr(), sin_TD.data_ptr(), *x_THD.shape, out.data_ptr())
    return out


def silu_mul(gate_TN: torch.Tensor, up_TN: torch.Tensor) -> torch.Tensor:
    """See `elementwise.silu_mul`."""
    gate_TN, up_TN = gate_TN.contiguous(), up_TN.contiguous()
    out = torch.empty_like(gate_TN)
    library().sgl_silu_mul(gate_TN.data_ptr(), up_TN.data_ptr(), 1, gate_TN.numel(), out.data_ptr())
    return out


def argmax(logits_RV: torch.Tensor, words_RW: torch.Tensor | None = None) -> torch.Tensor:
    """See `elementwise.argmax`; each row is read once, and rows may be further apart than V."""
    if logits_RV.stride(-1) != 1:
        logits_RV = logits_RV.contiguous()
    if words_RW is not None and words_RW.stride(-1) != 1:
        words_RW = words_RW.contiguous()
    out = torch.empty(logits_RV.shape[0], dtype=torch.int64)
    library().sgl_argmax(
        logits_RV.data_ptr(),
        logits_RV.shape[0],
        logits_RV.stride(0),
        logits_RV.shape[1],
        words_RW.data_ptr() if words_RW is not None else None,
        words_RW.stride(0) if words_RW is not None else 0,
        out.data_ptr(),
    )
    return out


def top_k(logits_RV: torch.Tensor, k: int, scale_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `sampling.top_k`; each row is read once, ties at the end are kept by id, rows may lie further apart.
    Differences to the largest logit are scaled in float32, which moves the mass by about 1e-7 of itself."""
    if logits_RV.stride(-1) != 1:
        logits_RV = logits_RV.contiguous()
    rows, size = logits_RV.shape
    scale_R = scale_R.double().contiguous()
    values, ids = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int64)
    mass = torch.empty(rows, dtype=torch.float64)
    library().sgl_top_k(
        logits_RV.data_ptr(),
        rows,
        logits_RV.stride(0),
        size,
        k,
        scale_R.data_ptr(),
        values.data_ptr(),
        ids.data_ptr(),
        mass.data_ptr(),
    )
    return values, ids, mass


def heads(num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype) -> CHeads:
    """The shape of attention over a pool of `dtype`."""
    return CHeads(num_heads, num_kv_heads, head_dim, page_size, int(dtype == torch.bfloat16), 0)


def kv_write(
    keys_SKD: torch.Tensor,
    values_SKD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    slots_T: torch.Tensor,
) -> None:
    """See `attention.kv_write`; numbers are rounded to the pool's dtype."""
    keys_SKD.index_copy_(0, slots_T, key_TKD.to(keys_SKD.dtype))
    values_SKD.index_copy_(0, slots_T, value_TKD.to(values_SKD.dtype))


def paged_attention(
    query_THD: torch.Tensor, keys_SKD: torch.Tensor, values_SKD: torch.Tensor, plan: NativePlan, scale: float
) -> torch.Tensor:
    """See `attention.paged_attention`; `plan` is of `plan_attention` here."""
    query_THD = (query_THD * scale).contiguous()
    out = torch.zeros_like(query_THD)
    shape = heads(query_THD.shape[1], keys_SKD.shape[1], keys_SKD.shape[2], plan.page_size, keys_SKD.dtype)
    library().sgl_attention(
        ctypes.byref(shape),
        ctypes.addressof(plan.chunks),
        len(plan.chunks),
        query_THD.data_ptr(),
        keys_SKD.data_ptr(),
        values_SKD.data_ptr(),
        out.data_ptr(),
    )
    return out
