"""Triton's attention: trees, groups with a common prefix, and page sizes, against one query at a time in float64.

In Triton's interpreter, and on a GPU where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sgl.kernels.attention import ancestors_of, slots_of
from sgl.kernels.prefix_groups import Cascade, PrefixGroup, most_items
from sgl.kernels.triton import attention
from sgl.kernels.triton.attention import DeviceCascade, PagedPlan, Tile

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
if HAS_GPU:
    pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of the relative error (norms) against float64."""
# The interpreter multiplies the bit patterns of bfloat16, and takes tenths of a second for a program.
SOME = [(torch.float32, 1), (torch.float16, 16), (torch.float32, 64)]
ALL = [(dtype, page_size) for dtype in TOLERANCE for page_size in (1, 16, 64)]
dtypes_and_pages = pytest.mark.parametrize(("dtype", "page_size"), ALL if HAS_GPU else SOME)
NO_GROUP = 0


class Step:
    """Chunks `(start, length, parents of the tree at its end, group)` on scattered pages. Chunks of one group have
    their first whole pages below `prefix` keys in common. What no sequence owns is NaN."""

    def __init__(
        self,
        chunks: Sequence[tuple[int, int, list[int] | None, int]],
        *,
        prefix: int = 0,
        page_size: int = 1,
        heads: tuple[int, int] = (4, 2),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        self.chunks, self.page_size, self.dtype = chunks, page_size, dtype
        self.heads, self.kv_heads, self.dim = *heads, 16
        needed = [-(-(start + length) // page_size) for start, length, _, _ in chunks]
        order = np.random.default_rng(1).permutation(sum(needed)).astype(np.int32)
        self.tables = np.split(order, np.cumsum(needed)[:-1])
        leaders: dict[int, np.ndarray] = {}
        for index, (_, _, _, group) in enumerate(chunks):
            if group != NO_GROUP:
                common = leaders.setdefault(group, self.tables[index])[: prefix // page_size]
                self.tables[index] = np.concatenate([common, self.tables[index][len(common) :]])
        shape = (sum(needed) * page_size, self.kv_heads, self.dim)
        self.keys, self.values = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
        for (start, length, _, _), table in zip(chunks, self.tables, strict=True):
            slots = torch.from_numpy(slots_of(table, page_size, 0, start + length))
            for pool in (self.keys, self.values):
                pool[slots] = torch.randn(len(slots), *shape[1:], generator=generator).to(dtype)
        num_tokens = sum(length for _, length, _, _ in chunks)
        self.query = torch.randn(num_tokens, self.heads, self.dim, generator=generator).to(dtype)
        self.groups = [
            PrefixGroup(tuple(rows), prefix // page_size * page_size)
            for group in leaders
            if len(rows := [i for i, row in enumerate(self._singles()) if row[3] == group]) > 1
        ]

    def _singles(self) -> list[tuple[int, int, list[int] | None, int]]:
        return [chunk for chunk in self.chunks if chunk[1] == 1]

    def plan(self, **rest: object) -> PagedPlan:
        ancestors = [None if parents is None else ancestors_of(parents) for _, _, parents, _ in self.chunks]
        return attention.plan_attention(
            [start for start, _, _, _ in self.chunks],
            [length for _, length, _, _ in self.chunks],
            self.tables,
            self.page_size,
            DEVICE,
            self.kv_heads,
            ancestors=ancestors,
            num_heads=self.heads,
            **rest,
        )

    def computed(self, plan: PagedPlan, **rest: Any) -> torch.Tensor:
        on_device = (tensor.to(DEVICE) for tensor in (self.query, self.keys, self.values))
        return attention.paged_attention(*on_device, plan, self.dim**-0.5, **rest).cpu()

    def expected(self) -> torch.Tensor:
        rows, row = [], 0
        for (start, length, parents, _), table in zip(self.chunks, self.tables, strict=True):
            first = start + length - len(parents or ())
            for place in range(start, start + length):
                seen = list(range(min(place + 1, first)))
                node = place - first
                while parents and node >= 0:
                    seen.append(first + node)
                    node = parents[node]
                slots = torch.from_numpy(slots_of(table, self.page_size, 0, start + length)[seen])
                key, value = self.keys[slots].double(), self.values[slots].double()
                query = self.query[row].double().view(self.kv_heads, -1, self.dim)
                scores = torch.einsum("kgd,lkd->kgl", query, key) * self.dim**-0.5
                rows.append(torch.einsum("kgl,lkd->kgd", scores.softmax(dim=-1), value).reshape(self.heads, self.dim))
                row += 1
        return torch.stack(rows)

    def check(self, ours: torch.Tensor) -> None:
        expected = self.expected()
        assert ours.shape == expected.shape
        assert ((ours.double() - expected).norm() / expected.norm()) < TOLERANCE[self.dtype]


TREE = [-1, 0, 0, 1, 1, 2, -1, 6]


@dtypes_and_pages
def test_decoding_rows_and_chunks_with_trees(dtype: torch.dtype, page_size: int) -> None:
    """A tree over a block's edge, one without a prefix, and one of 64 tokens, behind tokens of its own chunk."""
    wide = [-1, *[0] * 30, *range(30, 63)]
    chunks = [(60, 8, TREE, 0), (70, 1, None, 0), (0, 8, TREE, 0), (3, 66, wide, 0), (60, 3, None, 0)]
    step = Step(chunks, page_size=page_size, heads=(2, 1), dtype=dtype)
    plan = step.plan()
    step.check(step.computed(plan))
    assert plan.positions[9:17].tolist() == [0, 1, 1, 2, 2, 2, 0, 1]


@dtypes_and_pages
@pytest.mark.parametrize("programs", [1, 8])
def test_chunks_of_few_tokens(
    dtype: torch.dtype, page_size: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As drafts are verified: beside a row that decodes, from nothing and behind several blocks of keys, a tree over a
    block's edge, whole and in parts."""
    monkeypatch.setattr(attention, "_PROGRAMS", programs)
    monkeypatch.setattr(attention, "_attend_blocks", None)
    chunks = [(150, 5, None, 0), (60, 8, TREE, 0), (70, 1, None, 0), (0, 2, None, 0)]
    step = Step(chunks, page_size=page_size, heads=(3, 1), dtype=dtype)
    step.check(step.computed(step.plan()))
    plain = Step([(66, 3, None, 0)], page_size=page_size, heads=(2, 2), dtype=dtype)
    plain.check(plain.computed(plain.plan()))


@pytest.mark.parametrize("tile", [Tile(16, 16, 1, 1), Tile(128, 32, 8, 2)])
def test_other_tiles_of_prefill(tile: Tile) -> None:
    step = Step([(20, 40, TREE, 0), (0, 33, None, 0)])
    step.check(step.computed(step.plan(prefill=tile)))


GROUPED = [(180, 1, None, 1), (9, 1, None, 0), (170, 1, None, 2), (160, 1, None, 1), (161, 1, None, 1)]
GROUPED += [(50, 2, None, 0), (151, 1, None, 2), (160, 1, None, 1)]


@pytest.mark.parametrize(
    ("dtype", "page_size"),
    ALL if HAS_GPU else [SOME[1], *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (SOME[0], SOME[2]))],
)
@pytest.mark.parametrize("splits", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_groups_read_their_prefix_once(dtype: torch.dtype, page_size: int, splits: int) -> None:
    """Two groups, whose prefixes end within a block, beside a row and a chunk in none; tiles smaller than a group, and
    a number of heads that does not fill a tile."""
    heads = (3, 1)
    step = Step(GROUPED, prefix=150, page_size=page_size, heads=heads, dtype=dtype)
    assert [len(group.rows) for group in step.groups] == [4, 2]
    plan = replace(step.plan(groups=step.groups), num_splits=splits)
    step.check(step.computed(plan, shared=attention.SHARED))
    step.check(step.computed(plan, shared=attention.SHARED, apart=False))
    cascade = Cascade.of(step.groups, 7, rows_per_tile=3, num_kv_heads=heads[1])
    plan = replace(plan, cascade=DeviceCascade.of(cascade, DEVICE))
    step.check(step.computed(plan))
    # The prefix is really taken out of what rows read by themselves: without its kernel's part the result is another.
    assert plan.cascade is not None
    alone = replace(plan.cascade, parts=torch.zeros_like(plan.cascade.parts))
    with pytest.raises(AssertionError):
        step.check(step.computed(replace(plan, cascade=alone)))


def test_items_and_rows_that_fill_up_read_nothing() -> None:
    """As a recorded step has them: more items and rows than there are."""
    step = Step(GROUPED[:4], prefix=130, heads=(1, 1))
    plan = replace(step.plan(groups=step.groups), num_splits=1)
    cascade = plan.cascade
    assert cascade is not None
    room = len(cascade.items) + 2
    items = torch.zeros(room, 6, dtype=torch.int32, device=DEVICE)
    items[: len(cascade.items)] = cascade.items
    step.check(step.computed(replace(plan, cascade=replace(cascade, items=items, num_parts=room * 64))))

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, torch.zeros_like(tensor[:1])])

    more = replace(
        plan,
        single_rows=torch.cat([plan.single_rows, torch.full_like(plan.single_rows[:1], len(step.query))]),
        single_pages=filled(plan.single_pages),
        single_lengths=filled(plan.single_lengths),
        cascade=replace(cascade, shared=filled(cascade.shared), parts=filled(cascade.parts)),
    )
    query = step.query
    step.query = filled(query)
    ours = step.computed(more)
    step.query = query
    step.check(ours[:-1])
    assert not ours[-1].any()


def test_items_fill_a_device_once() -> None:
    group = PrefixGroup(tuple(range(64)), 8192)
    cascade = Cascade.of([group], 64, 32, 8)
    assert len(cascade.items) == 16  # two tiles in eight parts, for eight key heads: 128 of 132 multiprocessors
    assert {end - begin for _, _, _, begin, end, _ in cascade.items.tolist()} == {1024}
    many = [PrefixGroup(tuple(range(8 * i, 8 * i + 8)), 700 * (i + 1)) for i in range(8)]
    assert len(Cascade.of(many, 64, 32, 8).items) <= 16
    assert len(Cascade.of(many, 64, 32, 8).items) <= most_items(64, 32, 8)


@pytest.mark.parametrize("seed", range(3))
def test_every_key_of_a_prefix_is_read_once_for_each_row(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = random.permutation(40).tolist()
    groups, first = [], 0
    for size in random.integers(2, 9, 5).tolist():
        groups.append(PrefixGroup(tuple(rows[first : first + size]), int(random.integers(1, 900))))
        first += size
    cascade = Cascade.of(groups, 40, int(random.integers(1, 6)), int(random.integers(1, 9)))
    keys: dict[int, list[int]] = {row: [] for row in range(40)}
    written: set[int] = set()
    for begin_row, count, leader, begin, end, part in cascade.items.tolist():
        tile = cascade.rows[begin_row : begin_row + count].tolist()
        assert leader in tile
        for offset, row in enumerate(tile):
            keys[row].extend(range(begin, end))
            own, stride, parts = cascade.parts[row].tolist()
            assert part + offset in [own + i * stride for i in range(parts)]
            assert part + offset not in written
            written.add(part + offset)
    assert written == set(range(cascade.num_parts))
    expected = {row: group.num_keys for group in groups for row in group.rows}
    for row, read in keys.items():
        assert sorted(read) == list(range(expected.get(row, 0)))
        assert cascade.shared[row] == expected.get(row, 0)
