"""Puts loaded tensors into a model: as torch parameters, or packed for the native kernels.

Owns what becomes of a tensor between the checkpoint and the layer; called by `checkpoint.build_model` for one tensor at
a time. Matrices of `Linear` and `Embedding` are what can be packed; everything else stays a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from sgl.kernels.native.weights import PackedWeight, quantize
from sgl.runtime.models.experts import ExpertLinear
from sgl.runtime.models.layers import Embedding, Linear
from sgl.runtime.numerics import Quantization


@dataclass(frozen=True)
class Blocks:
    """A matrix as its GGUF file has it, `raw` of `[rows, bytes of a row]`; or matrices of experts, one after another.

    Attributes:
        shape: in numbers, `(rows, columns)` or `(experts, rows, columns)`.
    """

    raw: npt.NDArray[np.uint8]
    type_name: str
    shape: tuple[int, ...]


def rows_of(value: torch.Tensor | Blocks, rows: slice | npt.NDArray[np.int64]) -> Any:
    """Some rows of a matrix or vector, in their order; not of experts' matrices."""
    if isinstance(value, Blocks):
        raw = value.raw[rows]
        return Blocks(raw, value.type_name, (len(raw), *value.shape[1:]))
    return value[rows if isinstance(rows, slice) else torch.from_numpy(rows)]


def added(value: torch.Tensor | Blocks, offset: float) -> torch.Tensor:
    """A vector with `offset` added in float32."""
    if isinstance(value, Blocks):
        raise TypeError("vectors are no blocks")
    return value.float() + offset


class Placing(Protocol):
    """What `build_model` needs."""

    def place(self, owner: nn.Module, leaf: str, value: torch.Tensor | Blocks, expert: int | None = None) -> None:
        """Give `owner` its parameter `leaf`, or the part of it that is of one expert."""

    def finish(self, model: nn.Module) -> None:
        """All are placed."""


class TorchPlacing:
    """Parameters on one device, each of the dtype that its layer declares.

    Args:
        copy: the tensors lie in a mapped file, which may be changed or cut while the model lives.
    """

    def __init__(self, device: str, *, copy: bool) -> None:
        self._device, self._copy = device, copy

    def place(self, owner: nn.Module, leaf: str, value: torch.Tensor | Blocks, expert: int | None = None) -> None:
        """See `Placing`."""
        if isinstance(value, Blocks):
            raise TypeError("blocks are for the native kernels")
        declared = owner.get_parameter(leaf)
        if expert is not None:
            if declared.is_meta:
                declared = nn.Parameter(torch.empty_like(declared, device=self._device), requires_grad=False)
                owner.register_parameter(leaf, declared)
            declared[expert].copy_(value)
            return
        value = value.to(dtype=declared.dtype, device=self._device, copy=self._copy).contiguous()
        owner.register_parameter(leaf, nn.Parameter(value, requires_grad=False))

    def finish(self, model: nn.Module) -> None:
        """See `Placing`."""


class NativePlacing:
    """Matrices packed: blocks as they are, numbers in `dtype` or rounded to `quantization`; the rest in float32."""

    def __init__(self, dtype: torch.dtype, quantization: Quantization) -> None:
        self._dtype, self._quantization = dtype, quantization
        self._float32 = TorchPlacing("cpu", copy=True)

    def place(self, owner: nn.Module, leaf: str, value: torch.Tensor | Blocks, expert: int | None = None) -> None:
        """See `Placing`."""
        if isinstance(owner, ExpertLinear):
            for index, matrix in enumerate(_matrices(value)) if expert is None else ((expert, value),):
                owner.hold(self._packed(matrix, is_table=False), index)
        elif isinstance(owner, Linear | Embedding) and leaf == "weight":
            owner.hold(self._packed(value, is_table=isinstance(owner, Embedding) or owner.is_head))
        else:
            self._float32.place(owner, leaf, value)

    def finish(self, model: nn.Module) -> None:
        """Products add their biases themselves."""
        for module in model.modules():
            if isinstance(module, Linear) and module.packed is not None:
                module.packed.set_bias(module.bias)

    def _packed(self, weight: torch.Tensor | Blocks, *, is_table: bool) -> PackedWeight:
        if isinstance(weight, Blocks):
            raw = np.ascontiguousarray(weight.raw).reshape(-1)
            return PackedWeight(raw, weight.type_name, (weight.shape[0], weight.shape[1]))
        if self._quantization in ("int8", "int4") and weight.shape[1] % 32 == 0:
            # 4 bits of a head cost more quality than they save time (measured: answers break).
            bits: Literal["int8", "int4"] = "int4" if self._quantization == "int4" and not is_table else "int8"
            return quantize(weight, bits)
        return PackedWeight.of_tensor(weight.to(self._dtype))


def _matrices(value: torch.Tensor | Blocks) -> list[Any]:
    """Of each expert."""
    if not isinstance(value, Blocks):
        return list(value)
    experts, *shape = value.shape
    return [Blocks(raw, value.type_name, tuple(shape)) for raw in value.raw.reshape(experts, shape[0], -1)]
