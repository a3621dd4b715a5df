"""Checkpoints of encoders: shape, pooling, normalization, labels, tokenizer and weights, all from the folder's files.

Owns the reading of `config.json` and of the files of sentence-transformers (`modules.json`, `1_Pooling/config.json`,
`sentence_bert_config.json`, `config_sentence_transformers.json`). Called by the worker and `sgl doctor`. What a file
asks for and is not computed here is refused, never left out: vectors would be others than its makers'. Importing it
imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from sgl.errors import CorruptModel, UnsupportedModel
from sgl.runtime.loading.fields import Number, Positive, Size
from sgl.runtime.loading.folder import json_object, text_of
from sgl.runtime.loading.shapes import architecture_name, fields_of_folder
from sgl.runtime.loading.sources import ModelSource
from sgl.runtime.loading.tensors import safetensors_tensors
from sgl.runtime.models.encoder_config import Activation, EncoderConfig, Pooling
from sgl.runtime.models.registry import architectures
from sgl.runtime.text.wordpiece import EncoderTokenizer

if TYPE_CHECKING:
    import torch

    from sgl.runtime.models.bert import Bert

_CLASSIFIER = "ForSequenceClassification"
_CLASSIFIER_TASK = ("sequence-classification", "scores", "logits")
_VECTOR_TASK = ("feature-extraction", "token_embeddings", "last_hidden_state")
"""What sentence-transformers calls the task, its output, and that of the model."""
_HEADS_LEFT_OUT = ("pooler.", "cls.")
"""Parts of a checkpoint that a pooled vector does not go through."""
_OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}
_COUNTED = "embeddings.position_ids"
"""Numbers from 0 up, which old versions stored."""
_DUMMY_SEED = 20250101
_MAX_NAMED = 5


class _Fields(msgspec.Struct, kw_only=True):
    """What is read of an encoder's `config.json`."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Number
    num_attention_heads: Number
    max_position_embeddings: Size = 512
    type_vocab_size: Number = 2
    layer_norm_eps: Positive = 1e-12
    hidden_act: str = "gelu"
    position_embedding_type: str | None = None
    is_decoder: bool = False
    id2label: Annotated[dict[str, str], Meta(max_length=2**16)] | None = None
    num_labels: Number | None = None
    problem_type: str | None = None
    sentence_transformers: dict[str, Any] | None = None
    sbert_ce_default_activation_function: str | None = None
    quantization_config: dict[str, Any] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


class EncoderCheckpoint:
    """An encoder that can be built.

    Attributes:
        source, folder: where it was found.
        config: its shape, and what becomes of its states.
    """

    def __init__(self, source: ModelSource, folder: Path) -> None:
        self.source = source
        self.folder = folder
        self.config = _config(folder)

    def tokenizer(self) -> EncoderTokenizer:
        """Of `tokenizer.json`, else of `vocab.txt`.

        Raises:
            UnsupportedModel: the folder has neither.
            CorruptModel: one cannot be read, or has more ids than the model.
        """
        tokenizer = EncoderTokenizer.from_folder(self.folder)
        if tokenizer.vocab_size > self.config.vocab_size:
            raise CorruptModel(
                f"the tokenizer has {tokenizer.vocab_size} ids and the model {self.config.vocab_size}",
                hint="give the tokenizer that belongs to the model",
            )
        return tokenizer

    def num_parameters(self) -> int:
        """Of the whole model, which is made for it without weights."""
        return sum(parameter.numel() for parameter in self._empty().parameters())

    def build_model(self, dtype: str = "float32", device: str = "cpu") -> Bert:
        """The model with its weights.

        Raises:
            CorruptModel: tensors are missing, unexpected, of another shape, or unreadable.
        """
        import torch

        model, torch_dtype = self._empty(), getattr(torch, dtype)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        if self.source.kind == "dummy":
            generator = torch.Generator().manual_seed(_DUMMY_SEED)
            tensors = {name: torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes.items()}
        else:
            tensors = self._tensors(shapes)
        placed = {name: tensor.to(dtype=torch_dtype, device=device, copy=True) for name, tensor in tensors.items()}
        model.load_state_dict(placed, assign=True)
        return model.requires_grad_(False).eval()

    def _empty(self) -> Bert:
        import torch

        from sgl.runtime.models.bert import Bert

        with torch.device("meta"):
            return Bert(self.config)

    def _tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors under the model's names, all of them there and nothing else."""
        found = {}
        for name, tensor in safetensors_tensors(self.folder, left_out=lambda name: name.endswith(_COUNTED)):
            name = name.removeprefix("bert.")
            for old, new in _OLD_NAMES.items():
                name = name.removesuffix(old) + new if name.endswith(old) else name
            if name in shapes or not name.startswith(_HEADS_LEFT_OUT):
                found[name] = tensor
        wrong = {name for name in found.keys() & shapes.keys() if tuple(found[name].shape) != shapes[name]}
        for what, names in (
            ("lacks", shapes.keys() - found.keys()),
            ("has unexpected", found.keys() - shapes.keys()),
            ("has, of another shape than its config says,", wrong),
        ):
            if names:
                listed = ", ".join(sorted(names)[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")
                raise CorruptModel(
                    f"{self.source.name} {what} {len(names)} tensors: {listed}",
                    hint="config and weights belong to different models, or the file is damaged: fetch it again",
                )
        return found


def encoder_checkpoint(source: ModelSource) -> EncoderCheckpoint | None:
    """The encoder at `source`; `None` where there is something else.

    Raises:
        CorruptModel: a file is damaged, lacks a field, or contradicts another.
        UnsupportedModel: a pooling, a module or a feature that is not computed here.
    """
    folder = source.path
    if folder is None or not folder.is_dir():
        return None
    architecture = architectures().get(architecture_name(fields_of_folder(folder)))
    if architecture is None or architecture.kind != "encoder":
        return None
    return EncoderCheckpoint(source, folder)


def _config(folder: Path) -> EncoderConfig:
    given = fields_of_folder(folder)
    name, path = architecture_name(given), folder / "config.json"
    try:
        fields = msgspec.convert(given, _Fields)
    except msgspec.ValidationError as error:
        raise CorruptModel(f"{path}: {error}", hint="fetch the model again") from None
    if fields.hidden_size % fields.num_attention_heads:
        raise CorruptModel(
            f"{path}: no possible model: {fields.hidden_size} features over {fields.num_attention_heads} heads",
            hint="fetch the model again",
        )
    _check_supported(fields, path)
    sentence = _sentence_settings(folder, is_classifier=name.endswith(_CLASSIFIER))
    return EncoderConfig(
        architecture=name,
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        num_hidden_layers=fields.num_hidden_layers,
        num_attention_heads=fields.num_attention_heads,
        max_position_embeddings=fields.max_position_embeddings,
        type_vocab_size=fields.type_vocab_size,
        layer_norm_eps=fields.layer_norm_eps,
        hidden_act=fields.hidden_act,
        max_len=min(fields.max_position_embeddings, sentence.max_seq_length or _tokenizer_len(folder)),
        lower_case=sentence.do_lower_case,
        checkpoint_dtype=fields.dtype or fields.torch_dtype or "float32",
        **(_head(fields, path) if name.endswith(_CLASSIFIER) else _vectors(folder)),
    )


def _check_supported(fields: _Fields, path: Path) -> None:
    known = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")
    for what, is_known in (
        (f"hidden_act is {fields.hidden_act!r}", fields.hidden_act in known),
        (
            f"position_embedding_type is {fields.position_embedding_type!r}",
            fields.position_embedding_type in (None, "absolute"),
        ),
        ("is_decoder is set", not fields.is_decoder),
        ("the weights are quantized (quantization_config)", not fields.quantization_config),
    ):
        if not is_known:
            raise UnsupportedModel(f"{path}: {what}, which is not computed here", hint="use another model")


class _SentenceSettings(msgspec.Struct, kw_only=True):
    """What a `sentence_bert_config.json` may say. Newer ones also say what the transformer is asked for."""

    max_seq_length: Annotated[int, Meta(ge=3)] | None = None
    do_lower_case: bool = False
    transformer_task: str | None = None
    modality_config: dict[str, dict[str, str]] | None = None
    module_output_name: str | None = None


def _sentence_settings(folder: Path, *, is_classifier: bool) -> _SentenceSettings:
    path = folder / "sentence_bert_config.json"
    given = {name: value for name, value in json_object(folder, path.name).items() if value}
    for name in given.keys() - set(_SentenceSettings.__struct_fields__):
        raise UnsupportedModel(
            f"{path} sets {name}, which is not known here",
            hint=f"known are {', '.join(_SentenceSettings.__struct_fields__)}",
        )
    try:
        settings = msgspec.convert(given, _SentenceSettings)
    except msgspec.ValidationError as error:
        raise CorruptModel(f"{path}: {error}", hint="fetch the model again") from None
    task, output, states = _CLASSIFIER_TASK if is_classifier else _VECTOR_TASK
    known: dict[str, Any] = {
        "transformer_task": task,
        "module_output_name": output,
        "modality_config": {"text": {"method": "forward", "method_output_name": states}},
    }
    for name, value in known.items():
        if (asked := getattr(settings, name)) not in (None, value):
            raise UnsupportedModel(f"{path}: {name} is {asked!r}", hint=f"supported is {value!r}")
    return settings


def _tokenizer_len(folder: Path) -> int:
    """Tokens that the tokenizer's makers take, where the folder does not say how many the model's do."""
    given = json_object(folder, "tokenizer_config.json").get("model_max_length")
    if given is None:
        return sys.maxsize
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not given >= 3:
        raise CorruptModel(
            f"{folder / 'tokenizer_config.json'}: model_max_length is {given!r}; expected a number above 2",
            hint="fetch the model again",
        )
    return int(min(given, sys.maxsize))  # "none" is written as 10 to the power of 30


# --- vectors --------------------------------------------------------------------------------------------------------


def _vectors(folder: Path) -> dict[str, Any]:
    """Pooling, normalization and prompt as sentence-transformers keeps them; means as they are without its files."""
    modules = _modules(folder)
    values: dict[str, Any] = {"pooling": "mean", "normalize": False, "prompt": _prompt(folder)}
    include_prompt = True
    if modules:
        kinds = [kind for kind, _ in modules]
        if kinds not in (_PLAIN_MODULES, [*_PLAIN_MODULES, "Normalize"]) or modules[0][1]:
            raise UnsupportedModel(
                f"{folder / 'modules.json'} has the modules {', '.join(kinds)}"
                + (f", the first in the folder {modules[0][1]!r}" if modules[0][1] else ""),
                hint="supported are a Transformer beside it, then Pooling, then Normalize or nothing",
            )
        values["pooling"], include_prompt = _pooling(folder, f"{modules[1][1]}/config.json")
        values["normalize"] = "Normalize" in kinds
    if values["prompt"] and not include_prompt:
        raise UnsupportedModel(
            f"{folder} leaves its default prompt out of the pooled states, which is not computed here",
            hint="use another model",
        )
    return values


_PLAIN_MODULES = ["Transformer", "Pooling"]


def _modules(folder: Path) -> list[tuple[str, str]]:
    """(last part of its type, its folder) of each module, in order."""
    text = text_of(folder, "modules.json")
    if text is None:
        return []
    try:
        rows = msgspec.json.decode(text, type=list[dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise CorruptModel(f"{folder / 'modules.json'}: {error}", hint="fetch the model again") from None
    found = []
    for row in rows:
        place = str(row.get("path", ""))
        if "/" in place or place.startswith("."):
            raise CorruptModel(
                f"{folder / 'modules.json'} names the folder {place!r}", hint="modules lie in folders beside it"
            )
        found.append((str(row.get("type", "")).rpartition(".")[2], place))
    return found


_POOLINGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last",
}
"""By the flag that is set, and by the value of `pooling_mode`, as newer versions write it."""


def _pooling(folder: Path, name: str) -> tuple[Pooling, bool]:
    """How states are pooled, and whether those of the prompt are among them."""
    given = json_object(folder, name)
    modes = [mode for mode, is_set in given.items() if mode.startswith("pooling_mode_") and is_set]
    if isinstance(mode := given.get("pooling_mode"), str):
        modes = [mode]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise UnsupportedModel(
            f"{folder / name} pools by {' and '.join(modes) or 'nothing'}",
            hint=f"supported is one of {', '.join(_POOLINGS)}",
        )
    return _POOLINGS[modes[0]], given.get("include_prompt") is not False


def _prompt(folder: Path) -> str:
    """What the model's makers put before every text, unless told otherwise."""
    settings = json_object(folder, "config_sentence_transformers.json")
    prompts, name = settings.get("prompts"), settings.get("default_prompt_name")
    if name is None:
        return ""
    prompt = prompts.get(name) if isinstance(prompts, dict) else None
    if not isinstance(prompt, str):
        raise CorruptModel(
            f"{folder / 'config_sentence_transformers.json'} has no prompt {name!r}", hint="fetch the model again"
        )
    return prompt


# --- labels ---------------------------------------------------------------------------------------------------------

_ACTIVATIONS: dict[str, Activation] = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}
"""torch's modules that a cross-encoder's config names."""


def _head(fields: _Fields, path: Path) -> dict[str, Any]:
    """Labels, and what becomes of their logits."""
    names = fields.id2label or {str(label): f"LABEL_{label}" for label in range(fields.num_labels or 2)}
    try:
        labels = tuple(names[str(label)] for label in range(len(names)))
    except KeyError as error:
        raise CorruptModel(f"{path}: id2label has no label {error}", hint="fetch the model again") from None
    return {"labels": labels, "activation": _activation(fields, len(labels), path)}


def _activation(fields: _Fields, num_labels: int, path: Path) -> Activation:
    named = (fields.sentence_transformers or {}).get("activation_fn") or fields.sbert_ce_default_activation_function
    if named is not None:
        kind = str(named).rpartition(".")[2]
        if kind not in _ACTIVATIONS:
            raise UnsupportedModel(
                f"{path} has the activation {named!r}", hint=f"supported are {', '.join(_ACTIVATIONS)}"
            )
        return _ACTIVATIONS[kind]
    if fields.problem_type == "regression":
        return "identity"
    return "sigmoid" if num_labels == 1 or fields.problem_type == "multi_label_classification" else "softmax"
