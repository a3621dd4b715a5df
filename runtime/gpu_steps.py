"""Steps on a GPU: one copy of everything the step needs, and CUDA graphs of the steps that only decode.

Owns the arrays of a step on the device and the graphs. Called by the model runner. A decode step is hundreds of kernels
of a few microseconds; launched one by one the host would be the slower of the two. A graph is captured per padded
number of rows, at start or at its first use (`decode_graphs.py`); rows that fill a step up read nothing and write to a
slot behind the pool. Tokens that the step before draws are read from where it puts them, when the step runs. Page
tables stay on the device, where graphs are recorded at all; a step sends what is new in them (`device_pages.py`). What
rows read together (`shared_prefixes.py`) makes another graph of the same number of rows. Steps that verify drafts have
graphs of their own (`gpu_verification.py`), each recorded when its size has come up several times.

Shapes: T tokens of the step, B rows of a decode step, U new entries of page tables, R rows of logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from sgl.kernels.attention import ancestors_of
from sgl.kernels.prefix_groups import Cascade
from sgl.kernels.triton.attention import DeviceCascade, HostPlan, PagedPlan, num_splits, plant_trees
from sgl.kernels.triton.sampling import enter, follow
from sgl.runtime.decode_graphs import (
    INTEGERS_PER_ROW,
    MOST_VERIFIED,
    VERIFIED_TOKENS,
    VERIFIED_WIDTHS,
    VerifiedSize,
    early_verified,
    graph_rows,
    holding,
    table_entries,
    verified_size,
)
from sgl.runtime.device_pages import DevicePages, Placed
from sgl.runtime.gpu_verification import VerifyGraph, blocks_of
from sgl.runtime.plan import UNKNOWN, StepPlan
from sgl.runtime.recording import record
from sgl.runtime.shared_prefixes import SharedReading

if TYPE_CHECKING:
    from sgl.runtime.device_clock import DeviceClock
    from sgl.runtime.model_runner import ForwardBatch, KVCache
    from sgl.runtime.models.registry import CausalLM

Ids = npt.NDArray[np.int32]
_NOTHING = np.empty(0, dtype=np.int32)
_NO_TREES = np.empty((0, 2), dtype=np.int32)
_EAGER_VERIFICATIONS, _PADDED_VERIFICATIONS = 3, 12
"""Of a size, before it is recorded: launched kernel by kernel, or filled up to a larger one."""


class Staging:
    """Integers for the device, copied all at once from pinned memory.

    Attributes:
        num_sent: how many were.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_sent = 0
        self._device = device
        self._host = torch.empty(0, dtype=torch.int32)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def put(self, arrays: Sequence[Ids], target: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Each array on the device, one after another in `target`, or in memory of its own."""
        # The host may be ahead: nobody waits for a step without logits, whose copy stands behind the step before it.
        self._copied.synchronize()
        sizes = [array.size for array in arrays]
        total = sum(sizes)
        self.num_sent += total
        if total > len(self._host):
            pinned = self._device.type == "cuda"
            self._host = torch.empty(max(2 * total, 4096), dtype=torch.int32, pin_memory=pinned)
        np.concatenate([array.reshape(-1) for array in arrays], out=self._host.numpy()[:total])
        if target is None:
            target = torch.empty(total, dtype=torch.int32, device=self._device)
        target[:total].copy_(self._host[:total], non_blocking=True)
        self._copied.record()
        parts = torch.split(target[:total], sizes)
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


class GpuSteps:
    """Turns plans into forwards of one model.

    Args:
        max_rows: of steps that graphs are captured for; 0 for none.
        max_drawn: rows of a step that draw, as many as graphs can follow.
        spare_slot: of the pool, for rows that fill a step up.
        clock: times the forwards.
        num_heads: query heads of the model; rows read what they have in common together. `None`: each for itself.
        vocab_size: of the model, where steps that verify drafts are recorded; else 0.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        *,
        max_rows: int,
        max_drawn: int,
        spare_slot: int,
        device: torch.device,
        clock: DeviceClock,
        num_heads: int | None = None,
        vocab_size: int = 0,
    ) -> None:
        self._model = model
        self._cache = cache
        self._clock = clock
        keys = cache.layer(0)[0]
        self._num_kv_heads = keys.shape[1]
        self.saved_tokens = 0
        """Keys that rows did not read because another row of their step did, in each layer."""
        self.sharing: SharedReading | None = None
        if num_heads is not None:
            self.sharing = SharedReading(
                cache.page_size,
                num_heads=num_heads,
                num_kv_heads=self._num_kv_heads,
                bytes_per_key=2 * keys[0].numel() * keys.itemsize,
            )
        self._rows = graph_rows(max_rows)
        self._spare_slot = spare_slot
        self._device = device
        self._staging = Staging(device)
        # Where the graphs look for tokens that they follow.
        self._drawn = torch.zeros(max_drawn, dtype=torch.int64, device=device)
        self._graphs: dict[tuple[int, bool], _DecodeGraph] = {}
        self._verify_graphs: dict[VerifiedSize, VerifyGraph] = {}
        self._verified: Counter[VerifiedSize] = Counter()
        self.num_recorded = 0
        """Steps that were recorded so far, of all kinds."""
        self._most_rows = max_rows
        most_verified = VERIFIED_TOKENS[-1] if max_rows and vocab_size else 0
        self._verify_logits = torch.empty(most_verified, vocab_size, dtype=torch.float32, device=device)
        self._pool: Any = None
        size = table_entries(max_rows)
        self._placing = DevicePages(size)
        self._tables = torch.zeros(size, dtype=torch.int32, device=device)

    @property
    def num_sent(self) -> int:
        """Integers that were sent to the device so far."""
        return self._staging.num_sent

    def forward(self, plan: StepPlan, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """Float32 logits `[R, V]`.

        Args:
            drawn: int64, on the device: the tokens that chunks may follow.
        """
        try:
            return self._forward(plan, drawn)
        except BaseException:
            self._placing.forget()  # entries that count as sent may not be there
            raise

    def _forward(self, plan: StepPlan, drawn: torch.Tensor | None) -> torch.Tensor:
        chunks = plan.chunks
        page_size = self._cache.page_size
        num_recorded = self.num_recorded
        ends = [chunk.start + len(chunk.token_ids) for chunk in chunks]
        placed = self._placing.place(chunks, [-(-end // page_size) for end in ends])
        starts, lengths = [chunk.start for chunk in chunks], [len(chunk.token_ids) for chunk in chunks]
        host = HostPlan(
            starts,
            lengths,
            [chunk.page_table for chunk in chunks],
            page_size,
            first_pages=None if placed is None else placed.first,
        )
        token_ids = np.fromiter(chain.from_iterable(chunk.token_ids for chunk in chunks), np.int32)
        sources = np.full(len(token_ids), -1, dtype=np.int32)
        if drawn is not None:
            sources[token_ids == UNKNOWN] = [chunk.follows for chunk in chunks if chunk.follows is not None]
        follows_known = drawn is None or len(drawn) <= len(self._drawn)
        verify = None
        size = None
        if placed is not None and follows_known and max(lengths) > 1:
            size = verified_size(len(chunks), max(lengths), len(token_ids))
            verify = self._verify_graph(size)
            if verify is not None:
                host.blocks = blocks_of(starts, lengths, placed.first)
        trees = _NO_TREES
        if any(chunk.parents for chunk in chunks):
            ancestors = [ancestors_of(chunk.parents) if chunk.parents else None for chunk in chunks]
            trees = plant_trees(host, starts, lengths, ancestors)
        if verify is not None and placed is not None:
            if drawn is not None:
                self._drawn[: len(drawn)] = drawn
            wanted = _logit_rows(plan)
            verify.fill(token_ids, sources, wanted, host, trees, placed)
            self._clock.begin(is_usual=self.num_recorded == num_recorded)
            logits = verify.replay(len(token_ids), len(wanted))
            self._clock.mark()
            return logits
        cascade = None
        if self.sharing is not None:
            cascade = self.sharing.of([chunk.page_table for chunk in chunks if len(chunk.token_ids) == 1])
        graph = None
        if placed is not None and follows_known:
            graph = self._graph(plan, host, cascade)
        if cascade is not None and (graph is None or graph.reads_together):
            self.saved_tokens += cascade.num_saved
        if graph is None or placed is None:
            will_be_recorded = size is not None and self._may_record_verifications
            return self._eager(plan, token_ids, sources, host, trees, placed, cascade, drawn, not will_be_recorded)
        if drawn is not None:
            self._drawn[: len(drawn)] = drawn
        graph.fill(token_ids, sources, host, placed, cascade)
        self._clock.begin(is_usual=self.num_recorded == num_recorded)
        logits = graph.replay(len(token_ids))
        self._clock.mark()
        return logits

    def _eager(
        self,
        plan: StepPlan,
        token_ids: Ids,
        sources: Ids,
        host: HostPlan,
        trees: Ids,
        placed: Placed | None,
        cascade: Cascade | None,
        drawn: torch.Tensor | None,
        is_usual: bool,
    ) -> torch.Tensor:
        targets, values = (placed.targets, placed.values) if placed is not None else (_NOTHING, _NOTHING)
        names = list(vars(host))
        arrays = [token_ids, sources, _logit_rows(plan), targets, values, trees, *vars(host).values()]
        together = [] if cascade is None else cascade.arrays
        ids, from_drawn, rows, targets_U, values_U, trees_M2, *attention = self._staging.put([*arrays, *together])
        self._clock.begin(is_usual=is_usual)
        if drawn is not None:
            follow(ids, from_drawn, drawn)
        of_host = dict(zip(names, attention, strict=False))
        if placed is not None:
            enter(self._tables, targets_U, values_U)
            of_host["pages"] = self._tables
        paged = PagedPlan(
            positions=of_host["positions"],
            write_slots=of_host["write_slots"],
            pages=of_host["pages"],
            single_rows=of_host["single_rows"],
            single_pages=of_host["single_pages"],
            single_lengths=of_host["single_lengths"],
            blocks=of_host["blocks"],
            num_splits=num_splits(len(host.single_rows), self._num_kv_heads),
            page_size=self._cache.page_size,
            cascade=None if cascade is None else DeviceCascade.there(attention[len(names) :], cascade.num_parts),
            trees=trees_M2 if len(trees) else None,
            most_queries=next((width for width in VERIFIED_WIDTHS if width >= host.most_queries), host.most_queries),
        )
        logits = self._model(_batch(ids, rows, paged), self._cache)
        self._clock.mark()
        return logits

    def _graph(self, plan: StepPlan, host: HostPlan, cascade: Cascade | None) -> _DecodeGraph | None:
        """The graph for a step in which every sequence decodes one token; `None` for other steps. One that reads
        together is recorded when steps have done so for a while: until then each row of a step reads for itself."""
        num_rows = len(host.single_rows)
        if num_rows != len(plan.chunks) or not all(chunk.logit_offsets for chunk in plan.chunks):
            return None
        rows = next((rows for rows in self._rows if rows >= num_rows), None)
        if rows is None:
            return None
        together = cascade is not None and self.sharing is not None
        if together and (rows, True) not in self._graphs:
            together = self.sharing is not None and self.sharing.lasts
        return self._captured(rows, together=together)

    def _verify_graph(self, size: VerifiedSize | None) -> VerifyGraph | None:
        """The graph for a step of short chunks, if there is one by now: its own, or a larger one until the size has
        come up often enough to be recorded itself."""
        if size is None or not len(self._verify_logits):
            return None
        if size in self._verify_graphs:
            return self._verify_graphs[size]
        self._verified[size] += 1
        larger = holding(size, self._verify_graphs)
        often = _EAGER_VERIFICATIONS if larger is None else _PADDED_VERIFICATIONS
        if self._verified[size] > often and self._may_record_verifications:
            return self._verify_captured(size)
        return None if larger is None else self._verify_graphs[larger]

    @property
    def _may_record_verifications(self) -> bool:
        return len(self._verify_logits) > 0 and len(self._verify_graphs) < MOST_VERIFIED

    def _verify_captured(self, size: VerifiedSize) -> VerifyGraph:
        if size not in self._verify_graphs:
            graph = VerifyGraph(
                self._model,
                self._cache,
                size,
                self._spare_slot,
                self._staging,
                self._drawn,
                self._tables,
                self._verify_logits,
            )
            self._pool = graph.capture(self._pool)
            self._verify_graphs[size] = graph
            self.num_recorded += 1
        return self._verify_graphs[size]

    def capture(self, rows: Sequence[int]) -> None:
        """Have the graphs for these numbers of rows before they are needed. The largest comes first: the others find
        their memory in its."""
        if len(self._verify_logits):
            self._verify_captured(VerifiedSize(1, VERIFIED_WIDTHS[0], VERIFIED_WIDTHS[0]))
            for size in reversed(early_verified(self._most_rows)):
                self._verify_captured(size)
        for each in sorted(rows, reverse=True):
            self._captured(each)
        if self.sharing is not None and max(rows, default=1) > 1:
            self._captured(max(rows), together=True)  # compiles the kernels that others need, too

    def forget(self) -> None:
        """Drop all graphs, once the device is done with them."""
        torch.cuda.synchronize(self._device)
        self._graphs.clear()
        self._verify_graphs.clear()
        self._pool = None

    def _captured(self, rows: int, *, together: bool = False) -> _DecodeGraph:
        if (rows, together) not in self._graphs:
            graph = _DecodeGraph(
                self._model,
                self._cache,
                rows,
                num_splits(rows, self._num_kv_heads),
                self._spare_slot,
                self._staging,
                self._drawn,
                self._tables,
                self.sharing if together else None,
            )
            self._pool = graph.capture(self._pool)
            self._graphs[rows, together] = graph
            self.num_recorded += 1
        return self._graphs[rows, together]


class _DecodeGraph:
    """One captured decode step of `rows` rows: integers in, logits out, always in the same memory."""

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        rows: int,
        splits: int,
        spare_slot: int,
        staging: Staging,
        drawn: torch.Tensor,
        tables: torch.Tensor,
        sharing: SharedReading | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._num_rows = rows
        self._spare_slot = spare_slot
        self._staging = staging
        device = cache.layer(0)[0].device
        self._drawn = drawn
        self._tables = tables
        self._integers = torch.zeros(rows * INTEGERS_PER_ROW, dtype=torch.int32, device=device)
        ids, sources, positions, slots, pages, lengths, targets, values = self._integers.view(INTEGERS_PER_ROW, rows)
        slots.fill_(spare_slot)
        sources.fill_(-1)
        targets.fill_(-1)
        self._ids, self._sources = ids, sources
        self._targets, self._values = targets, values
        every = torch.arange(rows, dtype=torch.int32, device=device)
        self._together = None if sharing is None else _GraphCascade(sharing, rows, device)
        self._batch = _batch(
            ids,
            every,
            PagedPlan(
                positions=positions,
                write_slots=slots,
                pages=tables,
                single_rows=every,
                single_pages=pages,
                single_lengths=lengths,
                blocks=torch.empty(0, 4, dtype=torch.int32, device=device),
                num_splits=splits,
                page_size=cache.page_size,
                cascade=None if self._together is None else self._together.on_device,
            ),
        )
        self._graph: Any = None  # until `capture`
        self._logits = torch.empty(0)

    @property
    def reads_together(self) -> bool:
        """Whether it was recorded for rows that read together what they have in common."""
        return self._together is not None

    def capture(self, pool: Any) -> Any:
        """Record the step; the pool of its graph."""
        self._graph, self._logits = record(self._compute, pool)
        return self._graph.pool()

    def _compute(self) -> torch.Tensor:
        follow(self._ids, self._sources, self._drawn)
        enter(self._tables, self._targets, self._values)
        return self._model(self._batch, self._cache)

    def fill(self, token_ids: Ids, sources: Ids, host: HostPlan, placed: Placed, cascade: Cascade | None) -> None:
        """Send a step's integers. New entries of page tables that are more than rows are written beforehand; what is
        read together is sent when it has changed."""
        if self._together is not None and cascade is not None:
            self._together.fill(cascade)
        rows = self._num_rows
        fits = len(placed.targets) <= rows
        arrays = [
            np.pad(array, (0, rows - len(array)), constant_values=value)
            for array, value in (
                (token_ids, 0),
                (sources, -1),
                (host.positions, 0),
                (host.write_slots, self._spare_slot),
                (host.single_pages, 0),
                (host.single_lengths, 0),
                (placed.targets if fits else _NOTHING, -1),
                (placed.values if fits else _NOTHING, 0),
            )
        ]
        if fits:
            self._staging.put(arrays, self._integers)
            return
        integers, targets, values = self._staging.put([np.concatenate(arrays), placed.targets, placed.values])
        self._integers.copy_(integers)
        enter(self._tables, targets, values)

    def replay(self, num_rows: int) -> torch.Tensor:
        """Logits of the first rows, the others being there to fill up; overwritten by the next step."""
        self._graph.replay()
        return self._logits[:num_rows]


class _GraphCascade:
    """What a graph's rows read together: room for as much as it can be, always in the same memory."""

    def __init__(self, sharing: SharedReading, rows: int, device: torch.device) -> None:
        items = sharing.most_items(rows)
        self._sizes = [rows, 3 * rows, rows, 6 * items]
        self._integers = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        # Of its own: what is sent seldom must not wait for what every step sends.
        self._staging = Staging(device)
        self._sent: Cascade | None = None
        shared, parts, members, work = torch.split(self._integers, self._sizes)
        self.on_device = DeviceCascade(
            shared, parts.view(-1, 3), members, work.view(-1, 6), num_parts=items * sharing.rows_per_tile
        )

    def fill(self, cascade: Cascade) -> None:
        """Send it, unless it is there; rows and items beyond it read nothing."""
        if cascade is not self._sent:
            flat = [array.reshape(-1) for array in cascade.arrays]
            padded = [np.pad(array, (0, size - len(array))) for array, size in zip(flat, self._sizes, strict=True)]
            self._staging.put(padded, self._integers)
            self._sent = cascade


def _logit_rows(plan: StepPlan) -> Ids:
    """Tokens of the step whose logits are wanted."""
    rows: list[int] = []
    begin = 0
    for chunk in plan.chunks:
        rows.extend(begin + offset for offset in chunk.logit_offsets)
        begin += len(chunk.token_ids)
    return np.array(rows, dtype=np.int32)


def _batch(ids: torch.Tensor, rows: torch.Tensor, plan: PagedPlan) -> ForwardBatch:
    from sgl.runtime.model_runner import ForwardBatch

    return ForwardBatch(token_ids=ids, positions=plan.positions, logit_rows=rows, attention=plan)
