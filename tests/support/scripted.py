"""A model that is a pure function of its context, over a real page table.

`ScriptedRunner` keeps the token id of every page slot where a model keeps keys and values. The logits after a token
are derived from the ids that it finds through the chunk's page table, so a page that was shared wrongly, overwritten,
or read before it was written changes the output, and `expected_greedy` tells what is right without any cache.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import msgspec
import numpy as np
import torch

from sgl.grammars.compiler import GrammarCompiler  # noqa: F401  (fails early and clearly when the room is missing)
from sgl.lang.graph import Event
from sgl.limits import DEFAULT_LIMITS, Limits
from sgl.runtime.config import ResolvedConfig
from sgl.runtime.core import EngineCore
from sgl.runtime.faults import FaultPoints, parse_faults
from sgl.runtime.plan import UNKNOWN, Chunk, Move, StepPlan
from sgl.runtime.processors import BUILT_IN, LogitProcessor
from sgl.runtime.sampler import Sampler
from sgl.runtime.speculation.drafter import Drafter
from sgl.runtime.text.tokenizer import Tokenizer

VOCAB = 512
UNWRITTEN = -1


def scripted_logits(context: Sequence[int]) -> np.ndarray:
    """Logits `[VOCAB]` after `context`: printable bytes are likely, specials are not."""
    seed = hashlib.blake2b(np.asarray(context, dtype=np.int32).tobytes(), digest_size=8).digest()
    values = np.random.default_rng(int.from_bytes(seed, "little")).normal(size=VOCAB).astype(np.float32)
    values[:32] -= 20
    values[127:] -= 20
    return values


def expected_greedy(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What greedy decoding gives, computed without pages."""
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(int(scripted_logits(context).argmax()))
    return context[len(prompt) :]


def seen_by(chunk: Chunk, offset: int) -> list[int]:
    """What a token of a chunk sees, as places in its page table: those before it, in a tree those on its path."""
    draft = chunk.start + offset - chunk.known_end
    if draft < 0 or not chunk.parents:
        return list(range(chunk.start + offset + 1))
    return [*range(chunk.known_end), *(chunk.known_end + place for place in chunk.path(draft))]


class ScriptedRunner:
    """Computes plans from the script.

    Args:
        num_pages, page_size: the pool.
        hook: called with each plan before it is computed; may raise, or sleep.
    """

    def __init__(self, num_pages: int, page_size: int, hook: Callable[[StepPlan], None] | None = None) -> None:
        self.slots = np.full(num_pages * page_size, UNWRITTEN, dtype=np.int64)
        self.page_size = page_size
        self.hook = hook
        self.nan_sequences: set[int] = set()
        self.plans: list[StepPlan] = []

    def forward(self, plan: StepPlan, drawn: torch.Tensor | None = None) -> torch.Tensor:
        self.plans.append(plan)
        if self.hook is not None:
            self.hook(plan)
        self._copy(plan)
        for chunk in plan.chunks:
            token_ids = chunk.token_ids
            if chunk.follows is not None:
                assert token_ids == [UNKNOWN]
                assert drawn is not None
                token_ids = [int(drawn[chunk.follows])]
            self.slots[self._slots(chunk.page_table, chunk.start, chunk.end)] = token_ids
        rows = []
        for chunk in plan.chunks:
            written = self.slots[self._slots(chunk.page_table, 0, chunk.end)]
            assert UNWRITTEN not in written, "a chunk reads a slot that nobody wrote"
            for offset in chunk.logit_offsets:
                row = scripted_logits(written[seen_by(chunk, offset)])
                rows.append(np.full_like(row, np.nan) if chunk.sequence in self.nan_sequences else row)
        return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, VOCAB)

    def move(self, moves: Sequence[Move]) -> None:
        self.slots[[move.target for move in moves]] = self.slots[[move.source for move in moves]]

    def _copy(self, plan: StepPlan) -> None:
        sources = [copy.source * self.page_size + i for copy in plan.copies for i in range(copy.num_tokens)]
        targets = [copy.target * self.page_size + i for copy in plan.copies for i in range(copy.num_tokens)]
        self.slots[targets] = self.slots[sources]
        assert UNWRITTEN not in self.slots[targets], "a slot was copied that nobody wrote"

    def _slots(self, page_table: np.ndarray, start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        return page_table[positions // self.page_size].astype(np.int64) * self.page_size + positions % self.page_size


def small_config(**changes: object) -> ResolvedConfig:
    """A pool of 256 pages of one token, 64 tokens a step."""
    fields: dict[str, object] = {
        "dtype": "float32",
        "device": "cpu",
        "context_len": 200,
        "page_size": 1,
        "num_pages": 256,
        "max_running_requests": 16,
        "chunked_prefill_size": 64,
        "disable_radix_cache": False,
        "deterministic": False,
        "rerender": "template",
        "random_seed": 0,
        "num_threads": 1,
        "weights_bytes": 0,
        "kv_bytes_per_token": 0,
    }
    return ResolvedConfig(**{**fields, **changes})  # type: ignore[arg-type]


class Rig:
    """An engine core on the scripted model with a fake clock; collects events by program.

    Args:
        hook: called with each plan before it is computed.
        faults: by fault point, the fields of its `Fault`; `sleep` moves the clock.
        processors: custom logit processors by name.
        drafter: guesses tokens.
        changes: fields of the resolved config.
    """

    tokenizer = Tokenizer.toy()
    overlaps: ClassVar[bool] = False
    """Whether the steps of rigs overlap; a fixture may change it."""
    alive: ClassVar[weakref.WeakSet[Rig]] = weakref.WeakSet()
    """Every rig of the running test: the check after it looks at their laws."""

    def __init__(
        self,
        hook: Callable[[StepPlan], None] | None = None,
        faults: Mapping[str, Mapping[str, object]] | None = None,
        limits: Limits = DEFAULT_LIMITS,
        processors: Mapping[str, LogitProcessor] = BUILT_IN,
        drafter: Drafter | None = None,
        **changes: object,
    ) -> None:
        self.alive.add(self)
        config = small_config(**{"limits": limits, "disable_overlap_schedule": not self.overlaps, **changes})
        self.runner = ScriptedRunner(config.num_pages, config.page_size, hook)
        self.time = 0.0
        self.events: dict[int, list[Event]] = {}
        self.core = EngineCore(
            config,
            self.tokenizer,
            self.runner,
            Sampler(self.tokenizer.vocab_size, processors),
            emit=lambda program, event: self.events.setdefault(program, []).append(event),
            clock=lambda: self.time,
            processors=processors,
            faults=self._faults(faults) if faults is not None else None,
            drafter=drafter,
        )

    def _faults(self, given: Mapping[str, Mapping[str, object]]) -> FaultPoints:
        return parse_faults(msgspec.json.encode(given).decode(), allowed=True, sleep=self.advance)

    def advance(self, seconds: float) -> None:
        """Move the clock."""
        self.time += seconds

    def run(self, most_steps: int = 10_000, *, to_end: bool = True) -> int:
        """Step until nothing is left, checking both laws after each; the number of steps.

        With `to_end` it is an error when `most_steps` do not suffice.
        """
        steps = 0
        while self.core.has_work:
            if steps == most_steps:
                assert not to_end, "the engine makes no progress"
                break
            self.core.step()
            self.core.snapshot().check()
            steps += 1
        return steps

    def of(self, program: int, kind: type) -> list:
        """Events of one kind."""
        return [event for event in self.events.get(program, []) if isinstance(event, kind)]
