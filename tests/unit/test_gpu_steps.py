"""Steps as `gpu_steps.py` sends them, on a CPU: kernels in Triton's interpreter, graphs computed anew when replayed.

What is left to a GPU is the recording itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from sgl.kernels.attention import kv_write
from sgl.kernels.triton.attention import paged_attention
from sgl.lang.graph import Sampling
from sgl.runtime import gpu_steps, shared_prefixes
from sgl.runtime.gpu_steps import GpuSteps
from sgl.runtime.page_table import PageTable
from sgl.runtime.plan import Chunk, SampleSpec, StepPlan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
HEADS, KV_HEADS, DIM, VOCAB, SLOTS = 2, 1, 16, 50, 700
SAMPLE = SampleSpec(sampling=Sampling(temperature=0.0), seed=0, position=0, output_ids=[])


class Cache:
    """One layer's pool."""

    page_size = 1

    def __init__(self) -> None:
        self.keys = torch.full((SLOTS, KV_HEADS, DIM), torch.nan)
        self.values = self.keys.clone()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.values


class Model:
    """A layer of attention over random embeddings that know their position."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.tables = torch.randn(3, VOCAB, HEADS * DIM, generator=generator)
        self.places = torch.randn(1000, HEADS * DIM, generator=generator)
        self.plans: list[Any] = []

    def __call__(self, batch: Any, cache: Cache) -> torch.Tensor:
        plan = batch.attention
        self.plans.append(plan)
        ids, places = batch.token_ids.long(), self.places[batch.positions.long()]
        query, key, value = (table[ids] + places for table in self.tables)
        shape = (-1, KV_HEADS, DIM)
        kv_write(cache.keys, cache.values, key[:, :DIM].reshape(shape), value[:, :DIM].reshape(shape), plan.write_slots)
        mixed = paged_attention(query.view(-1, HEADS, DIM), cache.keys, cache.values, plan, 1.0)
        return mixed.flatten(1)[batch.logit_rows.long()]


class Clock:
    def begin(self, *, is_usual: bool = True) -> None:
        pass

    mark = begin


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Staging:
        num_sent = 0

        def __init__(self, device: torch.device) -> None:
            pass

        def put(self, arrays: Sequence[np.ndarray], target: torch.Tensor | None = None) -> list[torch.Tensor]:
            flat = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
            self.num_sent += len(flat)
            if target is not None:
                target[: len(flat)] = flat
                flat = target[: len(flat)]
            parts = torch.split(flat, [array.size for array in arrays])
            return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]

    monkeypatch.setattr(gpu_steps, "Staging", Staging)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(gpu_steps._DecodeGraph, "capture", lambda graph, pool: pool)
    monkeypatch.setattr(gpu_steps._DecodeGraph, "replay", lambda graph, rows: graph._compute()[:rows])
    monkeypatch.setattr("sgl.kernels.triton.attention._PROGRAMS", 8)
    monkeypatch.setattr(shared_prefixes, "MIN_SAVED_BYTES", 10_000)


def steps(model: Model, cache: Cache, *, together: bool) -> GpuSteps:
    return GpuSteps(
        model,  # type: ignore[arg-type]
        cache,  # type: ignore[arg-type]
        max_rows=4,
        max_drawn=8,
        spare_slot=SLOTS - 1,
        device=torch.device("cpu"),
        clock=Clock(),  # type: ignore[arg-type]
        num_heads=HEADS if together else None,
    )


class Row:
    """A sequence whose pages are its own behind those of another."""

    pages = iter(range(SLOTS - 1))

    def __init__(self, sequence: int, prefix: Sequence[int] = ()) -> None:
        self.sequence, self.table, self.length = sequence, PageTable(list(prefix)), len(prefix)

    def chunk(self, tokens: Sequence[int]) -> Chunk:
        self.table.extend([next(self.pages) for _ in tokens])
        start, self.length = self.length, self.length + len(tokens)
        return Chunk(
            sequence=self.sequence, token_ids=list(tokens), start=start, page_table=self.table.view, sample=SAMPLE
        )


def test_reading_together_gives_what_each_row_reads_by_itself() -> None:
    """A prompt, forks of it that decode, also beside a chunk of another, one that leaves and one that comes back."""
    Row.pages = iter(range(SLOTS - 1))
    models, caches = (Model(), Model()), (Cache(), Cache())
    both = [steps(*pair, together=together) for *pair, together in zip(models, caches, (True, False), strict=True)]

    def compute(*chunks: Chunk) -> None:
        ours, expected = (each.forward(StepPlan(chunks=chunks)) for each in both)
        assert torch.allclose(ours, expected, atol=2e-5)
        assert len(ours) == len(chunks)

    prompt = Row(0)
    compute(prompt.chunk([i % VOCAB for i in range(140)]))
    forks = [Row(1 + i, prompt.table.view.tolist()) for i in range(3)]
    for step in range(6):
        compute(*(row.chunk([7 + step + row.sequence]) for row in forks))
    # The first steps wait whether it lasts; then one is recorded in which three rows read 140 keys once.
    together = [plan.cascade is not None for plan in models[0].plans]
    assert together == [False] + [False] * 3 + [True] * 3
    assert models[0].plans[-1].cascade.shared.tolist() == [140, 140, 140, 0]
    assert not any(plan.cascade for plan in models[1].plans)

    other = Row(9)
    compute(forks[0].chunk([3]), other.chunk([i % VOCAB for i in range(20)]), forks[2].chunk([4]))
    assert models[0].plans[-1].cascade.shared.tolist() == [140, 140]
    sent = both[0]._graphs[4, True]._together
    compute(*(row.chunk([5]) for row in (other, *forks)))
    assert models[0].plans[-1].cascade.shared.tolist() == [0, 140, 140, 140]
    compute(*(row.chunk([5]) for row in (forks[1], other)))
    assert models[0].plans[-1].cascade is None  # one row alone shares nothing
    compute(*(row.chunk([6]) for row in (other, *forks)))
    assert both[0]._graphs[4, True]._together is sent
    assert [each.saved_tokens for each in both] == [140 * (3 * 2 + 1 + 2 + 2), 0]


def test_who_reads_together_is_sent_when_it_changes() -> None:
    Row.pages = iter(range(SLOTS - 1))
    each = steps(Model(), Cache(), together=True)
    prompt = Row(0)
    each.forward(StepPlan(chunks=(prompt.chunk(list(range(40)) * 3),)))
    forks = [Row(1 + i, prompt.table.view.tolist()) for i in range(3)]
    sent: list[int] = []
    for _ in range(8):
        each.forward(StepPlan(chunks=tuple(row.chunk([1]) for row in forks)))
        graph = each._graphs.get((4, True))
        sent.append(0 if graph is None or graph._together is None else graph._together._staging.num_sent)
    assert sent[:3] == [0, 0, 0]
    assert len(set(sent[3:])) == 1
    assert sent[3] > 0
