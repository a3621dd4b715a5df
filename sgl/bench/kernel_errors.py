"""How far each kernel on a GPU is from float64: the table at the end of `sgl bench kernels`.

Owns the inputs and the float64 forms, which are written out here and share nothing with the references. Inputs are
rounded to the kernel's dtype first, so that an error is the kernel's own. Errors are norms of differences over norms.

Shapes: as in `sgl.kernels.triton`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
INNER, HIDDEN = 96, 160

Errors = Iterator[tuple[str, Callable[[], float]]]


def kernel_errors(device: str, dtype: str) -> Errors:
    """Name of each kernel, and what computes its error."""
    import torch

    draw = _Draw(device, getattr(torch, dtype))
    yield from _attention(draw)
    yield from _products(draw)
    yield from _elementwise(draw)


class _Draw:
    """Random tensors of one device and dtype."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        import torch

        self._generator = torch.Generator().manual_seed(0)
        self.device, self.dtype = device, dtype

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        import torch

        return (torch.randn(*shape, generator=self._generator) * scale).to(self.device, self.dtype)


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what was expected; infinite when a number is not finite."""
    difference = float((ours.double() - expected.double()).norm() / expected.double().norm())
    return difference if np.isfinite(difference) else float("inf")


class _Chunk(NamedTuple):
    start: int
    length: int
    parents: tuple[int, ...] = ()


def _attention(draw: _Draw) -> Errors:
    rows = [_Chunk(200, 1), _Chunk(7, 1), _Chunk(150, 1), _Chunk(149, 1)]
    tree = (-1, 0, 0, 1, 1, 2)
    for name, chunks, shared, splits in (
        ("attention, decode", rows, 0, 1),
        ("attention, decode, split and merged", rows, 0, 3),
        ("attention, decode, prefix together", rows, 140, 1),
        ("attention, decode, prefix together, split and merged", rows, 140, 2),
        ("attention, prefill", [_Chunk(0, 70), _Chunk(65, 20)], 0, 1),
        ("attention, prefill with a tree", [_Chunk(60, 6, tree), _Chunk(0, 9)], 0, 1),
    ):
        yield name, _attention_error(draw, chunks, shared, splits)


def _attention_error(draw: _Draw, chunks: list[_Chunk], shared: int, splits: int) -> Callable[[], float]:
    def compute() -> float:
        from dataclasses import replace

        import torch

        from sgl.kernels.attention import ancestors_of
        from sgl.kernels.prefix_groups import PrefixGroup
        from sgl.kernels.triton.attention import paged_attention, plan_attention

        ends = [chunk.start + chunk.length for chunk in chunks]
        order = np.random.default_rng(0).permutation(sum(ends)).astype(np.int32)
        tables = np.split(order, np.cumsum(ends)[:-1])
        members = [index for index, end in enumerate(ends) if shared and end > shared]
        for index in members[1:]:
            tables[index] = np.concatenate([tables[members[0]][:shared], tables[index][shared:]])
        keys, values = (draw(sum(ends), KV_HEADS, HEAD_DIM) for _ in range(2))
        query = draw(sum(chunk.length for chunk in chunks), HEADS, HEAD_DIM)
        plan = plan_attention(
            [chunk.start for chunk in chunks],
            [chunk.length for chunk in chunks],
            tables,
            1,
            draw.device,
            KV_HEADS,
            ancestors=[ancestors_of(chunk.parents) if chunk.parents else None for chunk in chunks],
            groups=[PrefixGroup(tuple(members), shared)] if shared else (),
            num_heads=HEADS,
        )
        ours = paged_attention(query, keys, values, replace(plan, num_splits=splits), HEAD_DIM**-0.5)
        expected, row = [], 0
        for chunk, table in zip(chunks, tables, strict=True):
            slots = torch.from_numpy(table.astype(np.int64)).to(draw.device)
            key, value = keys[slots].double(), values[slots].double()
            for place in range(chunk.start, chunk.start + chunk.length):
                seen = _seen(chunk, place)
                scores = torch.einsum("kgd,lkd->kgl", query[row].double().view(KV_HEADS, -1, HEAD_DIM), key[seen])
                weights = (scores * HEAD_DIM**-0.5).softmax(dim=-1)
                expected.append(torch.einsum("kgl,lkd->kgd", weights, value[seen]).reshape(HEADS, HEAD_DIM))
                row += 1
        return relative_error(ours, torch.stack(expected))

    return compute


def _seen(chunk: _Chunk, place: int) -> list[int]:
    """Places that the one at `place` looks at: up its tree, then all that is before it."""
    first = chunk.start + chunk.length - len(chunk.parents)
    seen = list(range(min(place + 1, first)))
    node = place - first
    while node >= 0:
        seen.append(first + node)
        node = chunk.parents[node]
    return seen


def _products(draw: _Draw) -> Errors:
    from sgl.kernels.triton.matmul import MAX_ROWS, linear_rows

    for num_rows in (1, MAX_ROWS):
        for gated in (False, True):

            def compute(num_rows: int = num_rows, gated: bool = gated) -> float:
                x, weight = draw(num_rows, HIDDEN), draw(2 * INNER if gated else INNER, HIDDEN, scale=HIDDEN**-0.5)
                expected = x.double() @ weight.double().T
                if gated:
                    gate, up = expected.chunk(2, dim=-1)
                    expected = gate / (1 + (-gate).exp()) * up
                return relative_error(linear_rows(x, weight, gated=gated), expected)

            yield f"product of {num_rows} rows{', gated' if gated else ''}", compute


def _elementwise(draw: _Draw) -> Errors:
    import torch

    from sgl.kernels.triton.elementwise import add_rms_norm, rms_norm, rotate_and_write, silu_mul_packed

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight.double()

    def norm() -> float:
        x, weight = draw(5, HIDDEN), draw(HIDDEN)
        return relative_error(rms_norm(x, weight, 1e-6), normed(x.double(), weight))

    def norm_of_sum() -> float:
        x, residual, weight = draw(5, HIDDEN), draw(5, HIDDEN), draw(HIDDEN)
        added = residual.double() + x.double()
        return relative_error(add_rms_norm(x, residual, weight, 1e-6), normed(added, weight))

    def activation() -> float:
        gate_up = draw(5, 2 * INNER)
        gate, up = gate_up.double().chunk(2, dim=-1)
        return relative_error(silu_mul_packed(gate_up), gate / (1 + (-gate).exp()) * up)

    def rotation() -> float:
        qkv = draw(4, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        angles = torch.linspace(0, 6, 4 * HEAD_DIM // 2).view(4, -1).repeat(1, 2).to(draw.device)
        cos, sin = angles.cos().to(draw.dtype), angles.sin().to(draw.dtype)
        keys, values = (torch.zeros(4, KV_HEADS, HEAD_DIM, device=draw.device, dtype=draw.dtype) for _ in range(2))
        slots = torch.arange(4, device=draw.device, dtype=torch.int32)
        query = rotate_and_write(qkv, cos, sin, slots, keys, values, HEADS)
        wide = qkv.double().view(4, -1, HEAD_DIM)
        first, second = wide[:, : HEADS + KV_HEADS].chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1) * sin.double()[:, None]
        expected = wide[:, : HEADS + KV_HEADS] * cos.double()[:, None] + turned
        return relative_error(torch.cat((query, keys), dim=1), expected)

    yield "norm", norm
    yield "norm of a sum", norm_of_sum
    yield "activation", activation
    yield "rotation", rotation
