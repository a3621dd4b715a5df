"""Rotary variants against transformers: the frequencies alone, and the logits of a random tiny Llama."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from support.tiny_llama import VOCAB_SIZE, logits_of, open_folder, write_llama

from sgl.errors import UnsupportedModel
from sgl.runtime.loading.checkpoint import open_checkpoint
from sgl.runtime.loading.fields import TOY_FIELDS
from sgl.runtime.loading.shapes import model_config, toy_config
from sgl.runtime.loading.sources import locate
from sgl.runtime.models.registry import ModelConfig, RopeScaling
from sgl.runtime.models.rope import rotary

CPU = torch.device("cpu")
ORIGINAL = 64
HALF = 4
"""Frequencies of the tiny Llama: heads of 8 features."""

LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.3, 1.2],
    "long_factor": [1.0, 2.0, 3.5, 4.0],
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.2},
    "yarn-mscale": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.6},
    "yarn-wide": {**YARN, "factor": 40.0, "rope_theta": 150.0},
    "longrope": LONGROPE,
    "longrope-gain": {**LONGROPE, "attention_factor": 1.3},
}
OWN_ORIGINAL = ("llama3", "yarn", "longrope")


def parameters(name: str) -> dict[str, Any]:
    """`rope_parameters` as transformers writes them."""
    given = {"rope_theta": 10000.0, **SCALINGS[name]}
    if given["rope_type"] in OWN_ORIGINAL:
        given["original_max_position_embeddings"] = ORIGINAL
    return given


@torch.inference_mode()
def theirs(model: Any, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def random_ids(count: int) -> list[int]:
    ids: list[int] = torch.randint(0, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(count)).tolist()
    return ids


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_equal_transformers(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    shape = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 256}
    reference = LlamaConfig(rope_parameters=parameters(name), **shape)
    for context_len in (ORIGINAL, 256):
        expected, gain = ROPE_INIT_FUNCTIONS[reference.rope_parameters["rope_type"]](reference, CPU, context_len)
        config = model_config({**TOY_FIELDS, **shape, "rope_parameters": parameters(name)}, Path("test"), {})
        ours = rotary(_resolved(config, context_len), CPU)
        assert torch.allclose(ours.inverse_frequencies, expected, rtol=2e-7, atol=0)
        assert ours.attention_factor == pytest.approx(gain, rel=1e-12)


def _resolved(config: ModelConfig, context_len: int) -> ModelConfig:
    return msgspec.structs.replace(config, context_len=context_len)


@pytest.mark.parametrize("name", SCALINGS)
def test_logits_equal_transformers_below_and_beyond_the_original_context(tmp_path: Path, name: str) -> None:
    """Beyond the original context for every variant; below it too, where `longrope` has other factors."""
    model = write_llama(tmp_path, rope_parameters=parameters(name))
    checkpoint = open_folder(tmp_path)
    for count, context_len in ((ORIGINAL - 4, ORIGINAL), (250, 256)):
        text = random_ids(count)
        expected = theirs(model, text)
        assert float((logits_of(checkpoint, text, context_len=context_len) - expected).abs().max()) < 1e-3
    plain = rotary(toy_config({"head_dim": 2 * HALF}), CPU)
    scaled = rotary(_resolved(checkpoint.config, 256), CPU)
    assert not torch.allclose(plain.inverse_frequencies, scaled.inverse_frequencies, rtol=1e-2)


def test_dynamic_is_decided_once_from_the_context_length(tmp_path: Path) -> None:
    """transformers computes the table anew whenever a sequence is the longest so far. Ours is the table of a sequence
    as long as the context: equal to theirs for such a sequence, and for every sequence where nothing is scaled."""
    model = write_llama(tmp_path, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0})
    checkpoint = open_folder(tmp_path)
    assert checkpoint.config.longest_context_len == 1024
    short, long = random_ids(250), random_ids(400)
    assert float((logits_of(checkpoint, short) - theirs(model, short)).abs().max()) < 1e-3
    stretched = logits_of(checkpoint, long, context_len=400)
    assert float((stretched - theirs(model, long)).abs().max()) < 1e-3
    # The same position has the same answer however long the sequence grows: what makes cached keys true.
    assert torch.allclose(logits_of(checkpoint, long[:250], context_len=400), stretched[:250], atol=1e-5)
    assert not torch.allclose(logits_of(checkpoint, long[:250]), stretched[:250], atol=1e-2)


def test_longrope_is_decided_once_from_the_context_length(tmp_path: Path) -> None:
    write_llama(tmp_path, rope_parameters=parameters("longrope"))
    config = open_folder(tmp_path).config
    short = rotary(_resolved(config, ORIGINAL), CPU).inverse_frequencies
    long = rotary(_resolved(config, ORIGINAL + 1), CPU).inverse_frequencies
    pairs = zip(LONGROPE["long_factor"], LONGROPE["short_factor"], strict=True)
    assert torch.allclose(short / long, torch.tensor([of_long / of_short for of_long, of_short in pairs]))


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 2048),
        ({"rope_type": "default"}, 2048),
        ({"type": "linear", "factor": 4}, 8192),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096),
        ({**YARN, "original_max_position_embeddings": 2048}, 8192),
        ({**LLAMA3, "original_max_position_embeddings": 256}, 2048),
    ],
)
def test_the_longest_context(scaling: Any, longest: int) -> None:
    assert toy_config({"rope_scaling": scaling}).longest_context_len == longest


def test_scaling_over_a_config_that_has_the_other_form() -> None:
    checkpoint = {**TOY_FIELDS, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    config = model_config(checkpoint, Path("test"), {"rope_scaling": {"rope_type": "linear", "factor": 2}})
    assert config.rope_theta == 500.0
    assert config.rope_scaling == RopeScaling(rope_type="linear", factor=2.0)
    config = model_config(checkpoint, Path("test"), {"rope_parameters": {"rope_theta": 9.0}})
    assert (config.rope_theta, config.rope_scaling) == (9.0, None)


# --- GGUF -----------------------------------------------------------------------------------------------------------


def write_gguf(path: Path, model: Any, fields: dict[str, Any], tensors: dict[str, list[float]]) -> None:
    """The tiny Llama as a GGUF file in float32, with rope metadata `fields` and `tensors`."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    for key, value in fields.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"llama.rope.scaling.{key}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, value in model.state_dict().items():
        theirs_name = names.get_name(name, try_suffixes=(".weight",))
        assert theirs_name is not None, name
        values = value.numpy()
        for part, count in heads.items():
            if part in theirs_name:  # rows of a head in pairs, as llama.cpp's converter writes them
                values = values.reshape(count, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(theirs_name, np.ascontiguousarray(values))
    for name, numbers in tensors.items():
        writer.add_tensor(name, np.array(numbers, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama3_divisors() -> list[float]:
    """What llama.cpp's converter writes for Llama 3.1: unscaled over scaled frequencies."""
    scaled = rotary(toy_config({"head_dim": 2 * HALF, "rope_scaling": parameters("llama3")}), CPU)
    divisors: list[float] = (rotary(toy_config({"head_dim": 2 * HALF}), CPU)[0] / scaled[0]).tolist()
    return divisors


GGUF_SCALINGS: list[tuple[str, dict[str, Any], dict[str, list[float]]]] = [
    ("linear", {"type": "linear", "factor": 2.0}, {}),
    ("yarn", {"type": "yarn", "factor": 4.0, "original_context_length": ORIGINAL}, {}),
    ("llama3", {}, {"rope_freqs.weight": llama3_divisors()}),
    (
        "longrope-gain",
        {"original_context_length": ORIGINAL, "attn_factor": 1.3},
        {"rope_factors_long.weight": LONGROPE["long_factor"], "rope_factors_short.weight": LONGROPE["short_factor"]},
    ),
]


@pytest.mark.parametrize(("name", "fields", "tensors"), GGUF_SCALINGS, ids=[case[0] for case in GGUF_SCALINGS])
def test_gguf_files_scale_as_their_folders_do(
    tmp_path: Path, name: str, fields: dict[str, Any], tensors: dict[str, list[float]]
) -> None:
    model = write_llama(tmp_path, rope_parameters={**parameters(name), "rope_theta": 10000.0})
    write_gguf(tmp_path / "tiny.gguf", model, fields, tensors)
    text = random_ids(250)
    ours = logits_of(open_checkpoint(locate(str(tmp_path / "tiny.gguf"))), text, context_len=256)
    assert float((ours - theirs(model, text)).abs().max()) < 1e-3


def test_gguf_scaling_that_cannot_be(tmp_path: Path) -> None:
    model = write_llama(tmp_path)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, {"type": "yarn", "factor": 4.0}, {"rope_freqs.weight": [1.0] * HALF})
    with pytest.raises(UnsupportedModel, match=r"both rope_freqs\.weight and rope scaling 'yarn'"):
        open_checkpoint(locate(str(path)))
    write_gguf(path, model, {}, {"rope_freqs.weight": [1.0] * 3})
    with pytest.raises(UnsupportedModel, match="3 numbers in factors; heads of 8 features need 4"):
        open_checkpoint(locate(str(path)))
    override = json.dumps({"rope_scaling": {"type": "linear", "factor": 2}})
    assert open_checkpoint(locate(str(path)), override).config.longest_context_len == 512
