"""A tiny checkpoint under a model runner of its own: logits of prompts in chunks over the cache, and greedy tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.tiny_models import CONTEXT_LEN

from sgl.lang.graph import Sampling
from sgl.runtime.config import EngineConfig, ModelImpl
from sgl.runtime.loading.checkpoint import Checkpoint, open_checkpoint
from sgl.runtime.loading.sources import LoadFormat, locate
from sgl.runtime.model_runner import ModelRunner
from sgl.runtime.plan import Chunk, SampleSpec, ScoreSpec, StepPlan
from sgl.runtime.resolution import resolve

SAMPLE = SampleSpec(sampling=Sampling(), seed=0, position=0, output_ids=[])


def open_path(path: Path, model_impl: ModelImpl = "auto", load_format: LoadFormat = "auto") -> Checkpoint:
    return open_checkpoint(locate(str(path), load_format=load_format), model_impl=model_impl)


def runner(checkpoint: Checkpoint, **options: Any) -> ModelRunner:
    given = {"device": "cpu", "dtype": "float32", "kernels": "torch", **options}
    resolved = resolve(EngineConfig(max_total_tokens=512, **given), checkpoint.facts())
    model = checkpoint.build_model(
        resolved.dtype,
        resolved.device,
        deterministic=resolved.deterministic,
        context_len=resolved.context_len,
        kernels=resolved.kernels,
        quantization=resolved.quantization,
    )
    return ModelRunner(model, checkpoint.config, resolved)  # type: ignore[arg-type]


def chunk(sequence: int, tokens: Sequence[int], start: int = 0) -> Chunk:
    """Positions from `start` on, in pages of the sequence's own, with the logits of all."""
    return Chunk(
        sequence=sequence,
        token_ids=list(tokens),
        start=start,
        page_table=np.arange(sequence * CONTEXT_LEN, (sequence + 1) * CONTEXT_LEN, dtype=np.int32),
        sample=SAMPLE,
        scores=tuple(ScoreSpec(offset=offset, token_ids=(0,)) for offset in range(len(tokens))),
    )


def in_chunks(of: ModelRunner, prompts: Sequence[Sequence[int]], size: int = 20) -> list[torch.Tensor]:
    """Logits of all prompts' positions, computed together in chunks of `size` over what those before have cached."""
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), size):
        chunks = [
            chunk(i, prompt[start : start + size], start) for i, prompt in enumerate(prompts) if start < len(prompt)
        ]
        logits = of.forward(StepPlan(chunks=tuple(chunks)))
        for part, block in zip(chunks, logits.split([len(part.token_ids) for part in chunks]), strict=True):
            rows[part.sequence].append(block)
    return [torch.cat(blocks) for blocks in rows]


def greedy(of: ModelRunner, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """What the prompts go on with, drawn together token by token."""
    drawn: list[list[int]] = [[int(rows[-1].argmax())] for rows in in_chunks(of, prompts)]
    for step in range(count - 1):
        chunks = [
            chunk(i, out[-1:], len(prompt) + step) for i, (prompt, out) in enumerate(zip(prompts, drawn, strict=True))
        ]
        for out, row in zip(drawn, of.forward(StepPlan(chunks=tuple(chunks))), strict=True):
            out.append(int(row.argmax()))
    return drawn


def differences(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    return max(float((ours - theirs).abs().max()) for ours, theirs in zip(got, expected, strict=True))
