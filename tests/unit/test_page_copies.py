"""Copies of the beginnings of pages: in the memory of keys and values, and seen from outside."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.scripted import small_config

from sgl.lang.graph import Sampling
from sgl.runtime.cache_key import CacheKey
from sgl.runtime.loading.checkpoint import open_checkpoint
from sgl.runtime.loading.sources import locate
from sgl.runtime.model_runner import ModelRunner
from sgl.runtime.plan import Chunk, PageCopy, SampleSpec, StepPlan
from sgl.runtime.radix import RadixTree
from sgl.runtime.scheduler import Scheduler
from sgl.runtime.stats import Stats


def runner(page_size: int, num_pages: int) -> ModelRunner:
    checkpoint = open_checkpoint(locate("dummy"))
    config = small_config(page_size=page_size, num_pages=num_pages, num_threads=1)
    return ModelRunner(checkpoint.build_model("float32", "cpu"), checkpoint.config, config)


def chunk(sequence: int, ids: list[int], start: int, pages: list[int]) -> Chunk:
    spec = SampleSpec(sampling=Sampling(temperature=0.0), seed=0, position=0, output_ids=[])
    table = np.array(pages, dtype=np.int32)
    return Chunk(sequence=sequence, token_ids=ids, start=start, page_table=table, sample=spec)


def test_a_copied_page_gives_the_logits_of_a_computed_one() -> None:
    run = runner(page_size=8, num_pages=8)
    shared, tail = [65 + i for i in range(13)], [97, 98]
    run.forward(StepPlan(chunks=(chunk(1, [*shared, 120], 0, [0, 1]),)))
    copies = (PageCopy(source=1, target=2, num_tokens=5),)
    copied = run.forward(StepPlan(chunks=(chunk(2, tail, 13, [0, 2]),), copies=copies))
    computed = run.forward(StepPlan(chunks=(chunk(3, [*shared, *tail], 0, [4, 5]),)))
    torch.testing.assert_close(copied, computed, rtol=1e-4, atol=1e-5)


def test_all_sources_are_read_before_any_target_is_written() -> None:
    run = runner(page_size=4, num_pages=4)
    keys, values = run.cache.layer(0)
    before = torch.arange(16, dtype=torch.float32)
    for pool in (keys, values):
        pool[:] = before[:, None, None]
    run.cache.copy([PageCopy(source=0, target=1, num_tokens=3), PageCopy(source=1, target=2, num_tokens=4)])
    assert keys[:, 0, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 7, 4, 5, 6, 7, 12, 13, 14, 15]
    assert torch.equal(keys, values)


def test_the_page_with_most_in_common_is_found() -> None:
    tree = RadixTree(page_size=4)
    for page, ids in enumerate(([1, 2, 9, 9], [1, 2, 3, 9], [5, 5, 5, 5])):
        tree.extend(tree.root(), np.array(ids, dtype=np.int32), np.array([page], dtype=np.int32))
    assert tree.similar(tree.root(), np.array([1, 2, 3, 4], dtype=np.int32)) == (1, 3)
    assert tree.similar(tree.root(), np.array([1, 2], dtype=np.int32))[1] == 2
    assert tree.similar(tree.root(), np.array([7, 2], dtype=np.int32)) == (-1, 0)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_nothing_is_copied_that_nobody_shares(page_size: int) -> None:
    scheduler = Scheduler(small_config(page_size=page_size, num_pages=1024 // page_size), Stats())
    first = scheduler.new_sequence(CacheKey(), [1] * 70)
    other = scheduler.new_sequence(CacheKey(salt="other"), [1] * 70)
    assert scheduler.paging.borrowable(first, 69) == scheduler.paging.borrowable(other, 69) == (-1, 0)
