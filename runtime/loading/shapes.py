"""What a checkpoint says about its model: `config.json`, GGUF metadata or the toy shape, as one `ModelConfig`.

Owns the fields that are read (`Fields`, Hugging Face's names), their types and bounds, the translation of GGUF metadata
into them, and `json_model_override_args`, which replaces some of them whatever the checkpoint's form. Called by
`checkpoint`. No torch here; nothing in a config is executed, and what is not a field of `Fields` is not looked at.

A value that is impossible is a `CorruptModel` where the checkpoint says it, and a `ConfigError` naming the key where
the override does.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from sgl.errors import ConfigError, CorruptModel, ModelError, UnsupportedModel
from sgl.runtime.loading.folder import json_object
from sgl.runtime.loading.gguf_reader import GGUFFile
from sgl.runtime.models.registry import ModelConfig, RopeScaling, check_architecture

OVERRIDE = "json_model_override_args"

# Bounds far above any model, and far below what would exhaust memory before a weight is read.
Size = Annotated[int, Meta(ge=1, le=2**24)]
Number = Annotated[int, Meta(ge=1, le=2**12)]
Tokens = Annotated[int, Meta(ge=1, le=2**31)]
Positive = Annotated[float, Meta(gt=0, lt=1e30)]
_MAX_FACTORS = 2**12
Factors = Annotated[tuple[Positive, ...], Meta(max_length=_MAX_FACTORS)]

TOY_FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
"""Shape of the built-in `dummy` model; its vocabulary is the tokenizer's `Tokenizer.toy()`."""


class RopeFields(msgspec.Struct, kw_only=True):
    """`rope_scaling` or `rope_parameters` of a config."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    original_max_position_embeddings: Tokens | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    short_factor: Factors = ()
    long_factor: Factors = ()
    factors: Factors = ()
    partial_rotary_factor: Positive | None = None


class Fields(msgspec.Struct, kw_only=True):
    """What is read of a `config.json`. transformers 5 writes base and scaling of the rotary embedding as
    `rope_parameters`, earlier versions as `rope_theta` and `rope_scaling`."""

    architectures: list[str] | None = None
    vocab_size: Size | None = None
    hidden_size: Size | None = None
    intermediate_size: Size | None = None
    num_hidden_layers: Number | None = None
    num_attention_heads: Number | None = None
    num_key_value_heads: Number | None = None
    head_dim: Number | None = None
    max_position_embeddings: Tokens | None = None
    original_max_position_embeddings: Tokens | None = None
    rms_norm_eps: Positive | None = None
    rope_theta: Positive | None = None
    rope_scaling: RopeFields | None = None
    rope_parameters: RopeFields | None = None
    partial_rotary_factor: Positive | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    hidden_act: str | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: dict[str, Any] | None = None


class CompleteFields(Fields, kw_only=True):
    """`Fields` without which there is no model."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Number
    num_attention_heads: Number
    max_position_embeddings: Tokens = 2048


_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "factors": ("factors",),
}
_ROPE_PER_FREQUENCY = ("short_factor", "long_factor", "factors")
_ROPE_OLD_NAMES = {"su": "longrope"}
_ROPE_SHARED = [name for name in RopeScaling.__struct_fields__ if name in RopeFields.__struct_fields__]


def parse_override(text: str | None) -> dict[str, Any]:
    """The object in `json_model_override_args`, its keys and types checked.

    Raises:
        ConfigError: not a JSON object, an unknown key (with the nearest known one), or a value of the wrong type.

    Example:
        >>> parse_override('{"max_position_embeddings": 4096}')
        {'max_position_embeddings': 4096}
        >>> parse_override('{"hiden_size": 64}')
        Traceback (most recent call last):
        sgl.errors.ConfigError: json_model_override_args: unknown key 'hiden_size' (did you mean 'hidden_size'?)
    """
    if text is None:
        return {}
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{OVERRIDE} is not JSON: {error}", hint='give an object such as {"rope_theta": 500000.0}', param=OVERRIDE
        ) from None
    if not isinstance(given, dict):
        raise ConfigError(
            f"{OVERRIDE} is a JSON {type(given).__name__}; expected an object",
            hint='give an object such as {"rope_theta": 500000.0}',
            param=OVERRIDE,
        )
    _known_keys(given, Fields, "")
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(given.get(name), dict):
            _known_keys(given[name], RopeFields, f"{name}.")
    try:
        msgspec.convert(given, Fields)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{OVERRIDE}: {_with_key(error)}", hint="give the key a value of that type and range", param=OVERRIDE
        ) from None
    return given


def _known_keys(given: Mapping[str, Any], kind: type[msgspec.Struct], prefix: str) -> None:
    for key in given:
        if key not in kind.__struct_fields__:
            near = difflib.get_close_matches(key, kind.__struct_fields__, n=1)
            raise ConfigError(
                f"{OVERRIDE}: unknown key {prefix + key!r}",
                hint=f"did you mean {near[0]!r}?" if near else f"known are {', '.join(kind.__struct_fields__)}",
                param=OVERRIDE,
            )


def config_from_folder(folder: Path, override: Mapping[str, Any]) -> ModelConfig:
    """The model of a checkpoint folder. Raises as `model_config`."""
    path = folder / "config.json"
    given = json_object(folder, "config.json")
    if not given:
        raise CorruptModel(f"{path} is missing or empty", hint="fetch the folder again")
    return model_config(given, path, override)


def toy_config(override: Mapping[str, Any]) -> ModelConfig:
    """The built-in model. Raises as `model_config`."""
    return model_config(TOY_FIELDS, Path("dummy"), override)


def model_config(checkpoint: Mapping[str, Any], path: Path, override: Mapping[str, Any]) -> ModelConfig:
    """Fields as `config.json` names them, the override's in place of the checkpoint's, checked as a whole.

    Args:
        path: for messages: where `checkpoint` was read.
        override: of `parse_override`.

    Raises:
        CorruptModel: a field is missing, of the wrong type, or does not fit the others.
        UnsupportedModel: an architecture or a feature that is not known here.
        ConfigError: the same, where the override says so.
    """
    refuse = _Refusal(path, override)
    merged = {**_plain_rope(checkpoint), **_plain_rope(override)}
    names = merged.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else "(none)"
    try:
        check_architecture(architecture)  # before its fields are asked for: other architectures have others
    except UnsupportedModel as error:
        raise refuse(error.message, "architectures", hint=error.hint, kind=UnsupportedModel) from None
    try:
        fields = msgspec.convert(merged, CompleteFields)
    except msgspec.ValidationError as error:
        raise refuse(f"a field is missing, or of the wrong type or range: {_with_key(error)}", _key(error)) from None
    heads, kv_heads = fields.num_attention_heads, fields.num_key_value_heads or fields.num_attention_heads
    head_dim = fields.head_dim or fields.hidden_size // heads
    _check_fit(heads, kv_heads, head_dim, refuse)
    _check_supported(fields, refuse)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        num_hidden_layers=fields.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.max_position_embeddings,
        rms_norm_eps=fields.rms_norm_eps or 1e-6,
        rope_theta=fields.rope_theta or 10000.0,
        rope_scaling=_scaling(fields, head_dim, refuse),
        tie_word_embeddings=bool(fields.tie_word_embeddings),
        attention_bias=bool(fields.attention_bias),
        mlp_bias=bool(fields.mlp_bias),
        hidden_act=fields.hidden_act or "silu",
        checkpoint_dtype=fields.dtype or fields.torch_dtype or "float32",
    )


class _Refusal:
    """Makes the error of a model that cannot be: whoever gave one of the keys concerned is to change it."""

    def __init__(self, path: Path, override: Mapping[str, Any]) -> None:
        self._path = path
        self._override = override

    def __call__(
        self, message: str, *keys: str, hint: str = "", kind: type[ModelError] = CorruptModel
    ) -> ModelError | ConfigError:
        mine = [key for key in keys if key in self._override]
        if mine:
            hint = hint or f"change or leave out {', '.join(mine)}"
            return ConfigError(f"{OVERRIDE}: {message}", hint=hint, param=OVERRIDE)
        if kind is UnsupportedModel:
            hint = hint or f"use another model, or override the field with {OVERRIDE}"
        return kind(f"{self._path}: {message}", hint=hint or "fetch the model again")


def _check_fit(heads: int, kv_heads: int, head_dim: int, refuse: _Refusal) -> None:
    """Numbers that contradict each other would only show as a puzzle in the middle of the model."""
    if heads % kv_heads:
        raise refuse(
            f"no possible model: {heads} num_attention_heads over {kv_heads} num_key_value_heads",
            "num_key_value_heads",
            "num_attention_heads",
        )
    if head_dim < 2 or head_dim % 2:
        raise refuse(
            f"no possible model: head_dim is {head_dim}, not an even number",
            "head_dim",
            "hidden_size",
            "num_attention_heads",
        )


def _check_supported(fields: Fields, refuse: _Refusal) -> None:
    if fields.quantization_config:
        raise refuse(
            "the weights are quantized (quantization_config), which is not supported in safetensors",
            "quantization_config",
            hint="use the model's unquantized weights, or a GGUF file",
            kind=UnsupportedModel,
        )
    for owner, partial in (
        ("partial_rotary_factor", fields.partial_rotary_factor),
        ("rope_scaling", fields.rope_scaling and fields.rope_scaling.partial_rotary_factor),
    ):
        if partial not in (None, 1.0):
            raise refuse(f"partial_rotary_factor is {partial}; expected 1", owner, kind=UnsupportedModel)


def _with_key(error: msgspec.ValidationError) -> str:
    """msgspec's message, its `$.name` path as the plain name."""
    return str(error).replace("`$.", "`")


def _key(error: msgspec.ValidationError) -> str:
    match = re.search(r"`\$\.(\w+)", str(error))
    return match.group(1) if match else ""


def _plain_rope(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields with the rotary base and scaling in one form: `rope_theta` and `rope_scaling`.

    So an override replaces one of them and leaves the other, whichever way either side is written.
    """
    plain = dict(given)
    both = plain.pop("rope_parameters", None)
    rope = both or plain.get("rope_scaling")
    if isinstance(rope, dict):
        plain["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
        if "rope_theta" in rope:
            plain["rope_theta"] = rope["rope_theta"]
    elif both is not None:
        plain["rope_scaling"] = both  # of the wrong type, which is reported under this name
    return plain


def _scaling(fields: CompleteFields, head_dim: int, refuse: _Refusal) -> RopeScaling | None:
    """The rotary embedding's scaling, its gaps filled."""
    given = fields.rope_scaling
    kind = "default" if given is None else given.rope_type or given.type or "default"
    kind = _ROPE_OLD_NAMES.get(kind, kind)
    if given is None or kind == "default":
        return None
    own = fields.max_position_embeddings
    original = fields.original_max_position_embeddings or given.original_max_position_embeddings
    if kind in ("yarn", "llama3", "longrope"):
        original = original or own
    if kind == "yarn" and given.factor is None and original is not None:
        given.factor = own / original
    if problem := _scaling_problem(kind, given, fields, head_dim):
        raise refuse(
            f"rope_scaling of type {kind!r} {problem}", "rope_scaling", "rope_parameters", kind=UnsupportedModel
        )
    values = {name: getattr(given, name) for name in _ROPE_SHARED}
    return RopeScaling(**{**values, "rope_type": kind, "original_max_position_embeddings": original})


def _scaling_problem(kind: str, given: RopeFields, fields: CompleteFields, head_dim: int) -> str:
    if kind not in _ROPE_NEEDS:
        return f"is not supported; supported are {', '.join(_ROPE_NEEDS)}"
    lacking = [name for name in _ROPE_NEEDS[kind] if not getattr(given, name)]
    if lacking:
        return f"lacks {', '.join(lacking)}"
    for name in _ROPE_PER_FREQUENCY:
        if (length := len(getattr(given, name))) not in (0, head_dim // 2):
            return f"has {length} numbers in {name}; heads of {head_dim} features need {head_dim // 2}"
    if kind == "llama3" and (given.high_freq_factor or 0) <= (given.low_freq_factor or 0):
        return "needs high_freq_factor above low_freq_factor"
    if kind == "dynamic" and head_dim < 4:
        return f"needs heads of at least 4 features, not {head_dim}"
    if kind == "yarn" and fields.rope_theta == 1.0:
        return "needs a rope_theta other than 1"
    return ""


# --- GGUF -----------------------------------------------------------------------------------------------------------

_GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM"}
_GGUF_DTYPES = {"F16": "float16", "BF16": "bfloat16"}
GGUF_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong to the rotary embedding's configuration, not to the weights."""


def config_from_gguf(file: GGUFFile, override: Mapping[str, Any]) -> ModelConfig:
    """The model of a GGUF file. Raises as `model_config`."""
    kind = str(file.metadata.get("general.architecture"))
    architecture = _GGUF_ARCHITECTURES.get(kind)
    if architecture is None:
        raise UnsupportedModel(
            f"{file.path} is of GGUF architecture {kind!r}", hint=f"supported are {', '.join(_GGUF_ARCHITECTURES)}"
        )
    if "blk.0.ffn_gate_inp.weight" in file.tensors:
        raise UnsupportedModel(
            f"{file.path} is a mixture of experts", hint="use the model's safetensors folder, if that is supported"
        )
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise CorruptModel(f"{file.path} lacks tensor token_embd.weight", hint="fetch the file again")

    def value(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{kind}.{key}", default)

    hidden, heads = value("embedding_length"), value("attention.head_count")
    head_dim = value("attention.key_length")
    if head_dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        head_dim = hidden // heads
    if value("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(
            f"{file.path} rotates {value('rope.dimension_count')} of {head_dim} features of a head",
            hint="use a file whose rope.dimension_count is the size of a head",
        )
    types = {info.type_name for info in file.tensors.values() if len(info.shape) > 1}
    fields = {
        "architectures": [architecture],
        "vocab_size": table.shape[0],
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": value("rope.freq_base", 10000.0),
        "rope_scaling": _gguf_scaling(file, kind),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "dtype": _GGUF_DTYPES.get(types.pop(), "float32") if len(types) == 1 else "float32",
    }
    return model_config(fields, file.path, override)


def _gguf_scaling(file: GGUFFile, kind: str) -> dict[str, Any] | None:
    """`rope.scaling.*` and the factor tensors of a GGUF file, in Hugging Face's names."""

    def value(key: str) -> Any:
        return file.metadata.get(f"{kind}.rope.{key}")

    found = [file.tensors[name] for name in GGUF_ROPE_TENSORS if name in file.tensors]
    for info in found:
        if len(info.shape) != 1 or info.shape[0] > _MAX_FACTORS:  # before it is read: a file may claim anything
            raise CorruptModel(
                f"tensor {info.name} of {file.path} has shape {info.shape}; expected one number per frequency",
                hint="fetch the file again",
            )
    tensors = {info.name: tuple(file.load(info.name).tolist()) for info in found}
    linear = value("scale_linear")  # how old files say it
    rope_type = value("scaling.type") or ("linear" if linear not in (None, 1.0) else "none")
    scaling = {
        "rope_type": rope_type,
        "factor": value("scaling.factor") or linear,
        "original_max_position_embeddings": value("scaling.original_context_length"),
        "beta_fast": value("scaling.yarn_beta_fast"),
        "beta_slow": value("scaling.yarn_beta_slow"),
    }
    if "rope_factors_long.weight" in tensors:
        return {
            **scaling,
            "rope_type": "longrope",
            "long_factor": tensors["rope_factors_long.weight"],
            "short_factor": tensors.get("rope_factors_short.weight", ()),
            "attention_factor": value("scaling.attn_factor"),
        }
    if "rope_freqs.weight" in tensors:
        if rope_type not in ("none", "linear"):
            raise UnsupportedModel(
                f"{file.path} has both rope_freqs.weight and rope scaling {rope_type!r}",
                hint="convert the model again without one of them",
            )
        return {"rope_type": "factors", "factor": scaling["factor"], "factors": tensors["rope_freqs.weight"]}
    return None if rope_type == "none" else scaling
