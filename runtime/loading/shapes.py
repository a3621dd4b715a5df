"""What a checkpoint says about its model, as one `ModelConfig`: the fields of `config.json`, or of another form in its
names, checked as a whole.

Owns what is common to all architectures, and `json_model_override_args`, which replaces some fields whatever the
checkpoint's form; what only one architecture has is read by its entry in `models/architectures.py`. Called by
`checkpoint` and `gguf_config`. No torch here; nothing in a config is executed.

A value that is impossible is a `CorruptModel` where the checkpoint says it, and a `ConfigError` naming the key where
the override does.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sgl.errors import ConfigError, CorruptModel, ModelError, UnsupportedModel
from sgl.runtime.loading.fields import TOY_FIELDS, CompleteFields, Fields, RopeFields
from sgl.runtime.loading.folder import json_object
from sgl.runtime.loading.quantized import WeightScheme, read_scheme
from sgl.runtime.models.registry import Architecture, ModelConfig, RopeScaling, architectures, find_architecture

OVERRIDE = "json_model_override_args"

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
    own = {key for architecture in architectures().values() for key in architecture.own}
    _known_keys({key: value for key, value in given.items() if key not in own}, Fields, "")
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
    return model_config(fields_of_folder(folder), folder / "config.json", override)


def fields_of_folder(folder: Path) -> dict[str, Any]:
    """The `config.json` of a checkpoint folder as it stands there.

    Raises:
        CorruptModel: it is missing, empty or no JSON object.
    """
    given = json_object(folder, "config.json")
    if not given:
        raise CorruptModel(f"{folder / 'config.json'} is missing or empty", hint="fetch the folder again")
    return given


def architecture_name(fields: Mapping[str, Any]) -> str:
    """The first name in `architectures`, of whatever type the rest is."""
    names = fields.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "(none)"


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
    try:  # before its fields are asked for: other architectures have others
        architecture = find_architecture(architecture_name(merged))
    except UnsupportedModel as error:
        raise refuse(error.message, "architectures", hint=error.hint, kind=UnsupportedModel) from None
    if architecture.kind != "decoder":
        raise refuse(f"{architecture.name} is an encoder: it generates nothing", "architectures", kind=UnsupportedModel)
    inner = checkpoint.get(architecture.text_config)
    of_checkpoint = {**checkpoint, **(inner if isinstance(inner, dict) else {})}
    merged = {**architecture.defaults, **_plain_rope(of_checkpoint), **_plain_rope(override)}
    # The default stands for a key that is not there, and for null.
    given = {key: merged.get(key) for key in architecture.own}
    merged["own"] = {**architecture.own, **{key: value for key, value in given.items() if value is not None}}
    try:
        fields = msgspec.convert(merged, CompleteFields)
    except msgspec.ValidationError as error:
        raise refuse(f"a field is missing, or of the wrong type or range: {_with_key(error)}", _key(error)) from None
    values = {**_plain_values(fields, refuse), **_own_values(architecture, fields, refuse)}
    return ModelConfig(architecture=architecture.name, **values)


def _plain_values(fields: CompleteFields, refuse: _Refusal) -> dict[str, Any]:
    """What all decoders say alike."""
    heads, kv_heads = fields.num_attention_heads, fields.num_key_value_heads or fields.num_attention_heads
    head_dim = fields.head_dim or fields.hidden_size // heads
    rotary_dim = _rotary_dim(fields, head_dim)
    _check_fit(heads, kv_heads, head_dim, rotary_dim, refuse)
    return {
        "vocab_size": fields.vocab_size,
        "hidden_size": fields.hidden_size,
        "intermediate_size": fields.intermediate_size,
        "num_hidden_layers": fields.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": fields.max_position_embeddings,
        "rms_norm_eps": fields.rms_norm_eps or 1e-6,
        "rope_theta": fields.rope_theta or 10000.0,
        "rope_scaling": _scaling(fields, rotary_dim, refuse),
        "rotary_dim": 0 if rotary_dim == head_dim else rotary_dim,
        "tie_word_embeddings": bool(fields.tie_word_embeddings),
        "attention_bias": bool(fields.attention_bias),
        "mlp_bias": bool(fields.mlp_bias),
        "hidden_act": fields.hidden_act or "silu",
        "own": fields.own,
        "weight_scheme": _weight_scheme(fields, refuse),
        "checkpoint_dtype": fields.dtype or fields.torch_dtype or "float32",
    }


_OWN_KEYS = (
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("layer_types", "no_rope_layers", "num_hidden_layers", "use_bidirectional_attention", "architectures"),
)
"""Fields that an architecture's own reading may refuse."""


def _own_values(architecture: Architecture, fields: CompleteFields, refuse: _Refusal) -> dict[str, Any]:
    """What this architecture says by itself."""
    if architecture.read is None:
        return {}
    try:
        return architecture.read(fields)
    except UnsupportedModel as error:
        raise refuse(error.message, *_OWN_KEYS, hint=error.hint, kind=UnsupportedModel) from None


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


def _rotary_dim(fields: CompleteFields, head_dim: int) -> int:
    """Features of a head that are rotated."""
    share = fields.partial_rotary_factor or (fields.rope_scaling and fields.rope_scaling.partial_rotary_factor)
    return int(head_dim * (share or 1.0) + 1e-6)


def _check_fit(heads: int, kv_heads: int, head_dim: int, rotary_dim: int, refuse: _Refusal) -> None:
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
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise refuse(
            f"no possible model: {rotary_dim} of {head_dim} features of a head are rotated, not an even number of them",
            "partial_rotary_factor",
            "rope_scaling",
            "rope_parameters",
        )


def _weight_scheme(fields: Fields, refuse: _Refusal) -> WeightScheme | None:
    if not fields.quantization_config:
        return None
    try:
        return read_scheme(fields.quantization_config)
    except UnsupportedModel as error:
        raise refuse(error.message, "quantization_config", hint=error.hint, kind=UnsupportedModel) from None


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
    if isinstance(both, dict) and "full_attention" in both:  # a table for each type of layer
        local = both.get("sliding_attention")
        if isinstance(local, dict) and "rope_theta" in local:
            plain["rope_local_base_freq"] = local["rope_theta"]
        both = both["full_attention"]
    rope = both or plain.get("rope_scaling")
    if isinstance(rope, dict):
        plain["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
        if "rope_theta" in rope:
            plain["rope_theta"] = rope["rope_theta"]
    elif both is not None:
        plain["rope_scaling"] = both  # of the wrong type, which is reported under this name
    return plain


def _scaling(fields: CompleteFields, rotary_dim: int, refuse: _Refusal) -> RopeScaling | None:
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
    if problem := _scaling_problem(kind, given, fields, rotary_dim):
        raise refuse(
            f"rope_scaling of type {kind!r} {problem}", "rope_scaling", "rope_parameters", kind=UnsupportedModel
        )
    values = {name: getattr(given, name) for name in _ROPE_SHARED}
    return RopeScaling(**{**values, "rope_type": kind, "original_max_position_embeddings": original})


def _scaling_problem(kind: str, given: RopeFields, fields: CompleteFields, rotary_dim: int) -> str:
    if kind not in _ROPE_NEEDS:
        return f"is not supported; supported are {', '.join(_ROPE_NEEDS)}"
    lacking = [name for name in _ROPE_NEEDS[kind] if not getattr(given, name)]
    if lacking:
        return f"lacks {', '.join(lacking)}"
    for name in _ROPE_PER_FREQUENCY:
        if (length := len(getattr(given, name))) not in (0, rotary_dim // 2):
            return f"has {length} numbers in {name}; heads of {rotary_dim} features need {rotary_dim // 2}"
    if kind == "llama3" and (given.high_freq_factor or 0) <= (given.low_freq_factor or 0):
        return "needs high_freq_factor above low_freq_factor"
    if kind == "dynamic" and rotary_dim < 4:
        return f"needs heads of at least 4 features, not {rotary_dim}"
    if kind == "yarn" and fields.rope_theta == 1.0:
        return "needs a rope_theta other than 1"
    return ""
