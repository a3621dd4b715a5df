"""Every architecture on a CUDA device: the tokens and logits of the CPU in float32, whichever kernels compute, recorded
steps among them; 16 bits; a model of transformers; an encoder; quantized checkpoints. Random tiny weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.quantized_layouts import LAYOUTS, quantize_folder
from support.tiny_llama import write_llama
from support.tiny_models import SHAPES, VOCAB_SIZE, make_model, write_folder
from support.tiny_runner import differences, greedy, in_chunks, open_path, runner

from sgl.runtime.config import EngineConfig
from sgl.runtime.encoder_start import build_encoder
from sgl.runtime.engine import Engine
from sgl.runtime.loading.encoder_checkpoint import encoder_checkpoint
from sgl.runtime.loading.sources import locate
from sgl.runtime.messages import Encode, EncodeReply, EncoderInput
from sgl.runtime.model_runner import ModelRunner
from sgl.runtime.text.tokenizer import Tokenizer

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-3
HEADS_FOR_TRITON = {name: {"head_dim": 16} for name in ("llama", "smollm3", "mixtral")}
"""Heads of 8, which these have in other tests, are computed by torch."""
ON_TRITON = {"llama", "qwen3", "smollm3", "phi4-mini", "qwen3-moe", "qwen3-moe-mixed", "mixtral"}
PROMPTS = [torch.randint(3, VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (44, 9)]


def on_cpu(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [row.cpu() for row in rows]


def on_gpu(folder: Path, dtype: str = "float32", **options: Any) -> ModelRunner:
    return runner(open_path(folder), device="cuda", dtype=dtype, kernels=options.pop("kernels", "auto"), **options)


def recorded(of: ModelRunner) -> int:
    """Steps that are recorded."""
    return 0 if of._gpu_steps is None else len(of._gpu_steps._graphs)


def folder_of(path: Path, name: str) -> Path:
    write_folder(path, make_model(name, **HEADS_FOR_TRITON.get(name, {})))
    return path


@pytest.mark.parametrize("name", SHAPES)
def test_float32_gives_the_tokens_of_the_cpu(tmp_path: Path, name: str) -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    folder = folder_of(tmp_path, name)
    reference, ours = runner(open_path(folder)), on_gpu(folder)
    assert differences(on_cpu(in_chunks(ours, PROMPTS)), in_chunks(reference, PROMPTS)) < TOLERANCE
    assert recorded(ours) == 0
    assert ours._gpu_steps is not None or name not in ON_TRITON
    expected = greedy(reference, PROMPTS, 8)
    assert greedy(ours, PROMPTS, 8) == expected
    assert [greedy(ours, [prompt], 8)[0] for prompt in PROMPTS] == expected
    assert (recorded(ours) >= 2) == (ours._gpu_steps is not None)  # of one row and of two


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gemma2"])
def test_sixteen_bits(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path, name)
    full = torch.cat(in_chunks(runner(open_path(folder)), PROMPTS))
    ours = on_gpu(folder, "bfloat16")
    half = torch.cat(on_cpu(in_chunks(ours, PROMPTS)))
    # Where two experts are nearly alike, the other one may be picked.
    assert 0 < float((half - full).norm() / full.norm()) < (0.3 if "moe" in name else 0.1)
    assert [len(row) for row in greedy(ours, PROMPTS, 8)] == [8, 8]


def test_an_engine_of_experts_draws_what_the_cpu_draws(tmp_path: Path) -> None:
    """With steps that overlap, recorded at start, under a constraint, and through the cache."""
    write_folder(tmp_path, make_model("qwen3-moe", vocab_size=512))
    (tmp_path / "tokenizer.json").write_text(Tokenizer.toy().to_json())
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    prompts = [[40 + i for i in range(30)] + [end] for end in (7, 8, 9)]
    expected = greedy(runner(open_path(tmp_path)), prompts, 12)
    with Engine(model_path=str(tmp_path), device="cuda", dtype="float32", max_total_tokens=1024) as engine:
        for _ in range(2):
            outputs = engine.generate(input_ids=prompts, sampling_params=params)
            assert [out["output_ids"] for out in outputs] == expected
        assert engine.generate("a", {**params, "regex": "(ab|cd){2}x"})["text"] in ("ababx", "abcdx", "cdabx", "cdcdx")
        assert engine.server_info()["resolved"]["kernels"] == "triton"
        engine.check()


def test_a_model_of_transformers(tmp_path: Path) -> None:
    from transformers import Olmo2Config, Olmo2ForCausalLM

    torch.manual_seed(3)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = Olmo2Config(**shape, vocab_size=VOCAB_SIZE, max_position_embeddings=256, initializer_range=0.15)
    Olmo2ForCausalLM(config).save_pretrained(tmp_path)
    reference, ours = runner(open_path(tmp_path)), on_gpu(tmp_path)
    assert differences(on_cpu(in_chunks(ours, PROMPTS)), in_chunks(reference, PROMPTS)) < TOLERANCE
    assert greedy(ours, PROMPTS, 8) == greedy(reference, PROMPTS, 8)
    half = torch.cat(on_cpu(in_chunks(on_gpu(tmp_path, "bfloat16"), PROMPTS)))
    full = torch.cat(in_chunks(reference, PROMPTS))
    assert 0 < float((half - full).norm() / full.norm()) < 0.1


def test_an_encoder(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "dog", "sat", "ran", "red", "on"]
    torch.manual_seed(3)
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    BertModel(BertConfig(**shape, vocab_size=len(words), initializer_range=0.2)).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    places = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"path": place, "type": f"sentence_transformers.models.{kind}"} for place, kind in places.items()]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    inputs = tuple(EncoderInput(text=text) for text in ("the cat sat", "dog", "the red cat ran on the dog"))

    def vectors(device: str, dtype: str) -> np.ndarray:
        found = encoder_checkpoint(locate(str(tmp_path)))
        assert found is not None
        config = EngineConfig(model_path=str(tmp_path), device=device, dtype=dtype)  # type: ignore[arg-type]
        core, _ = build_encoder(config, found)
        core.handle(Encode(request=1, task="embed", inputs=inputs))
        while core.has_work:
            core.step()
        (reply,) = core.take_replies()
        assert isinstance(reply, EncodeReply)
        assert reply.error is None
        return np.stack([np.frombuffer(row, dtype=np.float32) for row in reply.rows])

    expected = vectors("cpu", "float32")
    assert np.abs(vectors("cuda", "float32") - expected).max() < 1e-4
    assert 0 < np.abs(vectors("cuda", "auto") - expected).max() < 0.05


@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantized_checkpoints(tmp_path: Path, layout: str) -> None:
    write_llama(tmp_path, hidden_size=64, intermediate_size=96)
    quantize_folder(tmp_path, layout, "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")
    reference, ours = runner(open_path(tmp_path)), on_gpu(tmp_path, kernels="torch")
    assert differences(on_cpu(in_chunks(ours, PROMPTS)), in_chunks(reference, PROMPTS)) < TOLERANCE
