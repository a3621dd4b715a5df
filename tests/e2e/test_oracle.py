"""Our forward against transformers on the embedded model: the same GGUF file, read by its own loader, in float32.

Greedy decoding is compared without running it twice: when transformers, given our text, prefers our token at every
position, then its own greedy decoding would have produced that text (by induction over the positions).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.oracle import transformers_smollm2

from sgl.lang.graph import Sampling
from sgl.runtime.config import EngineConfig
from sgl.runtime.loading.checkpoint import open_checkpoint
from sgl.runtime.loading.sources import locate
from sgl.runtime.model_runner import ModelRunner
from sgl.runtime.plan import Chunk, SampleSpec, ScoreSpec, StepPlan
from sgl.runtime.resolution import resolve
from sgl.runtime.text.tokenizer import Tokenizer

TOLERANCE = 1e-3
SHARED = "You are a helpful assistant. Answer briefly and precisely.\n\n"
QUESTIONS = (
    "The capital of France is", "Water boils at", "def fibonacci(n):", "Once upon a time", "The opposite of hot is",
    "1, 2, 3, 5, 8,", "Photosynthesis is", "Die Hauptstadt von Deutschland ist", "To make bread you need",
    "SELECT name FROM", "The largest planet", "Shakespeare wrote", "import numpy as np\n", "In 1969, humans",
    "The chemical symbol of gold", "A haiku about rain:\n", "Dear Sir or Madam,", "The derivative of x^2 is",
    "Roses are red,", "Q: Why is the sky blue?\nA:",
)  # fmt: skip
SAMPLE = SampleSpec(sampling=Sampling(), seed=0, position=0, output_ids=[])
POOL_TOKENS = 4096


class Loaded:
    """The model in our runner, its tokenizer, and a page counter."""

    def __init__(self) -> None:
        source = locate("smollm2-135m")
        assert source.path is not None
        self.path: Path = source.path
        checkpoint = open_checkpoint(source)
        assert checkpoint.gguf_metadata is not None
        self.tokenizer = Tokenizer.from_gguf(checkpoint.gguf_metadata)
        config = EngineConfig(device="cpu", dtype="float32", max_total_tokens=POOL_TOKENS)
        resolved = resolve(config, checkpoint.facts())
        self.runner = ModelRunner(checkpoint.build_model("float32", "cpu"), checkpoint.config, resolved)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return Loaded()


@pytest.fixture(scope="module")
def reference() -> Any:
    return transformers_smollm2()


@pytest.fixture(scope="module")
def prompts(loaded: Loaded) -> list[list[int]]:
    return [loaded.tokenizer.encode(SHARED + question) for question in QUESTIONS]


def chunk(
    sequence: int, tokens: list[int], start: int, table: list[int], *, every: bool = False, last: bool = True
) -> Chunk:
    offsets = range(len(tokens)) if every else ()
    return Chunk(
        sequence=sequence,
        token_ids=tokens,
        start=start,
        page_table=np.asarray(table, dtype=np.int32),
        sample=SAMPLE if last else None,
        scores=tuple(ScoreSpec(offset=offset, token_ids=(0,)) for offset in offsets),
    )


def greedy_alone(runner: ModelRunner, prompt: list[int], new_tokens: int) -> list[int]:
    """Prompt in one chunk, then token by token."""
    tokens = list(prompt)
    table = list(range(len(prompt) + new_tokens))
    done = 0
    while len(tokens) < len(prompt) + new_tokens:
        logits = runner.forward(StepPlan(chunks=(chunk(0, tokens[done:], done, table),)))
        done = len(tokens)
        tokens.append(int(logits[0].argmax()))
    return tokens


def greedy_together(runner: ModelRunner, prompts: list[list[int]], new_tokens: int, budget: int) -> list[list[int]]:
    """All prompts in shared steps of at most `budget` prefill tokens; the common prefix is computed once, by the first
    sequence, and read by the others from its pages. Pages lie scattered."""
    shared = min(len(prompt) for prompt in prompts) - 1
    while len({tuple(prompt[:shared]) for prompt in prompts}) > 1:
        shared -= 1
    assert shared > 5
    pages = iter(torch.randperm(POOL_TOKENS, generator=torch.Generator().manual_seed(3)).tolist())
    tables: list[list[int]] = []
    for prompt in prompts:
        head = tables[0][:shared] if tables else [next(pages) for _ in range(shared)]
        tables.append(head + [next(pages) for _ in range(len(prompt) + new_tokens - shared)])
    tokens = [list(prompt) for prompt in prompts]
    done = [0] + [shared] * (len(prompts) - 1)
    mixed_steps = 0
    while any(len(row) < len(prompt) + new_tokens for row, prompt in zip(tokens, prompts, strict=True)):
        left, chunks = budget, []
        for index, row in enumerate(tokens):
            # The prefix must be computed in this step or before; the first sequence comes first.
            wanted = min(len(row) - done[index], left)
            if wanted < 1 or len(row) >= len(prompts[index]) + new_tokens:
                continue
            if index and done[0] + (len(chunks[0].token_ids) if chunks and chunks[0].sequence == 0 else 0) < shared:
                continue
            end = done[index] + wanted
            chunks.append(chunk(index, row[done[index] : end], done[index], tables[index], last=end == len(row)))
            left -= wanted
        lengths = {len(one.token_ids) for one in chunks}
        mixed_steps += len(lengths) > 1
        rows = iter(runner.forward(StepPlan(chunks=tuple(chunks))).argmax(dim=-1).tolist())
        for one in chunks:
            done[one.sequence] = one.end
            if one.sample is not None:
                tokens[one.sequence].append(next(rows))
    assert mixed_steps > 3, "no step mixed prefill and decode"
    return tokens


@torch.inference_mode()
def check(reference: Any, text: list[int], prompt: list[int], ours: torch.Tensor | None) -> None:
    theirs = reference(torch.tensor([text])).logits[0]
    if ours is not None:
        assert float((ours - theirs).abs().max()) < TOLERANCE
    assert theirs[len(prompt) - 1 : -1].argmax(dim=-1).tolist() == text[len(prompt) :]


@pytest.mark.parametrize(("num_prompts", "new_tokens"), [(7, 20), pytest.param(20, 64, marks=pytest.mark.slow)])
def test_greedy_text_and_logits_agree_with_transformers(
    loaded: Loaded, reference: Any, prompts: list[list[int]], num_prompts: int, new_tokens: int
) -> None:
    """Prompts decoded in shared steps, and the logits of all their positions."""
    chosen = prompts[:num_prompts]
    texts = greedy_together(loaded.runner, chosen, new_tokens, budget=2 * num_prompts + 8)
    assert {len(text) - len(prompt) for text, prompt in zip(texts, chosen, strict=True)} == {new_tokens}
    for text, prompt in zip(texts, chosen, strict=True):
        plan = StepPlan(chunks=(chunk(0, text, 0, list(range(len(text))), every=True),))
        check(reference, text, prompt, loaded.runner.forward(plan))


@pytest.mark.parametrize("new_tokens", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_greedy_text_of_a_sequence_alone_agrees_with_transformers(
    loaded: Loaded, reference: Any, prompts: list[list[int]], new_tokens: int
) -> None:
    for prompt in prompts[-2:]:
        check(reference, greedy_alone(loaded.runner, prompt, new_tokens), prompt, None)
