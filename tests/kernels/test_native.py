"""The native CPU kernels against float64 and the torch references, on this machine's instruction set and in plain C++.

The library is built once into the user's cache, where an engine looks for it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from sgl.errors import InternalError
from sgl.kernels import attention, elementwise, sampling
from sgl.kernels.native import library, ops, weights
from sgl.kernels.native.types import COLUMNS, ROW_BYTES, TYPES
from sgl.kernels.native.weights import PackedWeight
from sgl.runtime.loading.cache import cache_folder

BEST = library.best_instruction_set()
QUANTIZED = sorted(COLUMNS)
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
NUM_THREADS = 3  # more than rows in some loops, fewer than in others

pytestmark = pytest.mark.skipif(library.compiler() is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module", params=sorted({BEST, "plain"}), autouse=True)
def native(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each test runs with every library that this machine can execute."""
    before = library.loaded()
    loaded = library.load(cache_folder() / "native", request.param)
    loaded.sgl_set_threads(NUM_THREADS)
    yield request.param
    loaded.sgl_set_threads(1)
    library.use(before)


def blocks(kind: str, rows: int, cols: int) -> np.ndarray:
    """A matrix of random blocks as they lie in a file, one row of bytes per row."""
    rng = np.random.default_rng(3)
    if kind in ("Q4_0", "Q4_1", "Q8_0"):
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        return np.ascontiguousarray(quants.quantize(values, GGMLQuantizationType[kind]))
    unit, unit_bytes = ROW_BYTES[kind]
    raw = rng.integers(0, 256, (rows, cols // unit, unit_bytes), dtype=np.uint8)
    scales = (rng.random((rows, cols // unit, 2)) * 0.01).astype(np.float16).view(np.uint8)
    if kind == "Q4_K":
        raw[..., :4] = scales
    else:
        raw[..., 208:] = scales[..., :2]
    return np.ascontiguousarray(raw.reshape(rows, -1))


def quantized(kind: str, rows: int, cols: int) -> tuple[PackedWeight, torch.Tensor]:
    """A packed matrix, and its numbers by the gguf package."""
    raw = blocks(kind, rows, cols)
    values = quants.dequantize(raw, GGMLQuantizationType[kind])
    return PackedWeight(raw.reshape(-1), kind, (rows, cols)), torch.from_numpy(values)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def test_the_library_is_what_was_asked_for(native: str) -> None:
    name = library.library().sgl_isa().decode()
    assert name.startswith(native)
    assert library.library().sgl_lanes() == (16 if native == "avx512" else 8)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_blocks_keep_their_numbers_to_the_bit(kind: str) -> None:
    packed, expected = quantized(kind, 37, 2 * COLUMNS[kind])
    assert torch.equal(packed.numbers(), expected)
    assert torch.equal(packed.take(torch.tensor([36, 0, 36])), expected[[36, 0, 36]])


@pytest.mark.parametrize("kind", QUANTIZED)
def test_blocks_take_no_more_memory_than_in_the_file(kind: str) -> None:
    packed, _ = quantized(kind, 64, 512)
    # Q4_K's and Q6_K's scales of 6 bits lie in bytes: 4 bytes more per 256 columns.
    assert packed.num_bytes <= blocks(kind, 64, 512).nbytes + (64 * 2 * 4 if kind == "Q4_K" else 0)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_product(kind: str) -> None:
    """Activations are rounded to 8 bits by blocks of 32: an error of half a step of amax / 127, uniformly distributed,
    is about 0.5 % of a product of random numbers."""
    packed, values = quantized(kind, 45, 512)
    x = torch.randn(7, 512, generator=torch.Generator().manual_seed(1))
    got = ops.linear(x, packed)
    assert relative_error(got, x.double() @ values.double().T) < 0.01
    # With activations that are whole numbers of a step, nothing is rounded but the sums.
    whole = torch.randint(-127, 128, (7, 512), generator=torch.Generator().manual_seed(2)).float()
    whole[:, ::32] = 127
    assert relative_error(ops.linear(whole, packed), whole.double() @ values.double().T) < 2e-6


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "cols"), [(45, 101), (128, 64), (93, 96), (3, 2)])
def test_floating_point_product_with_bias(dtype: torch.dtype, rows: int, cols: int, native: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(rows, cols, generator=generator).to(dtype), torch.randn(rows, generator=generator)
    x = torch.randn(50, cols, generator=generator)  # two tiles of rows, one more, and a part of one
    packed = PackedWeight.of_tensor(weight)
    packed.set_bias(bias)
    rounds = dtype == torch.bfloat16 and b"bf16" in library.library().sgl_isa()
    tolerance = 4e-3 if rounds else 1e-6  # there, activations are rounded to bfloat16 for the instruction
    assert torch.equal(packed.numbers(), weight.float())
    assert relative_error(ops.linear(x, packed), x.double() @ weight.double().T + bias.double()) < tolerance


@pytest.mark.parametrize(("kind", "cols"), [*((kind, 512) for kind in QUANTIZED), *product(FLOATS, (75, 96))])
def test_a_row_of_a_product_does_not_depend_on_its_neighbours(kind: str | torch.dtype, cols: int) -> None:
    if isinstance(kind, str):
        packed, _ = quantized(kind, 93, cols)
    else:
        packed = PackedWeight.of_tensor(torch.randn(93, cols).to(kind))
    x = torch.randn(50, packed.shape[1], generator=torch.Generator().manual_seed(4))
    together = ops.linear(x, packed)
    for size in (1, 2, 3, 4, 7, 17, 33):
        for begin in range(0, 50 - size + 1, 3):
            assert torch.equal(ops.linear(x[begin : begin + size], packed), together[begin : begin + size])


def test_a_nan_in_a_row_reaches_its_products_and_no_others() -> None:
    packed, _ = quantized("Q4_1", 16, 64)
    x = torch.randn(3, 64)
    x[1, 40] = torch.nan
    x[2, 3] = torch.inf
    got = ops.linear(x, packed)
    assert got[0].isfinite().all()
    assert got[1].isnan().all()
    assert not got[2].isfinite().any()


@pytest.mark.parametrize(("kind", "tolerance"), [("int8", 0.01), ("int4", 0.12)])
def test_quantize_rounds_to_half_a_step(kind: str, tolerance: float) -> None:
    weight = torch.randn(20, 96, generator=torch.Generator().manual_seed(5))
    weight[3] = 0
    packed = weights.quantize(weight, kind)  # type: ignore[arg-type]
    assert relative_error(packed.numbers(), weight.double()) < tolerance
    assert not packed.numbers()[3].any()


def test_what_is_no_matrix_of_the_type_is_refused() -> None:
    with pytest.raises(InternalError, match="no Q8_0 matrix"):
        PackedWeight(np.zeros(34 * 3, dtype=np.uint8), "Q8_0", (2, 32))
    with pytest.raises(InternalError, match="blocks of 32"):
        weights.quantize(torch.zeros(2, 33), "int8")
    with pytest.raises(InternalError, match="row 2 of a matrix of 2 rows"):
        PackedWeight.of_tensor(torch.zeros(2, 4)).take(torch.tensor([2]))
    assert set(TYPES) == set(ROW_BYTES)


@pytest.mark.parametrize("size", [8, 21, 576])
def test_elementwise_ops(size: int) -> None:
    generator = torch.Generator().manual_seed(6)
    x, gate, up = torch.randn(3, 5, size, generator=generator) * 4
    weight = torch.randn(size, generator=generator)
    assert torch.allclose(ops.rms_norm(x, weight, 1e-5), elementwise.rms_norm(x, weight, 1e-5), atol=1e-5, rtol=1e-5)
    assert torch.allclose(ops.silu_mul(gate, up), elementwise.silu_mul(gate, up), atol=1e-5, rtol=1e-5)
    far = torch.tensor([[-200.0, -87.5, -1e-8, 0.0, 1e-8, 87.5, 200.0, torch.nan]])
    got = ops.silu_mul(far, torch.ones_like(far))
    assert torch.allclose(got, elementwise.silu_mul(far, torch.ones_like(far)), atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dim", [8, 10, 64])
def test_rotary(dim: int) -> None:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(5, 3, dim, generator=generator)
    angles = (torch.rand(5, dim // 2, generator=generator) * 6).repeat(1, 2)
    got = ops.rotary(x, angles.cos(), angles.sin())
    assert torch.allclose(got, elementwise.rotary(x, angles.cos(), angles.sin()), atol=1e-6)


def test_argmax_is_the_first_of_the_largest() -> None:
    logits = torch.randn(6, 101, generator=torch.Generator().manual_seed(8))
    logits[1, [7, 80]] = 50
    logits[2] = -torch.inf
    logits[3, 99] = torch.inf
    logits[4, 50] = torch.nan
    expected = logits.argmax(dim=-1)
    got = ops.argmax(logits)
    assert got.tolist() == [int(expected[0]), 7, -1, 99, -1, int(expected[5])]
    assert ops.argmax(logits[:, :90]).tolist()[:2] == logits[:2, :90].argmax(dim=-1).tolist()


@pytest.mark.parametrize("num_columns", [5000, 1024, 70])
def test_top_k_with_the_mass_of_the_row(num_columns: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(9, 5003, generator=generator)[:, :num_columns] * 4
    logits[1] = logits[1].round()  # ties, also at the end
    logits[2] = logits[2].sort().values  # each is larger than those before it
    logits[3, 8:] = -torch.inf
    logits[4, : num_columns - 8] = -torch.inf
    logits[5] = 1.0
    scale = torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0, 1e5, 1e5, 1e-3, 0.7], dtype=torch.float64)
    for k in (1, 50, num_columns):
        values, ids, mass = ops.top_k(logits, min(k, num_columns), scale)
        expected, order = logits.sort(dim=-1, descending=True, stable=True)
        there = values > -torch.inf
        assert torch.equal(values, expected[:, : values.shape[1]])
        assert torch.equal(ids[there], order[:, : values.shape[1]][there])
        assert torch.allclose(mass, (logits.double() * scale[:, None]).logsumexp(dim=-1), rtol=1e-12, atol=3e-6)
        other = sampling.top_k(logits, min(k, num_columns), scale)
        assert torch.equal(values, other[0])
        assert torch.equal(logits.gather(-1, other[1]), other[0])
        assert torch.allclose(mass, other[2], rtol=1e-12, atol=3e-6)


def test_argmax_under_a_mask() -> None:
    generator = torch.Generator().manual_seed(10)
    logits = torch.randint(-9, 9, (40, 1000), generator=generator).float()  # many are equal
    words = torch.randint(-(2**31), 2**31, (40, 32), generator=generator).int()
    words[:, ::3] = 0
    words[10:, 1::3] = -1
    words[20] = 0  # nothing is allowed
    words[21] = 0
    words[21, 31] = 1 << 7  # the last column alone, which is in no whole word
    words[22] = -1
    logits[23, 999] = torch.nan
    logits[24, 5] = torch.inf
    logits[25] = -torch.inf
    for num_columns in (1000, 992, 961):
        got = ops.argmax(logits[:, :num_columns], words)
        assert got.tolist() == elementwise.argmax(logits[:, :num_columns], words).tolist()
    assert got[20] == got[21] == -1
    assert ops.argmax(logits, words)[[20, 21, 23]].tolist() == [-1, 999, -1]


class Step:
    """A step of chunks over a random pool: queries, and what they attend to."""

    def __init__(
        self, chunks: list[tuple[int, int]], *, heads: int, kv_heads: int, dim: int, page_size: int, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(9)
        self.chunks = chunks
        pages = [-(-(start + length) // page_size) for start, length in chunks]
        order = torch.randperm(sum(pages), generator=generator).numpy().astype(np.int32)
        self.tables = np.split(order, np.cumsum(pages)[:-1])
        self.page_size, self.scale = page_size, dim**-0.5
        shape = (sum(pages) * page_size, kv_heads, dim)
        self.keys, self.values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        total = sum(length for _, length in chunks)
        self.query = torch.randn(total, heads, dim, generator=generator)

    def plan_arguments(self) -> tuple[list[int], list[int], list[np.ndarray], int]:
        starts, lengths = zip(*self.chunks, strict=True)
        return list(starts), list(lengths), self.tables, self.page_size

    def native(self) -> torch.Tensor:
        plan = ops.plan_attention(*self.plan_arguments())
        return ops.paged_attention(self.query, self.keys, self.values, plan, self.scale)

    def reference(self) -> torch.Tensor:
        plan = attention.plan_attention(*self.plan_arguments())
        query = (self.query * self.scale).bfloat16().float() if self.in_tiles() else self.query * self.scale
        return attention.paged_attention(query, self.keys.float(), self.values.float(), plan, 1.0)

    def in_tiles(self) -> bool:
        """Whether queries, and the weights of keys, are rounded to bfloat16 for the matrix unit."""
        matrix_unit = "amx_bf16" in library.cpu_features() and library.library().sgl_isa() == b"avx512+vnni+bf16"
        return matrix_unit and self.keys.dtype == torch.bfloat16 and self.keys.shape[2] % 32 == 0

    def agrees(self) -> bool:
        got, expected = self.native(), self.reference()
        if self.in_tiles():
            return relative_error(got, expected.double()) < 2e-3
        return torch.allclose(got, expected, atol=2e-6, rtol=1e-5)


MIXED = [(0, 1), (4, 1), (0, 40), (700, 1), (70, 3), (511, 1), (512, 1), (500, 30), (1100, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page_size"), [(6, 2, 64, 1), (3, 3, 20, 7), (4, 1, 96, 16)])
def test_attention_of_a_mixed_step(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, page_size: int) -> None:
    """Single tokens with one, two and three splits, chunks from nothing and after a prefix, across splits."""
    step = Step(MIXED, heads=heads, kv_heads=kv_heads, dim=dim, page_size=page_size, dtype=dtype)
    assert step.agrees()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (9, 3, 64), (2, 1, 128), (3, 3, 20)])
def test_attention_of_a_token_does_not_depend_on_its_chunk(heads: int, kv_heads: int, dim: int) -> None:
    """The last of 1,100 positions alone, at the end of short chunks, and in a prefill of the whole: the same bits."""
    results = []
    for start, length in [(1099, 1), (1098, 2), (1093, 7), (1000, 100), (0, 1100)]:
        step = Step([(start, length)], heads=heads, kv_heads=kv_heads, dim=dim, page_size=1, dtype=torch.bfloat16)
        query = torch.randn(heads, dim, generator=torch.Generator().manual_seed(10))
        step.query[-1] = query
        results.append(step.native()[-1])
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_on_one_prefix_are_computed_together_with_the_same_bits(dtype: torch.dtype) -> None:
    """Forks of one prompt of two splits and a bit, beside a stranger."""
    step = Step([(1030, 1)] * 4 + [(1030, 1)], heads=3, kv_heads=1, dim=32, page_size=1, dtype=dtype)
    together = [step.tables[0]] + [np.concatenate([step.tables[0][:1028], table[1028:]]) for table in step.tables[1:4]]
    step.tables = [*together, step.tables[4]]
    assert step.agrees()
    got = step.native()
    for row in range(5):
        alone = ops.plan_attention([1030], [1], [step.tables[row]], 1)
        only = ops.paged_attention(step.query[row : row + 1], step.keys, step.values, alone, step.scale)
        assert torch.equal(only[0], got[row])


def test_a_page_table_that_ends_before_its_chunk_is_refused() -> None:
    with pytest.raises(InternalError, match="2 pages of 4 do not reach position 9"):
        ops.plan_attention([0], [9], [np.zeros(2, dtype=np.int32)], 4)


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 16), (torch.bfloat16, 32)])
def test_nan_beyond_a_context_is_not_read(dtype: torch.dtype, dim: int) -> None:
    step = Step([(20, 1), (9, 5)], heads=2, kv_heads=1, dim=dim, page_size=32, dtype=dtype)
    for pool in (step.keys, step.values):
        pool[step.tables[0][0] * 32 + 21 : step.tables[0][0] * 32 + 32] = torch.nan
        pool[step.tables[1][0] * 32 + 14 : step.tables[1][0] * 32 + 32] = torch.nan
    assert step.native().isfinite().all()
    step.values[step.tables[0][0] * 32 + 3] = torch.nan
    got = step.native()
    assert got[0].isnan().all()
    assert got[1:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nan_of_a_later_token_reaches_no_earlier_one(dtype: torch.dtype) -> None:
    """As a wrong guess may leave one behind tokens that are right."""
    step = Step([(40, 8)], heads=2, kv_heads=1, dim=32, page_size=1, dtype=dtype)
    before = step.native()
    step.values[step.tables[0][45]] = torch.nan
    got = step.native()
    assert got[:5].isfinite().all()
    assert relative_error(got[:5], before[:5].double()) < 4e-3
    assert got[5:].isnan().all()
