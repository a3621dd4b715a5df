"""From a step's plan to logits.

Owns the KV pool's memory and the translation of a `StepPlan` into tensors. Does not own which page belongs to whom
(the scheduler does) nor what is done with the logits (the sampler). Called by the engine core, one step at a time.
A forward writes only the slots of the plan's tokens; a failed one leaves other sequences' pages as they were.

Shapes: T tokens of the step, R rows of logits, V vocabulary, S slots of the pool, K key/value heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from sgl.errors import ConfigError
from sgl.kernels import registry
from sgl.kernels.attention import Ancestors, AttentionPlan, ancestors_of, chunk_positions, plan_attention
from sgl.kernels.deterministic import ROWS
from sgl.kernels.native import library
from sgl.runtime.config import GiB, ResolvedConfig
from sgl.runtime.models.layers import op_facts, prepack
from sgl.runtime.models.registry import CausalLM, ModelConfig
from sgl.runtime.plan import Chunk, Move, PageCopy, StepPlan

if TYPE_CHECKING:
    from sgl.runtime.device_clock import DeviceClock
    from sgl.runtime.gpu_steps import GpuSteps


@dataclass(frozen=True)
class ForwardBatch:
    """A step as tensors. Rows of logits come chunk by chunk, offset by offset."""

    token_ids: torch.Tensor
    """`[T]` int64."""
    positions: torch.Tensor
    """`[T]` int64, position of each token in its sequence."""
    logit_rows: torch.Tensor
    """`[R]` int64, tokens of the step whose logits are wanted."""
    attention: AttentionPlan | Any
    """What the model's attention wants: `AttentionPlan`, or another implementation's own plan."""

    @classmethod
    def from_plan(
        cls,
        plan: StepPlan,
        page_size: int,
        device: torch.device | str = "cpu",
        *,
        multiple: int = 1,
        plan_attention: Callable[..., Any] = plan_attention,
    ) -> ForwardBatch:
        """The tensors of `plan`; tokens and rows of logits are filled up to a multiple of `multiple`.

        Args:
            plan_attention: the op of that name that goes with the model's attention.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        for chunk in plan.chunks:
            logit_rows.extend(len(token_ids) + offset for offset in chunk.logit_offsets)
            token_ids.extend(chunk.token_ids)
            positions.extend(_positions(chunk))
        has_trees = any(chunk.parents for chunk in plan.chunks)
        # Where a page is a token, a branch is a chunk of its own: in one context, which gives the bits of a chain.
        parts = [_Part(chunk.start, len(chunk.token_ids), chunk.page_table) for chunk in plan.chunks]
        trees: list[Ancestors | None] | None = None
        if has_trees and page_size == 1:
            parts = [part for chunk in plan.chunks for part in _branches(chunk)]
        elif has_trees:
            trees = [ancestors_of(chunk.parents) if chunk.parents else None for chunk in plan.chunks]
        for filled in (token_ids, positions, *([logit_rows] if logit_rows else [])):
            filled.extend([0] * (-len(filled) % multiple))
        return cls(
            token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
            attention=plan_attention(
                [part.start for part in parts],
                [part.length for part in parts],
                [part.page_table for part in parts],
                page_size,
                device,
                **({} if trees is None else {"ancestors": trees}),
            ),
        )


class _Part(NamedTuple):
    """Consecutive tokens of a step that stand one after another in their text."""

    start: int
    length: int
    page_table: npt.NDArray[np.int32]


def _branches(chunk: Chunk) -> Iterator[_Part]:
    """A chunk whose pages are of one token each, as chains: what is known with the first branch, then the others, each
    on the pages of its own path."""
    if not chunk.parents:
        yield _Part(chunk.start, len(chunk.token_ids), chunk.page_table)
        return
    known, table = chunk.known_end, chunk.page_table
    begins = [i for i in range(1, chunk.num_drafts) if chunk.parents[i] != i - 1]
    for first, end in itertools.pairwise((0, *begins, chunk.num_drafts)):
        path = chunk.path(end - 1)
        before = len(path) - (end - first)
        own = np.concatenate([table[:known], table[known:][path]])
        start = known + before if first else chunk.start
        yield _Part(start, known + len(path) - start, own)


def _positions(chunk: Chunk) -> Iterable[int]:
    """Position of each token in its text: in a tree one behind its parent's."""
    if not chunk.parents:
        return range(chunk.start, chunk.end)
    positions: list[int] = chunk_positions(chunk.start, len(chunk.token_ids), ancestors_of(chunk.parents)).tolist()
    return positions


class KVCache:
    """Keys and values of every layer, `[layers, S, K, D]` each, S = pages x page size. Not cleared: a slot is written
    before it is read."""

    def __init__(
        self, model_config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        shape = (
            model_config.num_hidden_layers,
            num_pages * page_size,
            model_config.num_key_value_heads,
            model_config.head_dim,
        )
        self.page_size = page_size
        try:
            self._keys = torch.empty(shape, dtype=dtype, device=device)
            self._values = torch.empty(shape, dtype=dtype, device=device)
        except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError when the host refuses memory
            needed = 2 * torch.Size(shape).numel() * dtype.itemsize
            raise ConfigError(
                f"the KV pool of {num_pages * page_size} tokens needs {needed / GiB:.2f} GiB, which {device} has not",
                hint="set max_total_tokens lower",
                param="max_total_tokens",
            ) from error

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, `[S, K, D]` each."""
        return self._keys[index], self._values[index]

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy the beginnings of pages, in every layer; all sources are read before any target is written."""
        page_size = self.page_size
        sources = [copy.source * page_size + i for copy in copies for i in range(copy.num_tokens)]
        targets = [copy.target * page_size + i for copy in copies for i in range(copy.num_tokens)]
        self.move(sources, targets)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots, in every layer; all sources are read before any target is written."""
        source_slots = torch.tensor(sources, dtype=torch.int64, device=self._keys.device)
        target_slots = torch.tensor(targets, dtype=torch.int64, device=self._keys.device)
        for pool in (self._keys, self._values):
            pool[:, target_slots] = pool[:, source_slots]


class ModelRunner:
    """A model with its KV pool on one device.

    Args:
        model: loaded weights, on `resolved.device`.
        model_config: its shape.
        resolved: sizes of the pool, dtype, device, threads.
        device_clock: times forwards on a GPU.

    Raises:
        ConfigError: the pool does not fit in memory.
    """

    def __init__(
        self,
        model: CausalLM,
        model_config: ModelConfig,
        resolved: ResolvedConfig,
        device_clock: DeviceClock | None = None,
    ) -> None:
        if resolved.device == "cpu":
            torch.set_num_threads(resolved.num_threads)
        if resolved.kernels == "native":
            library.library().sgl_set_threads(resolved.num_threads)
        if resolved.prepacked and isinstance(model, torch.nn.Module):
            prepack(model)
        self.model = model
        self.model_config = model_config
        self.device = torch.device(resolved.device)
        self.page_size = resolved.page_size
        # Products are of so many rows each.
        self._multiple = ROWS if resolved.deterministic else 1
        triton = resolved.kernels == "triton"
        facts = op_facts(
            msgspec.structs.replace(model_config, context_len=resolved.context_len),
            getattr(torch, resolved.dtype),
            self.device,
            deterministic=resolved.deterministic,
            kernels=resolved.kernels,
        )
        self._plan_attention = registry.get("plan_attention", facts)
        dtype = getattr(torch, resolved.dtype)
        # Behind the pool a graph has a page of its own, for rows that only fill its step up.
        num_pages = resolved.num_pages + triton
        self.cache = KVCache(model_config, num_pages, resolved.page_size, dtype, self.device)
        self._gpu_steps: GpuSteps | None = None
        if triton:
            from sgl.runtime.device_clock import DeviceClock
            from sgl.runtime.gpu_steps import GpuSteps

            self._gpu_steps = GpuSteps(
                model,
                self.cache,
                max_rows=resolved.cuda_graph_max_bs_decode,
                max_drawn=resolved.max_running_requests + 1 + resolved.max_drafts,
                spare_slot=resolved.num_pages * resolved.page_size,
                device=self.device,
                clock=device_clock or DeviceClock(),
                vocab_size=model_config.vocab_size if _records_verifications(resolved) else 0,
                num_heads=None
                if resolved.disable_cascade_attention or resolved.deterministic
                else model_config.num_attention_heads,
            )

    @property
    def shared_prefix_tokens(self) -> int:
        """See `Stats.shared_prefix_tokens`."""
        return 0 if self._gpu_steps is None else self._gpu_steps.saved_tokens

    @property
    def num_recorded(self) -> int:
        """Steps that were recorded so far; 0 where none are."""
        return 0 if self._gpu_steps is None else self._gpu_steps.num_recorded

    @torch.inference_mode()
    def capture(self, rows: Sequence[int]) -> None:
        """Record the decoding steps of so many rows before they are needed, where steps are recorded at all."""
        if self._gpu_steps is not None:
            self._gpu_steps.capture(rows)

    @torch.inference_mode()
    def move(self, moves: Sequence[Move]) -> None:
        """Move keys and values in the pool, all at once."""
        self.cache.move([move.source for move in moves], [move.target for move in moves])

    def forget_recorded(self) -> None:
        """Drop the recorded steps, which are recorded again when they are needed: after a change of how kernels run."""
        if self._gpu_steps is not None:
            self._gpu_steps.forget()

    @torch.inference_mode()
    def forward(self, plan: StepPlan, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the plan's tokens; float32 logits `[R, V]` in chunk order, then in the order of `logit_offsets`.

        Args:
            drawn: the tokens that chunks may follow, see `Pending.token_ids`.
        """
        if not plan.chunks:
            return torch.empty(0, self.model_config.vocab_size, dtype=torch.float32, device=self.device)
        if plan.copies:
            self.cache.copy(plan.copies)
        if self._gpu_steps is not None:
            return self._gpu_steps.forward(plan, drawn)
        batch = ForwardBatch.from_plan(
            plan, self.page_size, self.device, multiple=self._multiple, plan_attention=self._plan_attention
        )
        if drawn is not None:
            _follow(plan, drawn, batch.token_ids)
        num_rows = sum(len(chunk.logit_offsets) for chunk in plan.chunks)
        return self.model(batch, self.cache)[:num_rows]


def _records_verifications(resolved: ResolvedConfig) -> bool:
    """Whether drafts are verified, and a step of short chunks may be cut as it likes: not in deterministic mode."""
    return resolved.speculation is not None and not resolved.deterministic


def _follow(plan: StepPlan, drawn: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Put the tokens that chunks follow in their places of the step's `[T]`."""
    rows: list[int] = []
    sources: list[int] = []
    begin = 0
    for chunk in plan.chunks:
        if chunk.follows is not None:
            rows.append(begin)
            sources.append(chunk.follows)
        begin += len(chunk.token_ids)
    token_ids[rows] = drawn[sources]
