"""Checkpoints: a random tiny Llama against transformers, the toy model, and damaged or mismatched weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_llama import logits_of, open_folder, write_llama

from sgl.errors import CorruptModel, UnsupportedModel
from sgl.runtime.loading.checkpoint import open_checkpoint
from sgl.runtime.loading.facts import available_bytes, cpu_count
from sgl.runtime.loading.sources import locate


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True, "head_dim": 12},
    ],
    ids=["plain", "tied-sharded", "bias-head-dim"],
)
def test_logits_agree_with_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = write_llama(tmp_path, **changes)
    assert (tmp_path / "model.safetensors.index.json").exists() == ("tie_word_embeddings" in changes)
    if "attention_bias" in changes:  # transformers starts biases at zero, where a forgotten one would not show
        tensors = load_file(tmp_path / "model.safetensors")
        tensors = {name: torch.randn_like(t) if name.endswith("bias") else t for name, t in tensors.items()}
        save_file(tensors, tmp_path / "model.safetensors")
        model.load_state_dict(tensors)
    tokens = torch.randint(0, 96, (150,)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    got = logits_of(open_folder(tmp_path), tokens)
    assert float((got - expected).abs().max()) < 1e-4
    assert expected.std() > 0.1


def test_a_known_parameter_count(tmp_path: Path) -> None:
    model = write_llama(tmp_path)
    assert open_folder(tmp_path).facts().num_parameters == sum(p.numel() for p in model.parameters())


def test_the_toy_model_is_the_same_every_time() -> None:
    first, second = (open_checkpoint(locate("dummy")).build_model().state_dict() for _ in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    checkpoint = open_checkpoint(locate("dummy"))
    assert (checkpoint.folder, checkpoint.gguf_metadata, checkpoint.config.vocab_size) == (None, None, 512)


def test_dummy_weights_take_the_shape_from_a_folder(tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    checkpoint = open_checkpoint(locate(str(tmp_path), load_format="dummy"))
    assert checkpoint.build_model(dtype="bfloat16").get_parameter("lm_head.weight").dtype == torch.bfloat16
    assert checkpoint.folder == tmp_path


def edit(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop("model.norm.weight"), r"lacks 1 tensors: model\.norm\.weight"),
        (lambda t: t.update(extra=torch.ones(1)), "unexpected 1 tensors: extra"),
        (lambda t: t.update({"model.norm.weight": torch.ones(31)}), r"model\.norm\.weight .* shape \(31,\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, change: Any, match: str) -> None:
    write_llama(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(CorruptModel, match=match):
        open_folder(tmp_path).build_model()


@pytest.mark.parametrize("keep", [0, 4, 100, -10])
def test_a_truncated_safetensors_file(tmp_path: Path, keep: int) -> None:
    write_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CorruptModel, match="cannot be read"):
        open_folder(tmp_path).build_model()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"architectures": ["MambaForCausalLM"]}, UnsupportedModel, "MambaForCausalLM"),
        (
            {"rope_parameters": {"rope_type": "proportional", "factor": 4}},
            UnsupportedModel,
            "proportional",
        ),
        ({"rope_scaling": {"rope_type": "linear"}, "rope_parameters": None}, UnsupportedModel, "'linear' lacks factor"),
        ({"partial_rotary_factor": 0.4}, CorruptModel, "3 of 8 features of a head are rotated"),
        ({"quantization_config": {"quant_method": "aqlm"}}, UnsupportedModel, "quantized by 'aqlm'"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "gelu"),
        ({"num_key_value_heads": 3}, CorruptModel, "no possible model"),
        ({"hidden_size": None}, CorruptModel, "wrong type.*hidden_size"),
        ({"vocab_size": float("nan")}, CorruptModel, "wrong type.*vocab_size"),
        ({"num_hidden_layers": 10**9}, CorruptModel, "range.*num_hidden_layers"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, change: dict[str, Any], error: Any, match: str) -> None:
    write_llama(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(error, match=match):
        open_folder(tmp_path).build_model()


def test_an_index_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    write_llama(tmp_path)
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptModel, match="beside their index"):
        open_folder(tmp_path).build_model()


def test_control_groups_limit_memory_and_cores(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/app"
    group.mkdir(parents=True)
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text("0::/app\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert available_bytes(tmp_path) == 8000 * 1024
    (group / "memory.max").write_text("3000000\n")
    (group / "memory.current").write_text("1000000\n")
    (group / "memory.stat").write_text("anon 5\ninactive_file 400000\n")
    assert available_bytes(tmp_path) == 2400000
    free = cpu_count(tmp_path)
    (group / "cpu.max").write_text("50000 100000\n")
    assert cpu_count(tmp_path) == 1 <= free
    (group / "cpu.max").write_text("max 100000\n")
    (group / "memory.max").write_text("max\n")
    assert cpu_count(tmp_path) == free
    assert available_bytes(tmp_path) == 8000 * 1024
