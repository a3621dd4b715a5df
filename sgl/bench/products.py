"""Products of few rows on a GPU: bytes of weights per second, by shape and by how the kernel cuts the product.

Owns the comparison of `kernels/triton/matmul.py`'s tiles with each other and with torch's `linear`. Weights of several
layers take turns, more than a cache holds; launches are recorded as a graph, as they are in a decoding step, each on
the output of nothing: what is measured is a row of such kernels, the gaps between them included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from sgl.bench.ceilings import device_seconds

_RESIDENT = 2**30
"""Bytes of weights that take turns."""
_DEVICE = "cuda"


class Shape(msgspec.Struct, frozen=True):
    """A product of `rows` with a matrix `[outputs, inputs]`; gated, outputs are of gates and ups together."""

    name: str
    rows: int
    outputs: int
    inputs: int
    gated: bool = False
    residual: bool = False

    @property
    def weight_bytes(self) -> int:
        """In 16 bits."""
        return 2 * self.outputs * self.inputs

    def __str__(self) -> str:
        return f"{self.rows}x{self.outputs}x{self.inputs} {self.name}"


def shapes_of_8b(rows: int) -> list[Shape]:
    """The products of a decoder layer of the Llama-3-8B shape, and its head."""
    return [
        Shape("query, key, value", rows, 6144, 4096),
        Shape("output", rows, 4096, 4096, residual=True),
        Shape("gate and up", rows, 2 * 14336, 4096, gated=True),
        Shape("down", rows, 4096, 14336, residual=True),
        Shape("head", rows, 128256, 4096),
    ]


class ProductRate(msgspec.Struct, frozen=True, kw_only=True):
    """One way to compute one shape; `in_use` is the one that decoding takes."""

    shape: str
    way: str
    seconds: float
    bytes_per_s: float
    in_use: bool = False


def compare_products(
    shapes: Sequence[Shape],
    *,
    until: float,
    found: Callable[[ProductRate], None],
) -> None:
    """Measure every way for every shape, the ones in use first; each is told to `found`.

    Args:
        until: of `time.monotonic`, when to end; what was not measured by then is left out.
    """
    from sgl.kernels.triton.matmul import tiles_to_compare

    ways = {shape: tiles_to_compare(shape.rows, _n(shape), shape.inputs, gated=shape.gated) for shape in shapes}
    for index in range(max(map(len, ways.values()))):
        for shape, tiles in ways.items():
            if index >= len(tiles) or time.monotonic() > until:
                continue
            tile = tiles[index]
            measure = _Product(shape)
            found(measure.rate(str(tuple(tile)), tile, in_use=index == 0))
            if index == 0:
                found(measure.torch_rate())


def _n(shape: Shape) -> int:
    return shape.outputs // 2 if shape.gated else shape.outputs


class _Product:
    """Weights of one shape, and its products."""

    def __init__(self, shape: Shape) -> None:
        import torch

        self._shape = shape
        count = max(2, _RESIDENT // shape.weight_bytes)
        drawn = torch.randn(shape.outputs, shape.inputs, device=_DEVICE) * shape.inputs**-0.5
        self._weights = [drawn.roll(index, dims=0).bfloat16() for index in range(count)]
        self._x = torch.randn(shape.rows, shape.inputs, device=_DEVICE).bfloat16()
        self._residual = torch.randn(shape.rows, _n(shape), device=_DEVICE).bfloat16() if shape.residual else None

    def rate(self, way: str, tile: object, *, in_use: bool = False) -> ProductRate:
        """Of the kernel of this project."""
        from sgl.kernels.triton.matmul import Tile, linear_rows

        if not isinstance(tile, Tile):
            raise TypeError(f"{tile!r} is no tile")
        gated = self._shape.gated
        return self._measured(
            way, lambda w: linear_rows(self._x, w, residual=self._residual, gated=gated, tile=tile), in_use=in_use
        )

    def torch_rate(self) -> ProductRate:
        """Of the library's product alone, without what comes after it."""
        from torch.nn.functional import linear

        return self._measured("torch linear", lambda w: linear(self._x, w), in_use=False)

    def _measured(self, way: str, product: Callable[..., object], *, in_use: bool) -> ProductRate:
        import torch

        product(self._weights[0])  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in self._weights:
                product(weight)
        seconds = device_seconds(graph.replay) / len(self._weights)
        return ProductRate(
            shape=str(self._shape),
            way=way,
            seconds=seconds,
            bytes_per_s=self._shape.weight_bytes / seconds,
            in_use=in_use,
        )
