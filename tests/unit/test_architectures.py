"""Every architecture against transformers, with random weights: in chunks over the cache, batched, token by token; from
a folder of several files and from a GGUF file; on torch, in deterministic mode and on the native kernels."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.tiny_models import CONTEXT_LEN, SHAPES, VOCAB_SIZE, has_gguf, make_model, write_folder, write_gguf
from support.tiny_runner import chunk, differences, greedy, in_chunks, open_path, runner

from sgl.kernels import registry
from sgl.kernels.native import library
from sgl.kernels.registry import OpFacts
from sgl.runtime.loading.facts import load_native_kernels
from sgl.runtime.model_runner import ForwardBatch, KVCache
from sgl.runtime.plan import StepPlan

TOLERANCE = 1e-3
GGUF_SHAPES = [name for name in SHAPES if has_gguf(name) and name not in ("qwen2-window", "qwen3-moe-mixed", "llama")]
"""Forms that the format has; Llama's scaling is tested in `test_rope.py`."""


class Case(NamedTuple):
    """One model: transformers' own, its folder, prompts, and what transformers makes of them."""

    name: str
    model: Any
    folder: Path
    prompts: list[list[int]]
    logits: list[torch.Tensor]


@pytest.fixture(scope="module", params=SHAPES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(request.param)
    write_folder(folder, model)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (44, 9)]
    with torch.inference_mode():
        logits = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    assert all(float(rows.std()) > 0.1 for rows in logits)
    return Case(request.param, model, folder, prompts, logits)


def test_a_folder_computes_and_draws_as_transformers(case: Case) -> None:
    assert len(list(case.folder.glob("*.safetensors"))) > 1
    ours = runner(open_path(case.folder))
    assert differences(in_chunks(ours, case.prompts), case.logits) < TOLERANCE
    assert differences(in_chunks(ours, case.prompts[:1], size=100), case.logits[:1]) < TOLERANCE
    with torch.inference_mode():
        expected = [
            case.model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0]
            for prompt in case.prompts
        ]
    theirs = [ids[len(prompt) :].tolist() for ids, prompt in zip(expected, case.prompts, strict=True)]
    assert greedy(ours, case.prompts, 12) == theirs
    assert [greedy(ours, [prompt], 12)[0] for prompt in case.prompts] == theirs


def test_the_plan_of_memory_counts_what_is_there(case: Case) -> None:
    checkpoint = open_path(case.folder)
    facts = checkpoint.facts()
    parameters = [parameter.numel() for parameter in checkpoint.build_model().parameters()]
    assert (facts.num_parameters, facts.largest_tensor) == (sum(parameters), max(parameters))
    assert sum(parameters) == sum(parameter.numel() for parameter in case.model.parameters())
    dummy = open_path(case.folder, load_format="dummy")
    assert float(in_chunks(runner(dummy), case.prompts)[0].std()) > 0.1
    assert dummy.tokenizer().vocab_size == 512


def test_deterministic_bits(case: Case) -> None:
    """A row is the same alone, batched and however it is cut; and it is the model."""
    ours = runner(open_path(case.folder), enable_deterministic_inference=True)
    together = in_chunks(ours, case.prompts, size=19)
    assert differences(together, case.logits) < TOLERANCE
    for index, prompt in enumerate(case.prompts):
        for size in (6, 100):
            assert torch.equal(in_chunks(ours, [prompt], size=size)[0], together[index])


@pytest.mark.skipif(library.compiler() is None, reason="there is no C++ compiler")
def test_native_kernels(case: Case) -> None:
    """Packed matrices, and the reference's attention where the native one has no window or soft cap."""
    load_native_kernels()
    ours = runner(open_path(case.folder), kernels="native")
    assert differences(in_chunks(ours, case.prompts), case.logits) < TOLERANCE


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_layers_op_by_op_on_triton(tmp_path: Path) -> None:
    """What the fused layers do not take: a model on Triton's attention and norms, with the plan that goes with them."""
    theirs = make_model("qwen3-moe", num_hidden_layers=1)
    write_folder(tmp_path, theirs)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    checkpoint = open_path(tmp_path)
    model: Any = checkpoint.build_model(device=device, kernels="triton")
    model.model.fused = None
    cache = KVCache(checkpoint.config, CONTEXT_LEN, 1, torch.float32, device)
    plan_attention = registry.get("plan_attention", OpFacts(triton=True), "triton")
    prompt = list(range(3, 20))
    rows = []
    for part, start in ((prompt[:11], 0), (prompt[11:12], 11), (prompt[12:], 12)):
        plan = StepPlan(chunks=(chunk(0, part, start),))
        with torch.inference_mode():
            rows.append(model(ForwardBatch.from_plan(plan, 1, device, plan_attention=plan_attention), cache).cpu())
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    assert differences([torch.cat(rows)], [expected]) < TOLERANCE


@pytest.mark.parametrize("name", GGUF_SHAPES)
def test_a_gguf_file_computes_as_transformers(tmp_path: Path, name: str) -> None:
    # The format has no key for Gemma's scale of queries; it goes by the size of the model.
    model = make_model(name, **({"query_pre_attn_scalar": 8} if name == "gemma2" else {}))
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model)
    prompt = torch.randint(3, VOCAB_SIZE, (44,), generator=torch.Generator().manual_seed(6))
    with torch.inference_mode():
        expected = model(prompt[None]).logits[0]
    checkpoint = open_path(path)
    assert differences(in_chunks(runner(checkpoint), [prompt.tolist()]), [expected]) < TOLERANCE
    if library.compiler() is not None:
        load_native_kernels()
        kept = runner(checkpoint, kernels="auto", dtype="auto", quantization="gguf")
        error = in_chunks(kept, [prompt.tolist()])[0] - expected
        # Keys and values in bfloat16; where two experts are nearly alike, the other one may be picked.
        assert 0 < float(error.norm() / expected.norm()) < (0.2 if checkpoint.config.experts else 0.05)


def test_the_text_of_a_model_that_sees_images(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    sees = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(2)
    text = make_model("gemma3")
    config = Gemma3Config(
        text_config=text.config.to_dict(),
        vision_config={**sees, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        tie_word_embeddings=True,
    )
    theirs = Gemma3ForConditionalGeneration(config).eval()
    theirs.model.language_model.load_state_dict(text.model.state_dict())
    theirs.save_pretrained(tmp_path)
    prompt = list(range(3, 50))
    with torch.inference_mode():
        expected = text(torch.tensor([prompt])).logits[0]
    assert differences(in_chunks(runner(open_path(tmp_path)), [prompt]), [expected]) < TOLERANCE
