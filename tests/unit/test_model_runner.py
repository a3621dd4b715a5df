"""The runner on the toy model: which rows come, in which order, and that how a step is cut never changes them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch

from sgl.errors import ConfigError
from sgl.lang.graph import Sampling
from sgl.runtime.config import EngineConfig
from sgl.runtime.loading.checkpoint import open_checkpoint
from sgl.runtime.loading.sources import locate
from sgl.runtime.model_runner import ForwardBatch, KVCache, ModelRunner
from sgl.runtime.plan import UNKNOWN, Chunk, SampleSpec, ScoreSpec, StepPlan
from sgl.runtime.resolution import resolve

SAMPLE = SampleSpec(sampling=Sampling(), seed=0, position=0, output_ids=[])
TOKENS = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100]


def make_runner(page_size: int = 1) -> ModelRunner:
    checkpoint = open_checkpoint(locate("dummy"))
    config = EngineConfig(model_path="dummy", device="cpu", dtype="float32", max_total_tokens=256, page_size=page_size)
    model = checkpoint.build_model("float32", "cpu")
    return ModelRunner(model, checkpoint.config, resolve(config, checkpoint.facts()))


@pytest.fixture(params=[1, 4])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    return make_runner(request.param)


def chunk(
    tokens: Sequence[int], start: int = 0, *, first_page: int = 0, sample: bool = True, scores: Sequence[int] = ()
) -> Chunk:
    return Chunk(
        sequence=first_page,
        token_ids=list(tokens),
        start=start,
        page_table=np.arange(first_page, first_page + 32, dtype=np.int32),
        sample=SAMPLE if sample else None,
        scores=tuple(ScoreSpec(offset=offset, token_ids=(1,)) for offset in scores),
    )


def forward(runner: ModelRunner, *chunks: Chunk) -> torch.Tensor:
    return runner.forward(StepPlan(chunks=chunks))


def test_rows_come_in_chunk_then_offset_order(runner: ModelRunner) -> None:
    every = forward(runner, chunk(TOKENS, scores=range(len(TOKENS))))
    assert every.shape == (len(TOKENS), 512)
    assert every.dtype == torch.float32
    some = forward(runner, chunk(TOKENS, scores=[7, 2, 7]), chunk(TOKENS, first_page=32, sample=False, scores=[3]))
    assert torch.allclose(some, every[[2, 7, 11, 3]], atol=1e-5)


def test_a_chunk_without_wanted_rows_gives_none_and_is_still_written(runner: ModelRunner) -> None:
    expected = forward(runner, chunk(TOKENS, first_page=32))
    assert forward(runner, chunk(TOKENS[:5], sample=False)).shape == (0, 512)
    assert torch.allclose(forward(runner, chunk(TOKENS[5:], start=5)), expected, atol=1e-5)


def test_a_chunk_may_follow_a_token_that_was_just_drawn(runner: ModelRunner) -> None:
    forward(runner, chunk(TOKENS[:4]), chunk(TOKENS[:4], first_page=32))
    known = [chunk([72, 7], first_page=16), chunk([TOKENS[4]], start=4), chunk([9], start=4, first_page=32)]
    following = [msgspec.structs.replace(c, token_ids=[UNKNOWN], follows=1 - i) for i, c in enumerate(known[1:])]
    expected = forward(runner, *known)
    drawn = torch.tensor([9, TOKENS[4]])
    assert torch.equal(runner.forward(StepPlan(chunks=(known[0], *following)), drawn), expected)


def test_an_empty_plan_gives_no_rows(runner: ModelRunner) -> None:
    assert forward(runner).shape == (0, 512)


def test_token_by_token_is_the_same_as_at_once(runner: ModelRunner) -> None:
    at_once = forward(runner, chunk(TOKENS, scores=range(len(TOKENS))))
    one_by_one = [forward(runner, chunk([token], start=index, first_page=32)) for index, token in enumerate(TOKENS)]
    assert torch.allclose(torch.cat(one_by_one), at_once, atol=1e-5)


def test_neighbours_in_the_step_change_nothing(runner: ModelRunner) -> None:
    alone = forward(runner, chunk(TOKENS))
    forward(runner, chunk(TOKENS[:3], first_page=32, sample=False))
    together = forward(
        runner, chunk([7] * 9, first_page=16), chunk([TOKENS[3]], start=3, first_page=32), chunk(TOKENS, first_page=0)
    )
    assert torch.allclose(together[2:], alone, atol=1e-5)


def test_a_chunk_reads_a_prefix_that_another_computes_in_the_same_step(runner: ModelRunner) -> None:
    alone = forward(runner, chunk(TOKENS))
    tail = chunk(TOKENS[8:], start=8, first_page=32)
    shared = 8 // runner.page_size
    tail.page_table[:shared] = np.arange(48, 48 + shared)
    both = forward(runner, tail, chunk(TOKENS[:8], first_page=48, sample=False))
    assert torch.allclose(both, alone, atol=1e-5)


def test_the_toy_model_prefers_different_tokens_in_different_contexts() -> None:
    """A random model whose logits were all alike would let every test above pass."""
    logits = forward(make_runner(), chunk(TOKENS, scores=range(len(TOKENS))))
    assert len(set(logits.argmax(dim=-1).tolist())) > 3
    assert logits.std() > 0.1


def test_a_forward_leaves_no_graph(runner: ModelRunner) -> None:
    assert forward(runner, chunk(TOKENS)).is_inference()


def test_a_pool_that_the_host_has_not_is_a_config_error() -> None:
    config = open_checkpoint(locate("dummy")).config
    with pytest.raises(ConfigError, match="KV pool") as caught:
        KVCache(config, 2**50, 1, torch.float32, "cpu")
    assert caught.value.param == "max_total_tokens"


def test_positions_follow_the_chunks() -> None:
    plan = StepPlan(chunks=(chunk([1, 2, 3], start=4), chunk([9], start=0, first_page=32)))
    batch = ForwardBatch.from_plan(plan, 1)
    assert batch.positions.tolist() == [4, 5, 6, 0]
    assert batch.token_ids.tolist() == [1, 2, 3, 9]
    assert batch.logit_rows.tolist() == [2, 3]
    assert batch.attention.write_slots.tolist() == [4, 5, 6, 32]
