"""Models on the native kernels: all layers in one call against the same layers op by op, and answers against float32.

The bits of a row in every way of computing it are in `test_deterministic.py`, single ops in `tests/kernels`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_llama import VOCAB_SIZE, open_folder, write_llama

from sgl.kernels.native import library
from sgl.runtime.config import EngineConfig
from sgl.runtime.engine import Engine
from sgl.runtime.loading.checkpoint import Checkpoint, open_checkpoint
from sgl.runtime.loading.facts import load_native_kernels
from sgl.runtime.loading.sources import locate
from sgl.runtime.model_runner import ModelRunner
from sgl.runtime.plan import Chunk, ScoreSpec, StepPlan
from sgl.runtime.resolution import resolve

pytestmark = pytest.mark.skipif(library.compiler() is None, reason="there is no C++ compiler")

TEXT = """The lighthouse stood at the end of a long stone pier, and every evening at dusk the keeper climbed its one
hundred and eight steps to light the lamp. He had done so for thirty years. In winter the spray froze on the
windows and he had to scrape the ice away with a knife; in summer the gulls nested under the gallery and shouted
at him as he passed. Ships that came from the north saw the light first, a thin white line that turned like the
hand of a clock. A captain once wrote to thank him, and the letter hung framed above the stove: without your
lamp, it said, my crew of forty would lie at the bottom of the bay. When the company decided to replace the oil
lamp with an electric one, engineers arrived with cables, switches and a motor. They explained that the machine
would need no keeper. The old man listened, nodded, and asked who would scrape the ice from the glass. Nobody
had thought of that, and so he stayed for eleven more winters."""


def runner(checkpoint: Checkpoint, **options: Any) -> ModelRunner:
    """The model with these options of the engine."""
    resolved = resolve(EngineConfig(max_total_tokens=2048, **options), checkpoint.facts())
    if resolved.kernels == "native":
        load_native_kernels()
    model = checkpoint.build_model(resolved.dtype, kernels=resolved.kernels, quantization=resolved.quantization)
    return ModelRunner(model, checkpoint.config, resolved)  # type: ignore[arg-type]


def logits(of: ModelRunner, tokens: list[int], start: int = 0) -> torch.Tensor:
    """Of every token, `[T, V]`, on pages in descending order."""
    scores = tuple(ScoreSpec(offset=offset, token_ids=(0,)) for offset in range(len(tokens)))
    table = np.arange(2047, 2047 - start - len(tokens), -1, dtype=np.int32)
    chunk = Chunk(sequence=1, token_ids=tokens, start=start, page_table=table, scores=scores)
    return of.forward(StepPlan(chunks=(chunk,)))


@pytest.mark.parametrize("shape", [{}, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}])
def test_float32_weights_give_the_logits_of_transformers(tmp_path: Path, shape: dict[str, Any]) -> None:
    """In one call for all layers, and op by op: both are the model."""
    theirs = write_llama(tmp_path, **shape)
    tokens = torch.randint(3, VOCAB_SIZE, (70,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    ours = runner(open_folder(tmp_path), dtype="float32", kernels="native")
    assert ours.model.model.fused is not None  # type: ignore[attr-defined]
    assert torch.allclose(logits(ours, tokens), expected, atol=1e-4)
    assert torch.allclose(logits(ours, tokens[69:], start=69), expected[69:], atol=1e-4)
    ours.model.model.fused = None  # type: ignore[attr-defined]
    assert torch.allclose(logits(ours, tokens), expected, atol=1e-4)


@pytest.mark.parametrize(("kind", "error"), [("bfloat16", 0.03), ("int8", 0.1), ("int4", 0.7)])
def test_rounded_weights_stay_near(tmp_path: Path, kind: str, error: float) -> None:
    """Random weights and random activations bear rounding worst: 2^-9, 2^-7 and 10 % of a weight grow through the
    layers. Weights in a wrong place would be as far from right as a stranger, 1.4."""
    write_llama(tmp_path, intermediate_size=64)
    checkpoint = open_folder(tmp_path)
    tokens = list(range(3, 60))
    exact = logits(runner(checkpoint, dtype="float32", kernels="torch"), tokens)
    options = {"dtype": kind} if kind == "bfloat16" else {"quantization": kind}
    got = logits(runner(checkpoint, **options), tokens)
    assert 0 < float((got - exact).norm() / exact.norm()) < error


@pytest.mark.parametrize(
    ("options", "perplexity", "agreement"),
    [
        ({"quantization": "gguf"}, 0.02, 0.90),
        ({"dtype": "bfloat16"}, 0.01, 0.97),
    ],
    ids=["gguf", "bfloat16"],
)
def test_quality_on_a_fixed_text(options: dict[str, Any], perplexity: float, agreement: float) -> None:
    """Against float32 of the same weights, on 250 tokens: relative change of the perplexity, and how often the most
    probable token is the same. A text that is near a tie at one token in twenty, as this one, cannot ask for more of
    activations that are rounded to 8 bits."""
    checkpoint = open_checkpoint(locate("smollm2-135m"))
    tokens = checkpoint.tokenizer().encode(TEXT)
    targets = torch.tensor(tokens[1:])

    def of(rows: torch.Tensor) -> float:
        return float(torch.nn.functional.cross_entropy(rows[:-1].double(), targets).exp())

    exact = logits(runner(checkpoint, dtype="float32"), tokens)
    got = logits(runner(checkpoint, **options), tokens)
    assert of(got) == pytest.approx(of(exact), rel=perplexity)
    assert float((got.argmax(-1) == exact.argmax(-1)).float().mean()) >= agreement


def test_an_engine_answers_from_the_blocks_of_its_file(smollm2: Engine) -> None:
    """Nothing is said when it starts: on a CPU with a compiler that is the default."""
    prompts = ["The capital of France is", "1, 2, 3, 5, 8,", "The opposite of hot is"]
    sampling = {"temperature": 0, "max_new_tokens": 8}
    resolved = smollm2.server_info()["resolved"]
    together = [answer["text"] for answer in smollm2.generate(prompts, sampling)]
    alone = [smollm2.generate(prompt, sampling)["text"] for prompt in prompts]
    assert (resolved["kernels"], resolved["quantization"], resolved["dtype"]) == ("native", "gguf", "bfloat16")
    assert resolved["weights_bytes"] < 100 * 2**20
    assert "Paris" in together[0]
    assert together == alone
