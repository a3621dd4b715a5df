"""Steps of short chunks as CUDA graphs: what verifying drafts needs, so that it costs no more launches than decoding.

Owns one recording, `VerifyGraph`, of a size of `decode_graphs.py`. `gpu_steps.py` makes and fills it. Chunks lie one
after another, and the step is filled up at its end: with tokens that write to a slot behind the pool and belong to no
chunk, and with chunks of no tokens. Each chunk is one block of queries, those of one token among them; the last tokens
of any may be a tree. The logits of all tokens are computed, in memory that all recordings share.

Shapes: T tokens and B chunks of the recorded size, R rows of logits that are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from sgl.kernels.triton.attention import HostPlan, PagedPlan
from sgl.kernels.triton.sampling import enter, follow
from sgl.runtime.decode_graphs import VerifiedSize
from sgl.runtime.device_pages import Placed
from sgl.runtime.recording import record

if TYPE_CHECKING:
    from sgl.runtime.gpu_steps import Staging
    from sgl.runtime.model_runner import KVCache
    from sgl.runtime.models.registry import CausalLM

Ids = npt.NDArray[np.int32]
_NOTHING = np.empty(0, dtype=np.int32)
_NO_TREE = 2**31 - 1
_PER_TOKEN, _PER_CHUNK = 9, 6


def blocks_of(starts: Sequence[int], lengths: Sequence[int], first_pages: Ids) -> Ids:
    """`[C, 6]`, each chunk of a step as one block of queries; see `PagedPlan.blocks`. Trees are entered afterwards."""
    blocks = np.zeros((len(starts), _PER_CHUNK), dtype=np.int32)
    blocks[:, 0] = np.cumsum([0, *lengths[:-1]])
    blocks[:, 1], blocks[:, 2], blocks[:, 3] = lengths, starts, first_pages
    blocks[:, 4] = _NO_TREE
    return blocks


class VerifyGraph:
    """One recorded step: integers in, logits out, always in the same memory.

    Args:
        spare_slot: of the pool, for tokens that fill the step up.
        drawn, tables: where tokens that are followed and page tables lie.
        logits: float32 `[most tokens, V]`, overwritten by each of these steps.
    """

    reads_together = False

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        size: VerifiedSize,
        spare_slot: int,
        staging: Staging,
        drawn: torch.Tensor,
        tables: torch.Tensor,
        logits: torch.Tensor,
    ) -> None:
        self._model = model
        self._cache = cache
        self._size = size
        self._spare_slot = spare_slot
        self._staging = staging
        self._drawn = drawn
        self._tables = tables
        self._logits = logits[: size.tokens]
        device = tables.device
        tokens, rows = size.tokens, size.rows
        sizes = [*[tokens] * (_PER_TOKEN - 2), 2 * tokens, _PER_CHUNK * rows]
        self._integers = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._begins = np.cumsum([0, *sizes[:-1]]).tolist()
        """Where each part of the integers begins."""
        parts = torch.split(self._integers, sizes)
        self._ids, self._sources, positions, slots, self._targets, self._values, self._wanted, trees, blocks = parts
        slots.fill_(spare_slot)
        self._sources.fill_(-1)
        self._targets.fill_(-1)
        none = torch.empty(0, dtype=torch.int32, device=device)
        self._every = torch.arange(tokens, dtype=torch.int32, device=device)
        self._plan = PagedPlan(
            positions=positions,
            write_slots=slots,
            pages=tables,
            single_rows=none,
            single_pages=none,
            single_lengths=none,
            blocks=blocks.view(-1, _PER_CHUNK),
            num_splits=1,
            page_size=cache.page_size,
            trees=trees.view(-1, 2),
            most_queries=size.width,
            fills_up=True,
        )
        self._empty: Ids = self._integers.cpu().numpy().copy()
        """What fills the step up: the integers of one without tokens."""
        self._graph: Any = None  # until `capture`

    def capture(self, pool: Any) -> Any:
        """Record the step; the pool of its graph."""
        self._graph, _ = record(self._compute, pool)
        return self._graph.pool()

    def _compute(self) -> None:
        from sgl.runtime.model_runner import ForwardBatch

        follow(self._ids, self._sources, self._drawn)
        enter(self._tables, self._targets, self._values)
        batch = ForwardBatch(
            token_ids=self._ids, positions=self._plan.positions, logit_rows=self._every, attention=self._plan
        )
        self._logits.copy_(self._model(batch, self._cache))

    def fill(self, token_ids: Ids, sources: Ids, wanted: Ids, host: HostPlan, trees: Ids, placed: Placed) -> None:
        """Send a step's integers. New entries of page tables that are more than tokens are written beforehand.

        Args:
            wanted: `[R]`, tokens whose logits are wanted.
            trees: see `plant_trees`.
        """
        fits = len(placed.targets) <= self._size.tokens
        filled = self._empty.copy()
        for begin, array in zip(
            self._begins,
            (
                token_ids,
                sources,
                host.positions,
                host.write_slots,
                placed.targets if fits else _NOTHING,
                placed.values if fits else _NOTHING,
                wanted,
                trees.reshape(-1),
                host.blocks.reshape(-1),
            ),
            strict=True,
        ):
            filled[begin : begin + len(array)] = array
        if fits:
            self._staging.put([filled], self._integers)
            return
        integers, targets, values = self._staging.put([filled, placed.targets, placed.values])
        self._integers.copy_(integers)
        enter(self._tables, targets, values)

    def replay(self, num_tokens: int, num_wanted: int) -> torch.Tensor:
        """Logits `[R, V]`; overwritten by the next step."""
        self._replay()
        if num_wanted == num_tokens:
            return self._logits[:num_tokens]
        return self._logits.index_select(0, self._wanted[:num_wanted])

    def _replay(self) -> None:
        self._graph.replay()
