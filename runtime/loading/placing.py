"""Puts loaded tensors into a model: as torch parameters, or packed for the native kernels.

Owns what becomes of a tensor between the checkpoint and the layer; called by `checkpoint.build_model` for one tensor at
a time. Matrices of `Linear` and `Embedding` are what can be packed; everything else stays a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from sgl.kernels.native.weights import PackedWeight, quantize
from sgl.runtime.models.layers import Embedding, Linear
from sgl.runtime.numerics import Quantization


@dataclass(frozen=True)
class Blocks:
    """A matrix as its GGUF file has it: `raw` is `[rows, bytes of a row]`."""

    raw: npt.NDArray[np.uint8]
    type_name: str
    shape: tuple[int, ...]


class Placing(Protocol):
    """What `build_model` needs."""

    def place(self, owner: nn.Module, leaf: str, value: torch.Tensor | Blocks) -> None:
        """Give `owner` its parameter `leaf`."""

    def finish(self, model: nn.Module) -> None:
        """All are placed."""


class TorchPlacing:
    """Parameters of one dtype on one device.

    Args:
        copy: the tensors lie in a mapped file, which may be changed or cut while the model lives.
    """

    def __init__(self, dtype: torch.dtype, device: str, *, copy: bool) -> None:
        self._dtype, self._device, self._copy = dtype, device, copy

    def place(self, owner: nn.Module, leaf: str, value: torch.Tensor | Blocks) -> None:
        """See `Placing`."""
        if isinstance(value, Blocks):
            raise TypeError("blocks are for the native kernels")
        value = value.to(dtype=self._dtype, device=self._device, copy=self._copy).contiguous()
        owner.register_parameter(leaf, nn.Parameter(value, requires_grad=False))

    def finish(self, model: nn.Module) -> None:
        """See `Placing`."""


class NativePlacing:
    """Matrices packed: blocks as they are, numbers in `dtype` or rounded to `quantization`; the rest in float32."""

    def __init__(self, dtype: torch.dtype, quantization: Quantization) -> None:
        self._dtype, self._quantization = dtype, quantization
        self._float32 = TorchPlacing(torch.float32, "cpu", copy=True)

    def place(self, owner: nn.Module, leaf: str, value: torch.Tensor | Blocks) -> None:
        """See `Placing`."""
        if not isinstance(owner, Linear | Embedding) or leaf != "weight":
            self._float32.place(owner, leaf, value)
        elif isinstance(value, Blocks):
            raw = np.ascontiguousarray(value.raw).reshape(-1)
            owner.hold(PackedWeight(raw, value.type_name, (value.shape[0], value.shape[1])))
        else:
            owner.hold(self._packed(value, is_table=isinstance(owner, Embedding) or owner.is_head))

    def finish(self, model: nn.Module) -> None:
        """Products add their biases themselves."""
        for module in model.modules():
            if isinstance(module, Linear) and module.packed is not None:
                module.packed.set_bias(module.bias)

    def _packed(self, weight: torch.Tensor, *, is_table: bool) -> PackedWeight:
        if self._quantization in ("int8", "int4") and weight.shape[1] % 32 == 0:
            # 4 bits of a head cost more quality than they save time (measured: answers break).
            bits: Literal["int8", "int4"] = "int4" if self._quantization == "int4" and not is_table else "int8"
            return quantize(weight, bits)
        return PackedWeight.of_tensor(weight.to(self._dtype))
