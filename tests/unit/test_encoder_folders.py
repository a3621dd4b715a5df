"""What folders of encoders say: files of sentence-transformers, lengths, cases, old names; what is refused, and with
which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.encoders import TEXTS, ask, core_of, make, modules, opened, sentence_files, texts, write

from sgl.doctor import examine_model
from sgl.errors import ConfigError, CorruptModel, SglError, UnsupportedModel
from sgl.runtime.config import EngineConfig
from sgl.runtime.encoder_start import EncoderMachine, resolve_encoder
from sgl.runtime.loading.checkpoint import open_checkpoint
from sgl.runtime.loading.sources import locate


def test_the_files_of_sentence_transformers(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "the red "}, "default_prompt_name": "query"}
    files = {
        **sentence_files(),
        "sentence_bert_config.json": {"max_seq_length": 16},
        "config_sentence_transformers.json": prompts,
    }
    write(tmp_path / "a", make(), files)
    config = opened(tmp_path / "a").config
    assert (config.pooling, config.normalize, config.max_len, config.prompt) == ("mean", True, 16, "the red ")
    plain = write(tmp_path / "b", make(), sentence_files())
    assert np.array_equal(
        ask(core_of(tmp_path / "a"), "embed", texts("cat", "")),
        ask(core_of(plain), "embed", texts("the red cat", "the red ")),
    )
    config = opened(write(tmp_path / "c", make())).config
    assert (config.pooling, config.normalize, config.max_len) == ("mean", False, 32)
    for mode, pooling in (("cls", "cls"), ("mean", "mean"), ("lasttoken", "last")):
        newer = {**modules("Transformer", "Pooling"), "1_Pooling/config.json": {"pooling_mode": mode}}
        assert opened(write(tmp_path / mode, make(), newer)).config.pooling == pooling


def test_how_long_a_text_may_be(tmp_path: Path) -> None:
    """What the model's makers say, else the tokenizer's; never more than there are positions."""
    said: list[tuple[dict[str, Any], dict[str, Any], int]] = [
        ({}, {"model_max_length": 20}, 20),
        ({}, {"model_max_length": 10**30}, 32),
        ({"max_seq_length": 24}, {"model_max_length": 20}, 24),
        ({"max_seq_length": None}, {"model_max_length": 20}, 20),
        ({"max_seq_length": 99}, {}, 32),
    ]
    model = make()
    for number, (sentence, tokenizer, longest) in enumerate(said):
        files = {"sentence_bert_config.json": sentence, "tokenizer_config.json": tokenizer}
        assert opened(write(tmp_path / str(number), model, files)).config.max_len == longest


def test_texts_are_made_lower_case_where_the_makers_did(tmp_path: Path) -> None:
    """Beside a tokenizer that tells upper case apart, and so with the prompt and the second text of a pair."""
    cased = {"tokenizer_config.json": {"do_lower_case": False}}
    lower = {"sentence_bert_config.json": {"max_seq_length": 16, "do_lower_case": True}, **cased}
    model = make()
    plain, honoured = (core_of(write(tmp_path / name, model, files)) for name, files in (("a", cased), ("b", lower)))
    small, large = texts("the cat sat"), texts("The CAT sat")
    assert not np.array_equal(ask(plain, "embed", small), ask(plain, "embed", large))
    assert np.array_equal(ask(honoured, "embed", small), ask(honoured, "embed", large))
    assert np.array_equal(ask(honoured, "embed", small), ask(plain, "embed", small))


def test_the_settings_of_newer_versions(tmp_path: Path) -> None:
    """They name what is asked of the transformer, which is what is computed here."""
    for head, task, states, output in (
        ("Model", "feature-extraction", "last_hidden_state", "token_embeddings"),
        ("ForSequenceClassification", "sequence-classification", "logits", "scores"),
    ):
        settings = {
            "transformer_task": task,
            "modality_config": {"text": {"method": "forward", "method_output_name": states}},
            "module_output_name": output,
            "model_args": {},
        }
        folder = write(tmp_path / head, make(head), {"sentence_bert_config.json": settings})
        assert opened(folder).config.max_len == 32


@pytest.mark.parametrize(
    ("files", "fields", "kind", "said"),
    [
        (sentence_files("pooling_mode_max_tokens"), {}, UnsupportedModel, "pools by pooling_mode_max_tokens"),
        (modules("Transformer", "Dense"), {}, UnsupportedModel, "modules.json has the modules Transformer, Dense"),
        (modules("Transformer", "Normalize", "Pooling"), {}, UnsupportedModel, "Transformer, Normalize, Pooling"),
        (modules("Transformer", "Pooling", "Pooling"), {}, UnsupportedModel, "Transformer, Pooling, Pooling"),
        (modules("BoW", "Pooling"), {}, UnsupportedModel, "has the modules BoW, Pooling"),
        (modules("Transformer"), {}, UnsupportedModel, "supported are a Transformer beside it, then Pooling"),
        (modules("Transformer", "Pooling", first="0_Transformer"), {}, UnsupportedModel, "'0_Transformer'"),
        ({"modules.json": [{}, {"type": "x.Pooling", "path": "../up"}]}, {}, CorruptModel, "names the folder"),
        ({"modules.json": {}}, {}, CorruptModel, "modules.json"),
        ({"sentence_bert_config.json": {"max_seq_length": "x"}}, {}, CorruptModel, "max_seq_length"),
        ({"sentence_bert_config.json": {"max_seq_length": 2}}, {}, CorruptModel, "max_seq_length"),
        ({"sentence_bert_config.json": {"model_args": {"a": 1}}}, {}, UnsupportedModel, "config.json sets model_args"),
        (
            {"sentence_bert_config.json": {"transformer_task": "fill-mask"}},
            {},
            UnsupportedModel,
            "transformer_task is 'fill-mask'",
        ),
        ({"tokenizer_config.json": {"model_max_length": "x"}}, {}, CorruptModel, "model_max_length is 'x'"),
        ({"tokenizer_config.json": {"truncation_side": "left"}}, {}, UnsupportedModel, "truncation_side is 'left'"),
        ({"tokenizer_config.json": {"do_basic_tokenize": False}}, {}, UnsupportedModel, "do_basic_tokenize is False"),
        (
            {"tokenizer_config.json": {"tokenizer_class": "BertJapaneseTokenizer"}},
            {},
            UnsupportedModel,
            "tokenizer_class is 'BertJapaneseTokenizer'",
        ),
        ({}, {"hidden_act": "swish9"}, UnsupportedModel, "hidden_act is 'swish9'"),
        ({}, {"position_embedding_type": "relative_key"}, UnsupportedModel, "relative_key"),
        ({}, {"is_decoder": True}, UnsupportedModel, "is_decoder"),
        ({}, {"quantization_config": {"a": 1}}, UnsupportedModel, "quantized"),
        ({}, {"num_attention_heads": 5}, CorruptModel, "48 features over 5 heads"),
        ({}, {"hidden_size": "x"}, CorruptModel, "hidden_size"),
        ({}, {"num_hidden_layers": 4}, CorruptModel, "lacks 16 tensors: encoder.layer.3"),
        ({}, {"num_hidden_layers": 2}, CorruptModel, "has unexpected 16 tensors"),
        ({}, {"intermediate_size": 64}, CorruptModel, "of another shape"),
        ({}, {"vocab_size": 8}, CorruptModel, "has 19 ids and the model 8"),
    ],
)
def test_folders_that_are_refused(
    tmp_path: Path, files: dict[str, Any], fields: dict[str, Any], kind: type[SglError], said: str
) -> None:
    write(tmp_path, make(), files, **fields)
    with pytest.raises(kind, match=said) as caught:
        core_of(tmp_path)
    if "tensors" not in said and "shape" not in said:  # which `sgl doctor` does not read
        assert examine_model({"model_path": str(tmp_path), "device": "cpu"}).error == caught.value.to_info()


def test_what_old_checkpoints_hold(tmp_path: Path) -> None:
    """Positions counted out, heads that no vector goes through, and other names of a norm's weights."""
    from safetensors.torch import load_file, save_file

    write(tmp_path, make())
    new = ask(core_of(tmp_path), "embed", texts(*TEXTS))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for name, tensor in tensors.items()}
    old = {f"bert.{name.replace('LayerNorm.bias', 'LayerNorm.beta')}": tensor for name, tensor in renamed.items()}
    assert any(name.endswith("gamma") for name in old)
    old["bert.embeddings.position_ids"] = torch.arange(32)[None]
    old["cls.predictions.bias"] = torch.zeros(40)
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    assert np.array_equal(ask(core_of(tmp_path), "embed", texts(*TEXTS)), new)


def test_options_that_encoders_do_not_have(tmp_path: Path) -> None:
    checkpoint = opened(write(tmp_path, make()))
    machine = EncoderMachine(cpu_count=2, available_bytes=10**9)
    resolved = resolve_encoder(EngineConfig(), checkpoint.config, checkpoint.num_parameters(), machine)
    assert (resolved.dtype, resolved.device, resolved.context_len, resolved.num_threads) == ("float32", "cpu", 32, 2)
    assert {reason.field for reason in resolved.reasons} >= {"dtype", "device", "context_length"}
    for options, said in (
        ({"quantization": "int8"}, "quantization is 'int8'"),
        ({"context_length": 33}, "32 positions"),
        ({"device": "cuda"}, "no CUDA device"),
    ):
        with pytest.raises(ConfigError, match=said):
            resolve_encoder(EngineConfig(**options), checkpoint.config, 1000, machine)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="weights need"):
        resolve_encoder(EngineConfig(), checkpoint.config, 10**9, machine)
    with pytest.raises(UnsupportedModel, match="BertModel is an encoder"):
        open_checkpoint(locate(str(tmp_path)))
