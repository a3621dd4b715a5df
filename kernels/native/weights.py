"""Weight matrices as the native kernels read them: a type of data of a layer, beside torch's dtypes.

Owns `PackedWeight`, which keeps a matrix in the form of its checkpoint (GGUF blocks, 16 or 32 bits) in the order of the
kernels, and `quantize`, which makes blocks of 8 or 4 bits from numbers. Called by the loader and by layers.
"""

from __future__ import annotations

import ctypes
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from sgl.errors import InternalError
from sgl.kernels.native.library import library
from sgl.kernels.native.types import ROW_BYTES, TYPES

_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class CWeight(ctypes.Structure):
    """`struct Weight` of weights.h."""

    _fields_ = [
        ("type", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("cols", ctypes.c_int32),
        ("padding", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    ]


class PackedWeight:
    """A matrix `[rows, cols]` in the kernels' order.

    Attributes:
        type: one of `types.TYPES`.
        shape: `(rows, cols)`.
        num_bytes: memory it takes.
        c: what the library's functions take; it points into this object, which must live as long.
    """

    def __init__(self, raw: npt.NDArray[np.uint8], type_name: str, shape: tuple[int, int]) -> None:
        """Pack `raw`, the bytes of a file: rows one after another."""
        rows, cols = shape
        unit, unit_bytes = ROW_BYTES[type_name]
        if cols % unit or raw.nbytes != rows * (cols // unit) * unit_bytes or not raw.flags.c_contiguous:
            raise InternalError(f"{raw.nbytes} bytes are no {type_name} matrix of shape {shape}")
        self.type = type_name
        self.shape = shape
        self.c = CWeight(TYPES[type_name], rows, cols, 0, None, None)
        self.num_bytes = int(library().sgl_packed_bytes(ctypes.byref(self.c)))
        # 64 spare bytes: the beginning is moved to a cache line.
        self._memory = np.empty(self.num_bytes + 64, dtype=np.uint8)
        address = self._memory.ctypes.data
        self.c.data = address + (-address) % 64
        self.address = ctypes.addressof(self.c)
        self._bias: torch.Tensor | None = None
        library().sgl_pack(self.address, raw.ctypes.data)

    @classmethod
    def of_tensor(cls, weight: torch.Tensor) -> PackedWeight:
        """Pack a matrix of float32, float16 or bfloat16 as it is."""
        bits = {4: torch.int32, 2: torch.int16}[weight.dtype.itemsize]
        raw = weight.contiguous().view(bits).numpy().view(np.uint8).reshape(-1)
        return cls(raw, _FLOATS[weight.dtype], (weight.shape[0], weight.shape[1]))

    def set_bias(self, bias: torch.Tensor | None) -> None:
        """Add this to every product."""
        self._bias = None if bias is None else bias.float().contiguous()
        self.c.bias = None if self._bias is None else self._bias.data_ptr()

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows `[R]` as float32 `[R, cols]`."""
        out = torch.empty(len(rows), self.shape[1])
        ids = rows.to(torch.int64).contiguous()
        good = library().sgl_rows(self.address, ids.data_ptr(), len(ids), out.data_ptr())
        if good < len(ids):
            raise InternalError(f"row {int(ids[good])} of a matrix of {self.shape[0]} rows")
        return out

    def numbers(self) -> torch.Tensor:
        """The whole matrix as float32."""
        return self.take(torch.arange(self.shape[0]))


def quantize(weight: torch.Tensor, kind: Literal["int8", "int4"]) -> PackedWeight:
    """Round a matrix to 8 bits (a scale for each 32 columns) or 4 (a scale and an offset).

    Raises:
        InternalError: the columns are no multiple of 32.
    """
    rows, cols = weight.shape
    if cols % 32:
        raise InternalError(f"{cols} columns cannot be cut into blocks of 32")
    blocks = weight.detach().float().numpy().reshape(rows, cols // 32, 32)
    if kind == "int8":
        scale = (np.abs(blocks).max(axis=-1, keepdims=True) / 127).astype(np.float16)
        codes = np.rint(blocks / _nonzero(scale)).clip(-127, 127).astype(np.int8)
        raw = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=-1)
        return PackedWeight(np.ascontiguousarray(raw).reshape(-1), "Q8_0", (rows, cols))
    low = blocks.min(axis=-1, keepdims=True).astype(np.float16)
    scale = ((blocks.max(axis=-1, keepdims=True) - low) / 15).astype(np.float16)
    codes4 = np.rint((blocks - low) / _nonzero(scale)).clip(0, 15).astype(np.uint8)
    nibbles = codes4[..., :16] | (codes4[..., 16:] << 4)
    raw = np.concatenate([scale.view(np.uint8), low.view(np.uint8), nibbles], axis=-1)
    return PackedWeight(np.ascontiguousarray(raw).reshape(-1), "Q4_1", (rows, cols))


def _nonzero(scale: npt.NDArray[np.float16]) -> npt.NDArray[np.float32]:
    wide = scale.astype(np.float32)
    return np.where(wide == 0, np.float32(1), wide)
