"""`json_model_override_args`: what is refused, and that it works whatever the checkpoint's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_llama import logits_of, open_folder, write_llama

from sgl.errors import ConfigError, CorruptModel
from sgl.runtime.loading.checkpoint import open_checkpoint
from sgl.runtime.loading.fields import TOY_FIELDS
from sgl.runtime.loading.shapes import model_config, parse_override
from sgl.runtime.loading.sources import locate


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "JSON list; expected an object"),
        ('{"hiden_size": 64}', r"unknown key 'hiden_size' \(did you mean 'hidden_size'\?\)"),
        ('{"zzz": 1}', r"unknown key 'zzz' \(known are architectures, vocab_size"),
        ('{"rope_scaling": {"fator": 2}}', r"unknown key 'rope_scaling.fator' \(did you mean 'factor'\?\)"),
        ('{"vocab_size": "many"}', "`vocab_size`"),
        ('{"vocab_size": 0}', "`vocab_size`"),
        ('{"vocab_size": 1.5}', "`vocab_size`"),
        ('{"vocab_size": NaN}', "`vocab_size`"),
        ('{"rope_theta": Infinity}', "`rope_theta`"),
        ('{"tie_word_embeddings": 1}', "`tie_word_embeddings`"),
        ('{"rope_scaling": {"long_factor": [1, "2"]}}', "rope_scaling.long_factor"),
        ('{"rope_scaling": 2}', "`rope_scaling`"),
    ],
)
def test_text_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_override(text)
    assert caught.value.param == "json_model_override_args"
    assert caught.value.hint


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"num_key_value_heads": 3}, "4 num_attention_heads over 3.*change or leave out num_key_value_heads"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"architectures": ["MambaForCausalLM"]}, r"'MambaForCausalLM' is not supported \(supported are"),
        ({"rope_scaling": {"rope_type": "yarn"}}, None),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' lacks factor"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "'spiral' is not supported; supported are linear"),
        ({"partial_rotary_factor": 0.2}, "3 of 16 features of a head are rotated"),
        (
            {"architectures": ["Qwen4ForCausalLM"]},
            r"'Qwen4ForCausalLM' is not supported \(the nearest is Qwen3ForCausalLM",
        ),
        ({"architectures": ["MixtralForCausalLM"]}, "0 of 0 experts for each token"),
        ({"hidden_size": None}, "`hidden_size`"),
    ],
)
def test_an_override_to_what_cannot_be_names_its_key(override: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert model_config(TOY_FIELDS, Path("toy"), override).rope_scaling is not None
        return
    with pytest.raises(ConfigError, match=message) as caught:
        model_config(TOY_FIELDS, Path("toy"), override)
    assert caught.value.param == "json_model_override_args"


def test_whose_error_it_is() -> None:
    """The same impossible model: the checkpoint's fault, unless the override says so."""
    with pytest.raises(CorruptModel, match="head_dim is 7"):
        model_config({**TOY_FIELDS, "head_dim": 7}, Path("toy"), {"vocab_size": 600})
    assert model_config({**TOY_FIELDS, "head_dim": 7}, Path("toy"), {"head_dim": 8}).head_dim == 8


def test_the_built_in_shape_with_other_sizes() -> None:
    override = json.dumps({"num_hidden_layers": 3, "hidden_size": 32, "head_dim": 8, "vocab_size": 600})
    checkpoint = open_checkpoint(locate("dummy"), override)
    model = checkpoint.build_model()
    assert model.get_parameter("model.embed_tokens.weight").shape == (600, 32)
    assert sum(parameter.numel() for parameter in model.parameters()) == checkpoint.facts().num_parameters
    assert len({name.split(".")[2] for name, _ in model.named_parameters() if name.startswith("model.layers")}) == 3


def test_a_folder_computes_with_what_was_overridden(tmp_path: Path) -> None:
    """Equal to a checkpoint that says so itself, and to transformers' reading of it."""
    model = write_llama(tmp_path, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0})
    path = tmp_path / "config.json"
    plain = {**json.loads(path.read_text()), "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}
    path.write_text(json.dumps(plain))
    tokens = list(range(90))
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    override = json.dumps({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2}})
    assert float((logits_of(open_folder(tmp_path, override), tokens) - expected).abs().max()) < 1e-3
    assert float((logits_of(open_folder(tmp_path), tokens) - expected).abs().max()) > 0.1


def test_weights_that_an_override_does_not_fit(tmp_path: Path) -> None:
    write_llama(tmp_path)
    with pytest.raises(CorruptModel, match=r"has shape \(96, 32\); its config says \(128, 32\)"):
        open_folder(tmp_path, '{"vocab_size": 128}').build_model()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_agree_with_transformers(tmp_path: Path, dtype: str) -> None:
    """The same weights in the same type, in transformers' own arithmetic: roundings differ, so the bound is a few units
    of the type's precision on logits of order one; float32 stays far closer to itself than that."""
    model = write_llama(tmp_path, initializer_range=0.1)
    tokens = list(range(90))
    kind = getattr(torch, dtype)
    with torch.inference_mode():
        exact = model(torch.tensor([tokens])).logits[0]
        theirs = model.to(kind)(torch.tensor([tokens])).logits[0].float()
    checkpoint = open_folder(tmp_path)
    built = checkpoint.build_model(dtype)
    assert {parameter.dtype for parameter in built.parameters()} == {kind}
    ours = logits_of(checkpoint, tokens, dtype=dtype)
    unit = float(exact.abs().max()) * torch.finfo(kind).eps
    assert float((ours - theirs).abs().max()) < 8 * unit
    assert float((ours - exact).abs().max()) < 8 * unit
    assert float((logits_of(checkpoint, tokens) - exact).abs().max()) < unit / 8
