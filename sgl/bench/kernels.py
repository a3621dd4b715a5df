"""`sgl bench kernels`: how near the attention kernels come to what the GPU can do, and how exact all kernels are.

Owns the cases, what each has to move and to compute, and the report. What is in use is measured first, case by case;
then errors against float64; then other ways to cut the same work, and torch's own attention where the shape allows it.
Each measurement stands alone: one that fails is told with its reason, and the next goes on. Keys and values of several
layers take turns, more than a cache holds; calls are recorded as one graph, as they are in a decoding step. The floor
of a case is what its bytes and its products take at the ceilings of the same run.

The clock is an argument, so that tests run the cases on a CPU in Triton's interpreter.

Shapes: as in `sgl.kernels.triton.attention`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sgl.bench.ceilings import Ceilings, device_seconds, measure_ceilings
from sgl.bench.provenance import Provenance, provenance
from sgl.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from sgl.kernels.triton.attention import PagedPlan, Tile

Calls = Sequence[Callable[[], object]]
Clock = Callable[[Calls], float]
"""Calls -> seconds of one of them, done one after another."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured; the defaults are Llama-3-8B's attention.

    Attributes:
        heads, kv_heads, head_dim: of a layer.
        rows, context, page_sizes: of decoding; every number of rows at every page size.
        drafts: tokens that are verified behind one that is known, of the first two numbers of rows.
        chunk: tokens of a prompt that is computed as one chunk.
        batch, shared, own: rows of a decoding step with a common prefix, and the tokens of that and of each row's own.
        resident_bytes: of keys and values that take turns, at least.
        dtypes: of the errors.
    """

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    device: str = "cuda"
    rows: tuple[int, ...] = (1, 64, 256)
    context: int = 1024
    page_sizes: tuple[int, ...] = (1, 16, 64)
    drafts: int = 4
    chunk: int = 8192
    batch: int = 64
    shared: int = 8192
    own: int = 128
    resident_bytes: int = 2**29
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")


class KernelTime(msgspec.Struct, frozen=True, kw_only=True):
    """One case computed in one way. `in_use` is the way that a step takes.

    Attributes:
        num_bytes, flops: that have to be moved and computed.
        floor_s: what that takes at the ceilings; 0 without ceilings.
    """

    case: str
    way: str
    seconds: float
    num_bytes: int
    flops: int
    floor_s: float
    in_use: bool = False

    @property
    def of_floor(self) -> float:
        """Share of the floor that is reached."""
        return self.floor_s / self.seconds


class KernelError(msgspec.Struct, frozen=True, kw_only=True):
    """`error` is the norm of the difference to float64 over its norm."""

    kernel: str
    dtype: str
    error: float


class KernelReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was found; `missing` says what was not, and why."""

    card: str
    provenance: Provenance
    sizes: Sizes
    ceilings: Ceilings | None
    times: tuple[KernelTime, ...]
    errors: tuple[KernelError, ...]
    missing: tuple[str, ...]


def run(
    *,
    sizes: Sizes | None = None,
    budget_s: float = 240.0,
    variants: bool = True,
    ceilings: Ceilings | None = None,
    clock: Clock | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> KernelReport:
    """Measure.

    Args:
        budget_s: after so many seconds no further measurement is begun.
        variants: measure other ways beside those in use.
        ceilings: of the device; measured if not given.
        clock: times calls; a recorded graph on the current device if not given.

    Raises:
        ConfigError: no CUDA device.
    """
    sizes = sizes or Sizes()
    if sizes.device == "cuda":
        _require_gpu()
        if ceilings is None:
            progress("measuring: ceilings")
            ceilings = measure_ceilings()
    bench = _Bench(sizes, ceilings, clock or _graph_seconds, time.monotonic() + budget_s, progress)
    verified = [_verify_case(sizes, rows) for rows in sizes.rows[:2]]
    cases = [*_decode_cases(sizes), _cascade_case(sizes), _prefill_case(sizes), *verified]
    for case in cases:
        bench.measure(case, in_use=True)
    bench.errors()
    if variants:
        for case in cases:
            bench.measure(case, in_use=False)
    return KernelReport(
        card=ceilings.card if ceilings is not None else sizes.device,
        provenance=provenance((), {}, ("triton",)),
        sizes=sizes,
        ceilings=ceilings,
        times=tuple(bench.times),
        errors=tuple(bench.found_errors),
        missing=tuple(bench.missing),
    )


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("torch sees no CUDA device", hint="run on a machine that has one", param="device")


def _graph_seconds(calls: Calls) -> float:
    """Of one call, all of them recorded and replayed together."""
    import torch

    for call in calls:
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return device_seconds(graph.replay) / len(calls)


class _Way(NamedTuple):
    """How a case is computed: a name, and the call for one layer's keys and values."""

    name: str
    call: Callable[[torch.Tensor, torch.Tensor], object]


class _Case(NamedTuple):
    """Something to compute. `slots` of a layer's pool; `ways` makes them, the one in use first."""

    name: str
    slots: int
    num_bytes: int
    flops: int
    ways: Callable[[], Iterator[_Way]]


class _Bench:
    """Measures, and keeps what it finds."""

    def __init__(
        self,
        sizes: Sizes,
        ceilings: Ceilings | None,
        clock: Clock,
        until: float,
        progress: Callable[[str], None],
    ) -> None:
        self._sizes = sizes
        self._ceilings = ceilings
        self._clock = clock
        self._until = until
        self._progress = progress
        self.times: list[KernelTime] = []
        self.found_errors: list[KernelError] = []
        self.missing: list[str] = []

    def measure(self, case: _Case, *, in_use: bool) -> None:
        """The way that is in use, or all others."""
        import torch

        sizes = self._sizes
        self._progress(f"measuring: {case.name}{'' if in_use else ', other ways'}")
        dtype = getattr(torch, sizes.dtype)
        per_layer = 2 * case.slots * sizes.kv_heads * sizes.head_dim * dtype.itemsize
        shape = (case.slots, sizes.kv_heads, sizes.head_dim)
        pools = [
            tuple(torch.randn(shape, device=sizes.device, dtype=dtype) for _ in range(2))
            for _ in range(max(2, min(64, -(-sizes.resident_bytes // per_layer))))
        ]
        for index, way in enumerate(case.ways()):
            if (index == 0) != in_use:
                continue
            if time.monotonic() > self._until:
                self.missing.append(f"{case.name}, {way.name}: no time was left")
                continue
            try:
                seconds = self._clock([_bound(way.call, keys, values) for keys, values in pools])
            except Exception as error:  # noqa: BLE001 - a tile that does not fit; the next one may
                self.missing.append(f"{case.name}, {way.name}: {_first_line(error)}")
                continue
            self.times.append(
                KernelTime(
                    case=case.name,
                    way=way.name,
                    seconds=seconds,
                    num_bytes=case.num_bytes,
                    flops=case.flops,
                    floor_s=self._floor(case),
                    in_use=in_use,
                )
            )

    def errors(self) -> None:
        """Of every kernel in every dtype."""
        from sgl.bench.kernel_errors import kernel_errors

        self._progress("comparing with float64")
        for dtype in self._sizes.dtypes:
            for name, compute in kernel_errors(self._sizes.device, dtype):
                try:
                    self.found_errors.append(KernelError(kernel=name, dtype=dtype, error=compute()))
                except Exception as error:  # noqa: BLE001 - as above
                    self.missing.append(f"{name}, {dtype}: {_first_line(error)}")

    def _floor(self, case: _Case) -> float:
        if self._ceilings is None:
            return 0.0
        return max(case.num_bytes / self._ceilings.bytes_per_s, case.flops / self._ceilings.flops_per_s)


def _bound(call: Callable[..., object], keys: torch.Tensor, values: torch.Tensor) -> Callable[[], object]:
    return lambda: call(keys, values)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _key_bytes(sizes: Sizes) -> int:
    """Keys and values of one position of a layer."""
    import torch

    return int(2 * sizes.kv_heads * sizes.head_dim * getattr(torch, sizes.dtype).itemsize)


def _query_bytes(sizes: Sizes, num_tokens: int) -> int:
    """Queries read and results written."""
    return num_tokens * _key_bytes(sizes) * sizes.heads // sizes.kv_heads


def _decode_cases(sizes: Sizes) -> Iterator[_Case]:
    for page_size in sizes.page_sizes:
        for rows in sizes.rows:
            yield _decode_case(sizes, rows, page_size)


def _decode_case(sizes: Sizes, rows: int, page_size: int) -> _Case:
    def ways() -> Iterator[_Way]:
        from sgl.kernels.triton import attention

        plan = _plan(sizes, [sizes.context] * rows, page_size)
        query = _queries(sizes, rows)
        used = attention.decode_tile(rows, query.shape[-1] * query.itemsize, page_size)
        yield _way(f"triton {tuple(used)}, {plan.num_splits} splits", query, plan)
        if page_size != sizes.page_sizes[0]:
            return
        for splits in sorted({max(1, plan.num_splits // 2), 2 * plan.num_splits, 4 * plan.num_splits}):
            if splits != plan.num_splits:
                way = f"triton {tuple(used)}, {splits} splits"
                yield _way(way, query, replace(plan, num_splits=splits))
        for tile in _decode_tiles():
            if tile != used:
                yield _way(f"triton {tuple(tile)}, {plan.num_splits} splits", query, plan, decode=tile)
        yield from _sdpa_decode(sizes, rows)

    num_bytes = rows * sizes.context * _key_bytes(sizes) + _query_bytes(sizes, rows)
    flops = 4 * rows * sizes.context * sizes.heads * sizes.head_dim
    name = f"decode, {rows} rows x {sizes.context}, page size {page_size}"
    return _Case(name, rows * -(-sizes.context // page_size) * page_size, num_bytes, flops, ways)


def _cascade_case(sizes: Sizes) -> _Case:
    context = sizes.shared + sizes.own

    def ways() -> Iterator[_Way]:
        from sgl.kernels.triton import attention

        query = _queries(sizes, sizes.batch)
        apart = _plan(sizes, [context] * sizes.batch, 1, shared=sizes.shared)
        together = _together(sizes, apart, attention.SHARED)
        yield _way(f"triton, prefix together {tuple(attention.SHARED)}", query, together)
        yield _way("triton, each row by itself", query, apart)
        yield _way("triton, prefix together, rows join it", query, together, apart=False)
        yield _way(f"triton, prefix together, own {tuple(attention.DECODE)}", query, together, decode=attention.DECODE)
        for tile in (*_huge_tiles(), *_wide_tiles()):
            if tile != attention.SHARED:
                name = f"triton, prefix together {tuple(tile)}"
                yield _way(name, query, _together(sizes, apart, tile), shared=tile)

    num_bytes = (sizes.shared + sizes.batch * sizes.own) * _key_bytes(sizes) + _query_bytes(sizes, sizes.batch)
    flops = 4 * sizes.batch * context * sizes.heads * sizes.head_dim
    name = f"decode, {sizes.batch} rows, {sizes.shared} shared + {sizes.own} own"
    return _Case(name, sizes.shared + sizes.batch * sizes.own, num_bytes, flops, ways)


def _verify_case(sizes: Sizes, rows: int) -> _Case:
    length = sizes.drafts + 1

    def ways() -> Iterator[_Way]:
        plan = _plan(sizes, [sizes.context] * rows, 1, length=length)
        query = _queries(sizes, rows * length)
        yield _way("triton, all tokens of a row together", query, plan)
        yield _way("triton, as chunks of a prompt", query, replace(plan, most_queries=plan.prefill.queries))

    num_bytes = rows * sizes.context * _key_bytes(sizes) + _query_bytes(sizes, rows * length)
    flops = 4 * rows * length * sizes.context * sizes.heads * sizes.head_dim
    return _Case(
        f"verify, {rows} rows x {sizes.context}, {length} tokens", rows * sizes.context, num_bytes, flops, ways
    )


def _prefill_case(sizes: Sizes) -> _Case:
    def ways() -> Iterator[_Way]:
        from sgl.kernels.triton import attention

        query = _queries(sizes, sizes.chunk)
        yield _way(f"triton {tuple(attention.PREFILL)}", query, _plan(sizes, [sizes.chunk], 1, length=sizes.chunk))
        for tile in _wide_tiles():
            if tile != attention.PREFILL:
                plan = _plan(sizes, [sizes.chunk], 1, length=sizes.chunk, prefill=tile)
                yield _way(f"triton {tuple(tile)}", query, plan)
        yield from _sdpa_prefill(sizes, query)

    num_bytes = sizes.chunk * _key_bytes(sizes) + _query_bytes(sizes, sizes.chunk)
    flops = 2 * sizes.chunk * (sizes.chunk + 1) * sizes.heads * sizes.head_dim
    return _Case(f"prefill, {sizes.chunk} tokens", sizes.chunk, num_bytes, flops, ways)


def _decode_tiles() -> Iterator[Tile]:
    from sgl.kernels.triton.attention import Tile

    for keys, warps, stages in (
        (64, 4, 3),
        (32, 4, 4),
        (64, 4, 2),
        (64, 4, 4),
        (64, 8, 3),
        (64, 2, 3),
        (128, 4, 2),
        (128, 4, 3),
        (128, 8, 3),
    ):
        yield Tile(16, keys, warps, stages)


def _wide_tiles() -> Iterator[Tile]:
    """Of many queries: prompts and prefixes of groups."""
    from sgl.kernels.triton.attention import Tile

    for queries, keys, warps, stages in (
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (128, 64, 8, 4),
        (128, 64, 4, 3),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
        (64, 64, 4, 3),
        (64, 64, 4, 2),
        (64, 128, 4, 2),
    ):
        yield Tile(queries, keys, warps, stages)


def _huge_tiles() -> Iterator[Tile]:
    """For prefixes of groups: keys are read once for more rows, by more warps."""
    from sgl.kernels.triton.attention import Tile

    for keys, warps, stages in ((64, 16, 3), (64, 16, 2), (128, 16, 2)):
        yield Tile(256, keys, warps, stages)


def _way(name: str, query: torch.Tensor, plan: PagedPlan, **cut: Any) -> _Way:
    from sgl.kernels.triton.attention import paged_attention

    scale = query.shape[-1] ** -0.5
    return _Way(name, lambda keys, values: paged_attention(query, keys, values, plan, scale, **cut))


def _queries(sizes: Sizes, num_tokens: int) -> torch.Tensor:
    import torch

    shape = (num_tokens, sizes.heads, sizes.head_dim)
    return torch.randn(shape, device=sizes.device, dtype=getattr(torch, sizes.dtype))


def _plan(
    sizes: Sizes,
    contexts: Sequence[int],
    page_size: int,
    *,
    shared: int = 0,
    length: int = 1,
    prefill: Tile | None = None,
) -> PagedPlan:
    """The last `length` tokens of each context, on pages in random order; the first `shared` keys are the same ones."""
    import numpy as np

    from sgl.kernels.triton.attention import PREFILL, plan_attention

    common = shared // page_size
    own = [-(-context // page_size) - common for context in contexts]
    order = np.random.default_rng(0).permutation(common + sum(own)).astype(np.int32)
    prefix, rest = order[:common], order[common:]
    tables = [np.concatenate([prefix, pages]) for pages in np.split(rest, np.cumsum(own)[:-1])]
    return plan_attention(
        [context - length for context in contexts],
        [length] * len(contexts),
        tables,
        page_size,
        sizes.device,
        sizes.kv_heads,
        prefill=prefill or PREFILL,
    )


def _together(sizes: Sizes, plan: PagedPlan, tile: Tile) -> PagedPlan:
    """The same rows, their prefix read once."""
    from sgl.kernels.prefix_groups import Cascade, PrefixGroup
    from sgl.kernels.triton.attention import DeviceCascade

    group = PrefixGroup(tuple(range(sizes.batch)), sizes.shared)
    rows = max(1, tile.queries // (sizes.heads // sizes.kv_heads))
    cascade = Cascade.of([group], sizes.batch, rows, sizes.kv_heads)
    return replace(plan, cascade=DeviceCascade.of(cascade, sizes.device))


def _sdpa_decode(sizes: Sizes, rows: int) -> Iterator[_Way]:
    """torch's attention over keys and values that lie one after another, as no pool has them."""
    from torch.nn.functional import scaled_dot_product_attention

    query = _queries(sizes, rows).unsqueeze(2)

    def call(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        key, value = (pool.view(rows, -1, *pool.shape[1:]).transpose(1, 2) for pool in (keys, values))
        return scaled_dot_product_attention(query, key, value, enable_gqa=True)

    for name, backend in _sdpa_backends():
        yield _Way(f"torch {name}, contiguous", _under(backend, call))


def _sdpa_prefill(sizes: Sizes, query_THD: torch.Tensor) -> Iterator[_Way]:
    from torch.nn.functional import scaled_dot_product_attention

    query = query_THD.transpose(0, 1).unsqueeze(0)

    def call(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        key, value = (pool.transpose(0, 1).unsqueeze(0) for pool in (keys, values))
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    for name, backend in _sdpa_backends():
        yield _Way(f"torch {name}, contiguous", _under(backend, call))


def _sdpa_backends() -> Iterator[tuple[str, Callable[[], AbstractContextManager[Any]]]]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not torch.cuda.is_available():
        yield "math", nullcontext
        return
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        yield name, _with_backend(sdpa_kernel, backend)


def _with_backend(sdpa_kernel: Any, backend: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: sdpa_kernel([backend])


def _under(
    context: Callable[[], AbstractContextManager[Any]], call: Callable[..., object]
) -> Callable[[torch.Tensor, torch.Tensor], object]:
    def inside(keys: torch.Tensor, values: torch.Tensor) -> object:
        with context():
            return call(keys, values)

    return inside
