"""The Triton kernels against the torch references: in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sgl.grammars.matcher import MaskSource
from sgl.kernels import attention as reference
from sgl.kernels import elementwise as reference_elementwise
from sgl.kernels.triton import attention, elementwise, matmul, sampling
from sgl.lang.graph import Sampling
from sgl.runtime.device_sampler import DeviceSampler
from sgl.runtime.plan import Chunk, SampleSpec, ScoreSpec, StepPlan
from sgl.runtime.sampler import Sampler

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
if HAS_GPU:
    pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of the relative error (norms) against float32; half types round inputs of later stages, too."""
# The interpreter multiplies the bit patterns of bfloat16.
dtypes = pytest.mark.parametrize("dtype", [d for d in TOLERANCE if HAS_GPU or d != torch.bfloat16], ids=str)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def check(ours: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert ours.shape == expected.shape
    error = (ours.double() - expected.double()).norm() / expected.double().norm()
    assert error < TOLERANCE[dtype]


def wide(function: Callable[..., torch.Tensor], *tensors: torch.Tensor, **rest: object) -> torch.Tensor:
    return function(*(tensor.float() for tensor in tensors), **rest)


@dtypes
@pytest.mark.parametrize("num_rows", [1, 2, 16])
@pytest.mark.parametrize("gated", [False, True])
def test_linear_rows(dtype: torch.dtype, num_rows: int, gated: bool) -> None:
    x, weight = draw(num_rows, 160, dtype=dtype), draw(56, 160, dtype=dtype) * 160**-0.5
    residual = draw(num_rows, 28 if gated else 56, dtype=dtype)
    products = x.float() @ weight.float().T
    if gated:
        products = reference_elementwise.silu_mul(*products.chunk(2, dim=-1))
    ours = matmul.linear_rows(x, weight, gated=gated, residual=residual)
    check(ours, residual.float() + products, dtype)
    check(matmul.linear_rows(x, weight), x.float() @ weight.float().T, dtype)
    if num_rows == 1:
        for tile in (matmul.Tile("stream", 2, programs=3), matmul.Tile("walk", 4, 64)):
            check(matmul.linear_rows(x, weight, gated=gated, residual=residual, tile=tile), residual + products, dtype)


@dtypes
def test_norms_and_activation(dtype: torch.dtype) -> None:
    x, residual, weight = draw(5, 72, dtype=dtype), draw(5, 72, dtype=dtype, seed=1), draw(72, dtype=dtype)
    check(elementwise.rms_norm(x, weight, 1e-6), wide(reference_elementwise.rms_norm, x, weight, eps=1e-6), dtype)
    added = residual + x
    check(
        elementwise.add_rms_norm(x, residual, weight, 1e-6),
        wide(reference_elementwise.rms_norm, added, weight, eps=1e-6),
        dtype,
    )
    assert torch.equal(residual, added)
    gate_up = draw(3, 2 * 40, dtype=dtype)
    expected = wide(reference_elementwise.silu_mul, *gate_up.chunk(2, dim=-1))
    check(elementwise.silu_mul_packed(gate_up), expected, dtype)


@dtypes
def test_rotate_and_write(dtype: torch.dtype) -> None:
    num_tokens, heads, kv_heads, size = 3, 4, 2, 16
    qkv = draw(num_tokens, (heads + 2 * kv_heads) * size, dtype=dtype)
    angles = draw(num_tokens, size // 2)
    cos, sin = (torch.cat((part, part), dim=-1).to(dtype) for part in (angles.cos(), angles.sin()))
    keys, values = draw(9, kv_heads, size, dtype=dtype), draw(9, kv_heads, size, dtype=dtype, seed=1)
    before = keys.clone(), values.clone()
    slots = torch.tensor([7, 0, 4], device=DEVICE)
    query = elementwise.rotate_and_write(qkv, cos, sin, slots, keys, values, heads)
    parts = qkv.view(num_tokens, -1, size).split([heads, kv_heads, kv_heads], dim=1)
    check(query, wide(reference_elementwise.rotary, parts[0], cos, sin), dtype)
    check(keys[slots], wide(reference_elementwise.rotary, parts[1], cos, sin), dtype)
    assert torch.equal(values[slots], parts[2])
    others = [1, 2, 3, 5, 6, 8]
    assert torch.equal(keys[others], before[0][others])
    assert torch.equal(values[others], before[1][others])
    norms = draw(size, dtype=dtype, seed=2), draw(size, dtype=dtype, seed=3)
    query = elementwise.rotate_and_write(qkv, cos, sin, slots, keys, values, heads, norms, 1e-6)
    for ours, part, norm in zip((query, keys[slots]), parts, norms, strict=False):
        normed = wide(reference_elementwise.rms_norm, part, norm, eps=1e-6)
        check(ours, wide(reference_elementwise.rotary, normed, cos, sin), dtype)
    assert torch.equal(values[slots], parts[2])


@dtypes
@pytest.mark.parametrize(("page_size", "heads", "num_splits"), [(1, (2, 2), 3), (4, (6, 2), 3), (1, (6, 2), 1)])
def test_paged_attention(dtype: torch.dtype, page_size: int, heads: tuple[int, int], num_splits: int) -> None:
    """Decoding rows of very different lengths beside chunks with and without a prefix, on scattered pages full of NaN
    where nothing was written."""
    starts, lengths, size = [0, 130, 5, 63, 0], [1, 1, 70, 1, 3], 16
    needed = [-(-(start + length) // page_size) for start, length in zip(starts, lengths, strict=True)]
    pages = np.random.default_rng(0).permutation(sum(needed) + 5).astype(np.int32)
    tables = np.split(pages[: sum(needed)], np.cumsum(needed)[:-1])
    keys, values = (torch.full((len(pages) * page_size, heads[1], size), torch.nan, dtype=dtype) for _ in range(2))
    for start, length, table in zip(starts, lengths, tables, strict=True):
        slots = torch.from_numpy(reference.slots_of(table, page_size, 0, start + length))
        keys[slots] = draw(len(slots), heads[1], size, dtype=dtype, seed=start).cpu()
        values[slots] = draw(len(slots), heads[1], size, dtype=dtype, seed=length + 1).cpu()
    keys, values = keys.to(DEVICE), values.to(DEVICE)
    query = draw(sum(lengths), heads[0], size, dtype=dtype)
    plan = attention.plan_attention(starts, lengths, tables, page_size, DEVICE, heads[1])
    plan = replace(plan, num_splits=num_splits)
    ours = attention.paged_attention(query, keys, values, plan, size**-0.5)
    checked = reference.plan_attention(starts, lengths, tables, page_size, DEVICE)
    expected = wide(reference.paged_attention, query, keys, values, plan=checked, scale=size**-0.5)
    check(ours, expected, dtype)
    assert plan.write_slots.tolist() == checked.write_slots.tolist()


def test_rows_that_fill_up_read_nothing() -> None:
    keys = torch.full((4, 2, 16), torch.nan, device=DEVICE)
    plan = attention.plan_attention([0], [1], [np.array([1], dtype=np.int32)], 1, DEVICE, 2)
    for num_splits in (1, 2):
        empty = replace(plan, single_lengths=torch.zeros_like(plan.single_lengths), num_splits=num_splits)
        ours = attention.paged_attention(draw(1, 2, 16), keys, keys, empty, 1.0)
        assert torch.equal(ours, torch.zeros_like(ours))


def test_few_rows_are_split_and_many_are_not() -> None:
    assert attention.num_splits(1, 8) == 66
    assert attention.num_splits(16, 8) == 4
    assert attention.num_splits(64, 8) == attention.num_splits(256, 8) == 1


VOCAB = 128_256 if HAS_GPU else 9000
"""More than one block of the drawing kernel."""


def kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Weights of the tokens that may be drawn, in float64; 0 for the others. Ties rank by id."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    order = np.lexsort((np.arange(len(logits)), -logits))
    ranked = weights[order]
    keep = (np.cumsum(ranked) - ranked < top_p * ranked.sum()) if top_p < 1 else np.full(len(order), fill_value=True)
    keep &= ranked >= min_p
    keep &= np.arange(len(order)) < (top_k if top_k > 0 else len(order))
    keep[0] = True
    left = np.zeros_like(weights)
    left[order[keep]] = ranked[keep]
    return left


SETTINGS = [
    (1.0, -1, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.5, -1, 0.9, 0.0),
    (1.0, 50, 0.5, 0.05),
    (0.5, -1, 1.0, 0.3),
    (1.0, 3, 1.0, 0.0),
    (1.0, 20000, 0.999, 0.0),
    (1.0, -1, 1e-9, 0.0),
]


# The interpreter takes tenths of a second for a row.
@pytest.mark.parametrize("kind", ["random", "ties", "flat", "masked"] if HAS_GPU else ["ties", "masked"])
def test_draw(kind: str) -> None:
    """Each kept token gets the part of [0, 1) that belongs to it, in the order of ids, and no other gets one."""
    generator = np.random.default_rng(0)
    logits = generator.normal(size=VOCAB).astype(np.float32) * 3
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "flat":
        logits[:] = 1.25
    allowed = np.full(VOCAB, fill_value=True)
    if kind == "masked":
        allowed = generator.random(VOCAB) < 0.3
    words = np.packbits(allowed, bitorder="little")
    words = np.pad(words, (0, -len(words) % 4)).view(np.int32)
    uniforms = [0.0, 1e-7, 0.1, 0.5, 0.9, 1 - 2**-53] if HAS_GPU else [0.6]
    rows = [(setting, uniform) for setting in SETTINGS for uniform in uniforms]
    fields = [[1, 0 if kind == "masked" else -1, *setting, uniform] for setting, uniform in rows]
    padded = np.full((2, VOCAB + 5), 100.0, dtype=np.float32)
    padded[1, :VOCAB] = logits
    codes, ids = sampling.draw(
        torch.from_numpy(padded).to(DEVICE),
        torch.tensor(fields, dtype=torch.float64, device=DEVICE).T.contiguous(),
        torch.from_numpy(words[None]).to(DEVICE),
        VOCAB,
    )
    assert codes.tolist() == ids.tolist()
    for ((temperature, top_k, top_p, min_p), uniform), token in zip(rows, codes.tolist(), strict=True):
        weights = kept(np.where(allowed, logits, -np.inf), temperature, top_k, top_p, min_p)
        assert weights[token] > 0, (temperature, top_k, top_p, min_p, uniform)
        sums = np.cumsum(weights) / weights.sum()
        before = sums[token] - weights[token] / weights.sum()
        assert before - 2e-6 <= uniform <= sums[token] + 2e-6


def test_draw_greedy_and_unusable_rows() -> None:
    logits = np.zeros((4, VOCAB), dtype=np.float32)
    logits[0, [4200, 77, 4400]] = 3.0, 5.0, 5.0
    logits[1, 4200] = np.nan
    logits[2] = -np.inf
    words = np.zeros((2, -(-VOCAB // 32)), dtype=np.int32)
    words[1, 4200 // 32] = 1 << 4200 % 32
    rows = [(0, -1, 0.0), (0, 1, 0.0), (0, 1, 1.0), (0, 0, 0.0), (1, -1, 0.0), (1, -1, 1.0), (2, -1, 0.0), (3, -1, 0.0)]
    fields = torch.tensor([[row, mask, temperature, -1, 1.0, 0.0, 0.5] for row, mask, temperature in rows])
    codes, ids = sampling.draw(
        torch.from_numpy(logits).to(DEVICE),
        fields.double().T.contiguous().to(DEVICE),
        torch.from_numpy(words).to(DEVICE),
        VOCAB,
    )
    assert codes.tolist() == [77, 4200, 4200, sampling.DENIED, sampling.INVALID, sampling.INVALID, sampling.INVALID, 0]
    assert ids.tolist() == [77, 4200, 4200, 0, 0, 0, 0, 0]


def test_follow() -> None:
    ids = torch.arange(300, dtype=torch.int32, device=DEVICE)
    sources = torch.full((300,), -1, dtype=torch.int32, device=DEVICE)
    sources[[3, 299]] = torch.tensor([1, 0], dtype=torch.int32, device=DEVICE)
    sampling.follow(ids, sources, torch.tensor([70, 80], device=DEVICE))
    expected = list(range(300))
    expected[3], expected[299] = 80, 70
    assert ids.tolist() == expected
    targets = torch.tensor([5, -1, 299], dtype=torch.int32, device=DEVICE)
    sampling.enter(ids, targets, targets + 1000)
    expected[5], expected[299] = 1005, 1299
    assert ids.tolist() == expected


def test_device_sampler_draws_scores_and_describes_as_the_sampler() -> None:
    """Greedy rows, so that both draw the same tokens: plain, penalized, masked, biased, unusable, and scored ones."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(8, 300, generator=generator)
    logits[6] = torch.nan

    def spec(matcher: MaskSource | None = None, output: tuple[int, ...] = (), **fields: Any) -> SampleSpec:
        sampling = Sampling(**{"temperature": 0.0, **fields})
        blocked = (int(logits[7, :290].argmax()),) if fields.get("seed") else ()
        return SampleSpec(
            sampling=sampling, seed=3, position=1, output_ids=list(output), matcher=matcher, blocked_ids=blocked
        )

    best = int(logits[1, :290].argmax())
    specs = [
        spec(return_logprob=True, top_logprobs_num=3, token_ids_logprob=(5, 9)),
        spec(output=(best, best, 4), frequency_penalty=2.0, presence_penalty=1.0, repetition_penalty=1.9),
        spec(Only(17, 250)),
        spec(logit_bias=((40, 90.0),), return_logprob=True),
        spec(Only()),
        spec(custom_logit_processor="low"),
        spec(output=(1,), presence_penalty=0.5),
        spec(Only(int(logits[7, :290].argmax())), seed=1),
    ]
    tables = np.zeros(3, dtype=np.int32)
    scores = (ScoreSpec(offset=0, token_ids=(3, 4), top=2), ScoreSpec(offset=1, token_ids=(), top=0))
    chunks = [Chunk(sequence=9, token_ids=[1, 2], start=0, page_table=tables, scores=scores)]
    chunks += [
        Chunk(sequence=i + 1, token_ids=[1], start=0, page_table=tables, sample=spec) for i, spec in enumerate(specs)
    ]
    checks = (spec(return_logprob=True), spec(output=(best, best), presence_penalty=2.0))
    chunks.append(
        Chunk(sequence=10, token_ids=[1, 2, 3], start=0, page_table=tables, sample=spec(), num_drafts=2, checks=checks)
    )
    processors = {"low": lambda row, output, params: -row}
    given = torch.cat([torch.randn(2, 300, generator=generator), logits, torch.randn(3, 300, generator=generator)])
    ours = DeviceSampler(290, processors).sample(StepPlan(chunks=tuple(chunks)), given.to(DEVICE)).rows
    expected = Sampler(290, processors).sample(StepPlan(chunks=tuple(chunks)), given).rows
    pairs = [*zip(ours, expected, strict=True), *zip(ours[-1].more, expected[-1].more, strict=True)]
    assert len(pairs) == len(chunks) + 2
    for row, other in pairs:
        assert (row.sequence, row.token_id, row.failed) == (other.sequence, other.token_id, other.failed)
        assert [token for token, _ in row.top] == [token for token, _ in other.top]
        assert np.allclose([row.logprob, *(v for _, v in row.given)], [other.logprob, *(v for _, v in other.given)])
        for values, others in zip((*row.scores, *row.tops), (*other.scores, *other.tops), strict=True):
            assert np.allclose(values, others)
    assert [row.failed is not None for row in ours] == [False] * 5 + [True, False, True, True, False]


class Only:
    """A constraint that allows a few tokens."""

    def __init__(self, *token_ids: int) -> None:
        self.token_ids = token_ids

    def fill(self, bitmask: np.ndarray, row: int) -> None:
        bitmask[row] = 0
        for token_id in self.token_ids:
            bitmask[row, token_id // 32] |= np.int32(1 << token_id % 32) if token_id % 32 < 31 else np.int32(-(2**31))
