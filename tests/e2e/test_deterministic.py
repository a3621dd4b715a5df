"""Deterministic mode: the logits after a context are the same bits, however the context came to be computed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch

from sgl.lang.graph import Event, Gen, Graph, ProgramOptions, Sampling, Tokens, ValueEvent
from sgl.runtime.config import EngineConfig, ResolvedConfig, resolve
from sgl.runtime.core import EngineCore
from sgl.runtime.loading.checkpoint import Checkpoint, open_checkpoint
from sgl.runtime.loading.sources import locate
from sgl.runtime.model_runner import ModelRunner
from sgl.runtime.plan import StepPlan
from sgl.runtime.sampler import Sampler
from sgl.runtime.text.tokenizer import Tokenizer

WAYS = {
    "one by one, no cache": {"max_running_requests": 1, "disable_radix_cache": True},
    "batched": {"max_running_requests": 32},
    "chunked": {"max_running_requests": 32, "chunked_prefill_size": 11},
    "under pressure": {"max_running_requests": 32, "max_total_tokens": 220},
    "pages of four": {"max_running_requests": 7, "page_size": 4},
}


class Watching(ModelRunner):
    """Remembers the bits of the logits after every context."""

    seen: dict[bytes, bytes]
    differing: list[int]

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.differing = []
        self.slots = np.full(self.cache.layer(0)[0].shape[0], -1, dtype=np.int32)

    def forward(self, plan: StepPlan) -> torch.Tensor:
        logits = super().forward(plan)
        row = 0
        for chunk in plan.chunks:
            positions = np.arange(chunk.start, chunk.end)
            self.slots[self._of(chunk.page_table, positions)] = chunk.token_ids
        for chunk in plan.chunks:
            for offset in chunk.logit_offsets:
                positions = np.arange(chunk.start + offset + 1)
                context = self.slots[self._of(chunk.page_table, positions)].tobytes()
                bits = logits[row].numpy().tobytes()
                if self.seen.setdefault(context, bits) != bits:
                    self.differing.append(len(positions))
                row += 1
        return logits

    def _of(self, page_table: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return page_table[positions // self.page_size] * self.page_size + positions % self.page_size


def run(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    way: dict,
    prompts: Sequence[list[int]],
    n: int,
    seen: dict,
    *,
    deterministic: bool = True,
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Greedy outputs, and the lengths of contexts whose logits had other bits than `seen` says."""
    given = {"max_total_tokens": 4096, **way, "enable_deterministic_inference": deterministic}
    config: ResolvedConfig = resolve(EngineConfig(**given), checkpoint.facts())
    runner = Watching(
        checkpoint.build_model(config.dtype, config.device, deterministic=deterministic), checkpoint.config, config
    )
    runner.seen = seen
    events: dict[int, list[Event]] = {}
    core = EngineCore(
        config,
        tokenizer,
        runner,
        Sampler(tokenizer.vocab_size),
        emit=lambda program, event: events.setdefault(program, []).append(event),
    )
    sampling = Sampling(max_new_tokens=n, temperature=0, ignore_eos=True)
    for program, ids in enumerate(prompts):
        core.open(program, ProgramOptions())
        graph = Graph(nodes=(Tokens(id=0, token_ids=tuple(ids)), Gen(id=1, name="x", sampling=sampling)))
        core.submit(program, graph, finish=True)
    while core.has_work:
        core.step()
        core.snapshot().check()
    outputs = [
        next(event.token_ids for event in events[program] if isinstance(event, ValueEvent))
        for program in range(len(prompts))
    ]
    return outputs, runner.differing


def test_toy_model_1000_requests() -> None:
    checkpoint, tokenizer = open_checkpoint(locate("dummy")), Tokenizer.toy()
    rng = random.Random(5)
    stems = [[rng.randrange(256) for _ in range(rng.choice([3, 20, 70]))] for _ in range(6)]
    prompts = [rng.choice(stems) + [rng.randrange(256) for _ in range(rng.randint(1, 12))] for _ in range(200)]
    seen: dict[bytes, bytes] = {}
    outputs = {name: run(checkpoint, tokenizer, way, prompts, 5, seen) for name, way in WAYS.items()}
    first, _ = next(iter(outputs.values()))
    assert outputs == {name: (first, []) for name in WAYS}
    assert len(seen) > 800, "contexts, most of them met in every way"


def test_the_ordinary_path_is_told_apart() -> None:
    """The same check without deterministic mode finds differences, so it can."""
    checkpoint, tokenizer = open_checkpoint(locate("dummy")), Tokenizer.toy()
    rng = random.Random(5)
    prompts = [[rng.randrange(256) for _ in range(rng.choice([5, 40, 90]))] for _ in range(30)]
    seen: dict[bytes, bytes] = {}
    for name in ("one by one, no cache", "chunked"):
        _, differing = run(checkpoint, tokenizer, WAYS[name], prompts, 3, seen, deterministic=False)
    assert differing


def test_smollm2_20_prompts() -> None:
    checkpoint = open_checkpoint(locate("smollm2-135m"))
    tokenizer = Tokenizer.from_gguf(checkpoint.gguf_metadata or {})
    topics = ["rain", "a lighthouse", "prime numbers", "bread", "the moon", "chess", "ants", "glass", "tea", "maps"]
    texts = [f"Here is a short text about {topic}. It begins" for topic in topics] + topics
    prompts = [tokenizer.encode(text) for text in texts]
    seen: dict[bytes, bytes] = {}
    ways = ["one by one, no cache", "batched", "chunked"]
    outputs = [run(checkpoint, tokenizer, WAYS[name], prompts, 4, seen) for name in ways]
    assert outputs == [(outputs[0][0], [])] * 3
    assert len(seen) == 20 * 4
