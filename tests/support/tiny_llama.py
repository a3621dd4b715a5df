"""A random tiny Llama made by transformers, and the logits of our model for a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from sgl.lang.graph import Sampling
from sgl.runtime.config import EngineConfig
from sgl.runtime.loading.checkpoint import Checkpoint, open_checkpoint
from sgl.runtime.loading.sources import locate
from sgl.runtime.model_runner import ModelRunner
from sgl.runtime.plan import Chunk, SampleSpec, ScoreSpec, StepPlan
from sgl.runtime.resolution import resolve

VOCAB_SIZE = 96


def write_llama(folder: Path, **changes: Any) -> Any:
    """A random tiny Llama of transformers, saved to `folder`; `changes` are fields of its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
    }
    torch.manual_seed(11)
    model = LlamaForCausalLM(LlamaConfig(**{**shape, **changes})).eval()
    model.save_pretrained(folder, max_shard_size="20KB" if changes.get("tie_word_embeddings") else "5GB")
    return model


def open_folder(folder: Path, override: str | None = None) -> Checkpoint:
    return open_checkpoint(locate(str(folder)), override)


def logits_of(
    checkpoint: Checkpoint, tokens: list[int], *, context_len: int | None = None, dtype: str = "float32"
) -> torch.Tensor:
    """Logits `[T, V]` of all positions, computed in chunks of 100 tokens."""
    config = EngineConfig(device="cpu", dtype=dtype, kernels="torch", max_total_tokens=1024)  # type: ignore[arg-type]
    resolved = resolve(config, checkpoint.facts())
    model = checkpoint.build_model(dtype, context_len=context_len)
    runner = ModelRunner(model, checkpoint.config, resolved)  # type: ignore[arg-type]
    rows = []
    for start in range(0, len(tokens), 100):
        part = tokens[start : start + 100]
        chunk = Chunk(
            sequence=0,
            token_ids=part,
            start=start,
            page_table=np.arange(start + len(part), dtype=np.int32),
            sample=SampleSpec(sampling=Sampling(), seed=0, position=0, output_ids=[]),
            scores=tuple(ScoreSpec(offset=offset, token_ids=(0,)) for offset in range(len(part))),
        )
        rows.append(runner.forward(StepPlan(chunks=(chunk,))))
    return torch.cat(rows)
