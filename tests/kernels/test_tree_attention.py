"""Attention of drafted trees: every implementation against one query at a time in float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from sgl.errors import InternalError
from sgl.kernels import attention, registry
from sgl.kernels.attention import Ancestors, ancestors_of, chunk_positions
from sgl.kernels.native import library
from sgl.kernels.registry import OpFacts
from sgl.runtime.loading.cache import cache_folder

CAN_COMPILE = library.compiler() is not None

WIDE = [-1, 0, 0, 1, 1, 2, -1, 6]
"""Parents of a small tree with two roots."""


IMPLEMENTATIONS = [
    "torch",
    "fixed_blocks",
    pytest.param("native", marks=pytest.mark.skipif(not CAN_COMPILE, reason="there is no C++ compiler")),
]


@pytest.fixture(autouse=True)
def native() -> Iterator[None]:
    before = library.loaded()
    if CAN_COMPILE:
        library.load(cache_folder() / "native")
    yield
    library.use(before)


class Step:
    """Chunks `(start, length, parents of the tree at its end)` on scattered pages, NaN where nothing was written."""

    def __init__(
        self, chunks: list[tuple[int, int, list[int] | None]], *, page_size: int, dtype: torch.dtype, dim: int = 16
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        self.chunks, self.page_size, self.dtype = chunks, page_size, dtype
        self.heads, self.kv_heads, self.dim = 4, 2, dim
        needed = [-(-(start + length) // page_size) for start, length, _ in chunks]
        order = np.random.default_rng(1).permutation(sum(needed)).astype(np.int32)
        self.tables = np.split(order, np.cumsum(needed)[:-1])
        shape = (sum(needed) * page_size, self.kv_heads, self.dim)
        self.keys, self.values = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
        for (start, length, _), table in zip(chunks, self.tables, strict=True):
            slots = torch.from_numpy(attention.slots_of(table, page_size, 0, start + length))
            for pool in (self.keys, self.values):
                pool[slots] = torch.randn(len(slots), *shape[1:], generator=generator).to(dtype)
        self.query = torch.randn(sum(length for _, length, _ in chunks), self.heads, self.dim, generator=generator)

    @property
    def trees(self) -> list[Ancestors | None]:
        return [None if parents is None else ancestors_of(parents) for _, _, parents in self.chunks]

    def plan_arguments(self) -> tuple[list[int], list[int], list[np.ndarray], int]:
        return [c[0] for c in self.chunks], [c[1] for c in self.chunks], self.tables, self.page_size

    def expected(self, window: int = 0) -> torch.Tensor:
        """Each query over the keys that it sees, found by walking up the tree."""
        rows, row = [], 0
        for (start, length, parents), table in zip(self.chunks, self.tables, strict=True):
            end = start + length
            first = end - len(parents or ())
            depths: list[int] = []
            for parent in parents or ():
                depths.append(depths[parent] + 1 if parent >= 0 else 0)
            positions = [*range(first), *(first + depth for depth in depths)]
            for place in range(start, end):
                seen = list(range(min(place + 1, first)))
                node = place - first
                while parents and node >= 0:
                    seen.append(first + node)
                    node = parents[node]
                if window:
                    seen = [key for key in seen if positions[key] > positions[place] - window]
                slots = attention.slots_of(table, self.page_size, 0, end)[seen]
                key, value = (pool[torch.from_numpy(slots)].double() for pool in (self.keys, self.values))
                query = self.query[row].double().view(self.kv_heads, -1, self.dim)
                scores = torch.einsum("kgd,lkd->kgl", query, key) * self.dim**-0.5
                rows.append(torch.einsum("kgl,lkd->kgd", scores.softmax(dim=-1), value).reshape(self.heads, self.dim))
                row += 1
        return torch.stack(rows)


CHAIN = [*range(-1, 63)]
STEPS = {
    "mixed": [(5, 8, WIDE), (70, 1, None), (0, 8, WIDE), (40, 30, None), (130, 12, WIDE)],
    "across blocks": [(509, 8, WIDE), (60, 64, [-1, *[0] * 30, *range(30, 63)]), (64, 64, CHAIN)],
}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_each_token_of_a_tree_sees_its_ancestors(implementation: str, name: str, page_size: int) -> None:
    step = Step(STEPS[name], page_size=page_size, dtype=torch.float32)
    facts = OpFacts(native=implementation == "native", deterministic=implementation == "fixed_blocks")
    plan_by = "native" if implementation == "native" else "torch"
    plan = registry.get("plan_attention", facts, plan_by)(*step.plan_arguments(), ancestors=step.trees)
    attend = registry.get("paged_attention", facts, implementation)
    got = attend(step.query, step.keys, step.values, plan, step.dim**-0.5)
    assert torch.allclose(got.double(), step.expected(), atol=2e-6)


@pytest.mark.skipif(not CAN_COMPILE, reason="there is no C++ compiler")
def test_a_tree_over_bfloat16_pages() -> None:
    """A processor with a matrix unit takes a path of its own here, and rounds queries and weights for it."""
    for chunks in STEPS.values():
        step = Step(chunks, page_size=16, dtype=torch.bfloat16, dim=32)
        plan = registry.get("plan_attention", OpFacts(native=True), "native")(
            *step.plan_arguments(), ancestors=step.trees
        )
        attend = registry.get("paged_attention", OpFacts(native=True), "native")
        got = attend(step.query, step.keys, step.values, plan, step.dim**-0.5)
        expected = step.expected()
        assert (got.double() - expected).norm() / expected.norm() < 4e-3


@pytest.mark.parametrize("implementation", ["torch", "fixed_blocks"])
@pytest.mark.parametrize("window", [2, 9])
def test_a_window_counts_positions_of_the_text_not_slots(implementation: str, window: int) -> None:
    step = Step(STEPS["mixed"], page_size=1, dtype=torch.float32)
    plan = attention.plan_attention(*step.plan_arguments(), ancestors=step.trees)
    attend = registry.get("paged_attention", OpFacts(deterministic=True), implementation)
    got = attend(step.query, step.keys, step.values, plan, step.dim**-0.5, window=window)
    assert torch.allclose(got.double(), step.expected(window), atol=2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_chain_has_the_bits_of_a_chunk(implementation: str) -> None:
    """A draft that does not branch is computed as if its tokens were known."""
    step = Step([(60, 30, CHAIN[:9]), (3, 64, CHAIN)], page_size=1, dtype=torch.float32)
    facts = OpFacts(native=implementation == "native", deterministic=implementation == "fixed_blocks")
    plan = registry.get("plan_attention", facts, "native" if implementation == "native" else "torch")
    attend = registry.get("paged_attention", facts, implementation)
    results = [
        attend(step.query, step.keys, step.values, plan(*step.plan_arguments(), ancestors=trees), 0.25)
        for trees in (step.trees, None)
    ]
    assert torch.equal(*results)


def test_positions_follow_parents() -> None:
    assert chunk_positions(4, 10, ancestors_of(WIDE)).tolist() == [4, 5, 6, 7, 7, 8, 8, 8, 6, 7]
    assert chunk_positions(4, 2).tolist() == [4, 5]


@pytest.mark.parametrize(
    ("bits", "length", "why"),
    [
        (np.array([1, 1], dtype=np.uint64), 5, "must see itself"),
        (np.array([3, 2], dtype=np.uint64), 5, "none behind it"),
        (np.array([1, 6], dtype=np.uint64), 5, "none behind it"),
        (np.array([1, 3, 7], dtype=np.uint64), 2, "a tree has 3 tokens; expected 1 to 2"),
    ],
)
def test_what_is_no_tree_is_refused(bits: Ancestors, length: int, why: str) -> None:
    for implementation in ("torch", "native"):
        plan = registry.get("plan_attention", OpFacts(native=True), implementation)
        with pytest.raises(InternalError, match=why):
            plan([0], [length], [np.arange(8, dtype=np.int32)], 1, ancestors=[bits])


def test_parents_come_first() -> None:
    with pytest.raises(InternalError, match="token 1 of a tree has parent 1"):
        ancestors_of([-1, 1])
    with pytest.raises(InternalError, match="a tree has 65 tokens"):
        ancestors_of([-1] * 65)
