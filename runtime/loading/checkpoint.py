"""One view of a checkpoint, whatever its form: shape, what the tokenizer needs, and the model with its weights.

Owns the translation of `config.json` and GGUF metadata into `ModelConfig`, of tensor names into Hugging Face's, and
the streaming of weights: one tensor at a time, so that the peak is the model plus its largest tensor in float32.
Called by the worker at start (and by `sgl doctor`, for the shape only). Importing it imports no torch.

A model is only returned complete: every parameter filled exactly once, with its own shape; otherwise `CorruptModel`
names the tensors concerned.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgl.errors import CorruptModel, UnsupportedModel
from sgl.runtime.config import Facts
from sgl.runtime.loading.facts import gather_facts
from sgl.runtime.loading.gguf_reader import GGUFFile
from sgl.runtime.loading.sources import ModelSource
from sgl.runtime.models.registry import ModelConfig, model_class

if TYPE_CHECKING:
    import torch

TOY_CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)
"""Shape of the built-in `dummy` model; its vocabulary is the tokenizer's `Tokenizer.toy()`."""

_DUMMY_SEED = 20250101
_GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM"}
_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MAX_NAMED = 5
"""Tensors named in one error message."""


class Checkpoint:
    """A model that can be built.

    Attributes:
        source: where it was found.
        config: its shape.
        gguf_metadata: metadata of a GGUF file, for `Tokenizer.from_gguf`; else `None`.
        folder: the checkpoint folder, for `Tokenizer.from_folder`; else `None`. The toy model has neither.
    """

    def __init__(
        self,
        source: ModelSource,
        config: ModelConfig,
        *,
        gguf: GGUFFile | None = None,
        folder: Path | None = None,
    ) -> None:
        self.source = source
        self.config = config
        self.folder = folder
        self._gguf = gguf

    @property
    def gguf_metadata(self) -> dict[str, Any] | None:
        """Metadata of the GGUF file, if it is one."""
        return None if self._gguf is None else self._gguf.metadata

    def facts(self) -> Facts:
        """Machine and model, for `runtime.config.resolve`."""
        return gather_facts(self.config)

    def build_model(
        self, dtype: str = "float32", device: str = "cpu", *, deterministic: bool = False
    ) -> torch.nn.Module:
        """The model with its weights in `dtype` on `device`, ready for `ModelRunner`.

        Raises:
            UnsupportedModel: unknown architecture, or a feature of the config that is not implemented.
            CorruptModel: tensors are missing, unexpected, of another shape, or unreadable.
        """
        import torch

        torch_dtype: torch.dtype = getattr(torch, dtype)
        model: torch.nn.Module = model_class(self.config.architecture)(
            self.config, dtype=torch_dtype, device=torch.device(device), deterministic=deterministic
        )
        expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        missing = dict(expected)
        unexpected: list[str] = []
        for name, tensor in self._tensors(expected):
            if name not in missing:
                # A tied head may be stored beside the table it repeats.
                if not (name == "lm_head.weight" and self.config.tie_word_embeddings):
                    unexpected.append(name)
                continue
            shape = missing.pop(name)
            if tuple(tensor.shape) != shape:
                raise CorruptModel(
                    f"tensor {name} of {self.source.name} has shape {tuple(tensor.shape)}; its config says {shape}",
                    hint="config and weights belong to different models, or the file is damaged: fetch it again",
                )
            owner, _, leaf = name.rpartition(".")
            value = tensor.to(dtype=torch_dtype, device=device).contiguous()
            model.get_submodule(owner).register_parameter(leaf, torch.nn.Parameter(value, requires_grad=False))
        for what, names in (("lacks", sorted(missing)), ("has unexpected", sorted(unexpected))):
            if names:
                listed = ", ".join(names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")
                raise CorruptModel(
                    f"{self.source.name} {what} {len(names)} tensors: {listed}",
                    hint="config and weights belong to different models, or the file is damaged: fetch it again",
                )
        return model.eval()

    def _tensors(self, expected: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
        if self.source.kind == "dummy":
            return _dummy_tensors(expected)
        if self._gguf is not None:
            return _gguf_tensors(self._gguf, self.config)
        if self.folder is None:
            raise UnsupportedModel(f"{self.source.name} has no weights", hint="set load_format to dummy")
        return _safetensors(self.folder)


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Read the shape of the model at `source`; weights are read by `Checkpoint.build_model`.

    Raises:
        CorruptModel: a file is damaged or lacks a field.
        UnsupportedModel: an architecture that is not known here.
    """
    path = source.path
    if path is None:
        return Checkpoint(source, TOY_CONFIG)
    if path.is_dir():
        return Checkpoint(source, _config_from_folder(path), folder=path)
    gguf = GGUFFile(path)
    return Checkpoint(source, _config_from_gguf(gguf), gguf=gguf)


def _config_from_gguf(file: GGUFFile) -> ModelConfig:
    fields = file.metadata
    kind = fields.get("general.architecture")
    architecture = _GGUF_ARCHITECTURES.get(str(kind))
    if architecture is None:
        raise UnsupportedModel(
            f"{file.path} is of GGUF architecture {kind!r}", hint=f"supported are {', '.join(_GGUF_ARCHITECTURES)}"
        )

    def number(key: str, default: Any = None) -> Any:
        value = fields.get(f"{kind}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CorruptModel(
                f"metadata field {kind}.{key} of {file.path} is {value!r}, not a positive number",
                hint="fetch the file again",
            )
        return value

    scaling = fields.get(f"{kind}.rope.scaling.type", "none")
    extras = [name for name in ("rope_freqs.weight", "blk.0.ffn_gate_inp.weight") if name in file.tensors]
    if extras or scaling not in ("none", "linear"):
        raise UnsupportedModel(
            f"{file.path} uses " + (f"tensor {extras[0]}" if extras else f"rope scaling {scaling!r}"),
            hint="use the model's safetensors folder, if that is supported",
        )
    if "token_embd.weight" not in file.tensors:
        raise CorruptModel(f"{file.path} lacks tensor token_embd.weight", hint="fetch the file again")
    heads, hidden = number("attention.head_count"), number("embedding_length")
    head_dim = number("attention.key_length", number("rope.dimension_count", hidden // heads))
    types = {info.type_name for info in file.tensors.values() if len(info.shape) > 1}
    return _checked(
        ModelConfig(
            architecture=architecture,
            vocab_size=file.tensors["token_embd.weight"].shape[0],
            hidden_size=hidden,
            intermediate_size=number("feed_forward_length"),
            num_hidden_layers=number("block_count"),
            num_attention_heads=heads,
            num_key_value_heads=number("attention.head_count_kv", heads),
            head_dim=head_dim,
            max_position_embeddings=number("context_length"),
            rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
            rope_theta=number("rope.freq_base", 10000.0),
            rope_scaling={"rope_type": "linear", "factor": number("rope.scaling.factor")}
            if scaling == "linear"
            else None,
            tie_word_embeddings="output.weight" not in file.tensors,
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            checkpoint_dtype={"F16": "float16", "BF16": "bfloat16"}.get(types.pop(), "float32")
            if len(types) == 1
            else "float32",
        ),
        file.path,
    )


def _config_from_folder(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptModel(f"{path} cannot be read: {error}", hint="fetch the folder again") from None
    if not isinstance(given, dict):
        raise CorruptModel(f"{path} is not a JSON object", hint="fetch the folder again")
    architectures = given.get("architectures") or ["(none)"]
    model_class(str(architectures[0]))  # before its fields are asked for: other architectures have others
    # transformers 5 writes base and scaling as one object, earlier versions as two fields.
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    try:
        heads = int(given["num_attention_heads"])
        hidden = int(given["hidden_size"])
        config = ModelConfig(
            architecture=str(architectures[0]),
            vocab_size=int(given["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(given["intermediate_size"]),
            num_hidden_layers=int(given["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(given.get("num_key_value_heads") or heads),
            head_dim=int(given.get("head_dim") or hidden // heads),
            max_position_embeddings=int(given.get("max_position_embeddings", 2048)),
            rms_norm_eps=float(given.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or given.get("rope_theta") or 10000.0),
            rope_scaling=rope or None,
            tie_word_embeddings=bool(given.get("tie_word_embeddings", False)),
            attention_bias=bool(given.get("attention_bias", False)),
            mlp_bias=bool(given.get("mlp_bias", False)),
            hidden_act=str(given.get("hidden_act", "silu")),
            checkpoint_dtype=str(given.get("dtype") or given.get("torch_dtype") or "float32"),
        )
    except KeyError as missing:
        raise CorruptModel(f"{path} lacks {missing}", hint="fetch the folder again") from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise CorruptModel(f"{path} has a field of the wrong type: {error}", hint="fetch the folder again") from None
    return _checked(config, path)


def _checked(config: ModelConfig, path: Path) -> ModelConfig:
    """Numbers that fit together; what is wrong here would only show as a puzzle in the middle of the model."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "head_dim")
    bad = [f"{name}={getattr(config, name)}" for name in sizes if getattr(config, name) < 1]
    if config.num_attention_heads < 1 or (not bad and config.num_attention_heads % config.num_key_value_heads):
        bad.append(f"num_attention_heads={config.num_attention_heads} over {config.num_key_value_heads}")
    if config.head_dim % 2:
        bad.append(f"head_dim={config.head_dim}")
    if bad:
        raise CorruptModel(f"{path} describes no possible model: {', '.join(bad)}", hint="fetch it again")
    return config


def _dummy_tensors(expected: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Random weights, the same on every machine and in every run: norms of ones, matrices of unit gain."""
    import torch

    generator = torch.Generator().manual_seed(_DUMMY_SEED)
    for name, shape in sorted(expected.items()):
        if len(shape) == 1:
            yield name, torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)
        else:
            yield name, torch.randn(shape, generator=generator) * shape[-1] ** -0.5


def _gguf_tensors(file: GGUFFile, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name in file.tensors:
        stem, _, leaf = name.rpartition(".")
        prefix = ""
        if stem.startswith("blk."):
            _, layer, stem = stem.split(".", 2)
            prefix = f"model.layers.{layer}."
        values = file.load(name)
        if stem in heads:
            values = _halves_layout(values, heads[stem])
        yield f"{prefix}{_GGUF_NAMES.get(stem, stem)}.{leaf}", torch.from_numpy(values)


def _halves_layout(values: Any, num_heads: int) -> Any:
    """GGUF files of Llama pair neighbouring rows of each head (0, D/2, 1, D/2 + 1, ...); the rotary op wants halves."""
    rows = values.shape[0]
    if rows % (2 * num_heads):
        return values  # of the wrong shape, which `build_model` reports
    return values.reshape(num_heads, rows // num_heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)


def _safetensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    if not name.endswith(".rotary_emb.inv_freq"):  # written by old converters, computed here
                        # A copy: the file is mapped, and may be changed or cut while the model lives.
                        yield name, file.get_tensor(name).clone()
        except (SafetensorError, OSError) as error:
            raise CorruptModel(f"{path} cannot be read: {error}", hint="fetch the file again") from None


def _weight_files(folder: Path) -> list[Path]:
    """Files of the index, else `model.safetensors`, else all there are."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptModel(f"{index} cannot be read: {error!r}", hint="fetch the file again") from None
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise CorruptModel(f"{index} names the file {name!r}", hint="shards lie beside their index")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
