"""One view of a checkpoint, whatever its form: shape, what the tokenizer needs, and the model with its weights.

Owns the translation of `config.json` and GGUF metadata into `ModelConfig`, of tensor names into Hugging Face's, and
the streaming of weights: a few tensors at a time, so that the peak is the model plus its largest tensors in float32.
Called by the worker at start (and by `sgl doctor`, for the shape only). Importing it imports no torch.

A model is only returned complete: every parameter filled exactly once, with its own shape; otherwise `CorruptModel`
names the tensors concerned.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sgl.errors import CorruptModel, UnsupportedModel
from sgl.kernels.native.types import TYPES, packed_bytes
from sgl.runtime.config import Facts
from sgl.runtime.loading.facts import gather_facts
from sgl.runtime.loading.folder import json_object, model_file
from sgl.runtime.loading.gguf_reader import GGUFFile, TensorInfo
from sgl.runtime.loading.shapes import (
    GGUF_ROPE_TENSORS,
    config_from_folder,
    config_from_gguf,
    parse_override,
    toy_config,
)
from sgl.runtime.loading.sources import ModelSource
from sgl.runtime.loading.tokenizer_cache import gguf_tokenizer
from sgl.runtime.models.registry import ModelConfig, model_class
from sgl.runtime.numerics import Kernels, Quantization
from sgl.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from sgl.runtime.loading.placing import Blocks

_DUMMY_SEED = 20250101
_DUMMY_DRAWN = 2**24 - 3
"""Numbers drawn for one matrix at most; no multiple of a row's length, so that rows differ."""
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
_INDEX = "model.safetensors.index.json"
_WEIGHT_DTYPES = ("torch.bfloat16", "torch.float16", "torch.float32", "torch.float64")
"""Types of numbers that mean what they say; an integer or an 8-bit float would need scales that are not there."""
_DECODE_THREADS = 2
_MAX_NAMED = 5
"""Tensors named in one error message."""


class Checkpoint:
    """A model that can be built.

    Attributes:
        source: where it was found.
        config: its shape.
        gguf_metadata: metadata of a GGUF file; else `None`.
        folder: the checkpoint folder; else `None`. The toy model has neither.
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
    def gguf_metadata(self) -> Mapping[str, Any] | None:
        """Metadata of the GGUF file, if it is one."""
        return None if self._gguf is None else self._gguf.metadata

    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the GGUF file or beside the weights; bytes for the built-in shape.

        Raises:
            UnsupportedModel, CorruptModel: as `Tokenizer.from_gguf` and `Tokenizer.from_folder`.
        """
        if self._gguf is not None:
            return gguf_tokenizer(self._gguf)
        return Tokenizer.toy() if self.folder is None else Tokenizer.from_folder(self.folder)

    def facts(self) -> Facts:
        """Machine and model, for `runtime.config.resolve`."""
        packed = 0 if self._gguf is None else sum(_packed_bytes(info) for info in self._gguf.tensors.values())
        return gather_facts(self.config, weights_kind=self.source.kind, packed_bytes=packed)

    def build_model(
        self,
        dtype: str = "float32",
        device: str = "cpu",
        *,
        deterministic: bool = False,
        context_len: int | None = None,
        kernels: Kernels = "torch",
        quantization: Quantization = "none",
    ) -> torch.nn.Module:
        """The model with its weights in `dtype` on `device`, ready for `ModelRunner`.

        Args:
            kernels, quantization: `native` packs the weights for the native kernels, which must be loaded.
            context_len: what the engine resolved; two kinds of rope scaling are decided on it (`models/rope.py`).

        Raises:
            UnsupportedModel: unknown architecture, or a feature of the config that is not implemented.
            CorruptModel: tensors are missing, unexpected, of another shape, or unreadable.
        """
        import torch

        from sgl.runtime.loading.placing import NativePlacing, Placing, TorchPlacing

        torch_dtype: torch.dtype = getattr(torch, dtype)
        placing: Placing
        if kernels == "native":
            placing, activations = NativePlacing(torch_dtype, quantization), torch.float32
        else:
            # Tensors of a folder lie in a mapped file, which may be changed or cut while the model lives.
            placing, activations = TorchPlacing(torch_dtype, device, copy=self.folder is not None), torch_dtype
        model: torch.nn.Module = model_class(self.config.architecture)(
            msgspec.structs.replace(self.config, context_len=context_len),
            dtype=activations,
            device=torch.device(device),
            deterministic=deterministic,
            kernels=kernels,
        )
        expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        missing = dict(expected)
        unexpected: list[str] = []
        for name, tensor in self._tensors(expected, keep_blocks=quantization == "gguf"):
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
            placing.place(model.get_submodule(owner), leaf, tensor)
        for what, names in (("lacks", sorted(missing)), ("has unexpected", sorted(unexpected))):
            if names:
                listed = ", ".join(names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")
                raise CorruptModel(
                    f"{self.source.name} {what} {len(names)} tensors: {listed}",
                    hint="config and weights belong to different models, or the file is damaged: fetch it again",
                )
        placing.finish(model)
        return model.eval()

    def _tensors(
        self, expected: dict[str, tuple[int, ...]], *, keep_blocks: bool
    ) -> Iterator[tuple[str, torch.Tensor | Blocks]]:
        if self.source.kind == "dummy":
            return _dummy_tensors(expected)
        if self._gguf is not None:
            return _gguf_tensors(self._gguf, self.config, keep_blocks=keep_blocks)
        if self.folder is None:
            raise UnsupportedModel(f"{self.source.name} has no weights", hint="set load_format to dummy")
        return _safetensors(self.folder)


def open_checkpoint(source: ModelSource, override: str | None = None) -> Checkpoint:
    """Read the shape of the model at `source`; weights are read by `Checkpoint.build_model`.

    Args:
        override: `json_model_override_args`, JSON text.

    Raises:
        CorruptModel: a file is damaged or lacks a field.
        UnsupportedModel: an architecture that is not known here.
        ConfigError: an override of an unknown key, or to what cannot be.
    """
    changes, path = parse_override(override), source.path
    if path is None:
        return Checkpoint(source, toy_config(changes))
    if path.is_dir():
        return Checkpoint(source, config_from_folder(path, changes), folder=path)
    gguf = GGUFFile(path)
    return Checkpoint(source, config_from_gguf(gguf, changes), gguf=gguf)


def _dummy_tensors(expected: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Random weights, the same on every machine and in every run: norms of ones, matrices of unit gain. A large matrix
    repeats its first numbers: a model of billions would take minutes to draw."""
    import torch

    generator = torch.Generator().manual_seed(_DUMMY_SEED)
    for name, shape in sorted(expected.items()):
        if len(shape) == 1:
            yield name, torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)
            continue
        size = math.prod(shape)
        drawn = torch.randn(min(size, _DUMMY_DRAWN), generator=generator) * shape[-1] ** -0.5
        yield name, drawn.repeat(-(-size // len(drawn)))[:size].view(shape)


def _gguf_tensors(
    file: GGUFFile, config: ModelConfig, *, keep_blocks: bool
) -> Iterator[tuple[str, torch.Tensor | Blocks]]:
    import torch

    from sgl.runtime.loading.placing import Blocks

    file.read_ahead()
    names = [name for name in file.tensors if name not in GGUF_ROPE_TENSORS]
    kept = [name for name in names if keep_blocks and _can_be_kept(file.tensors[name])]
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    decoded = _decoded(file, [name for name in names if name not in set(kept)])
    for name, values in chain(((name, file.rows(name)) for name in kept), decoded):
        stem, _, leaf = name.rpartition(".")
        prefix = ""
        if stem.startswith("blk.") and stem.count(".") > 1:
            _, layer, stem = stem.split(".", 2)
            prefix = f"model.layers.{layer}."
        if stem in heads:
            values = _halves_layout(values, heads[stem])
        info = file.tensors[name]
        tensor = Blocks(values, info.type_name, info.shape) if name in kept else torch.from_numpy(values)
        yield f"{prefix}{_GGUF_NAMES.get(stem, stem)}.{leaf}", tensor


def _can_be_kept(info: TensorInfo) -> bool:
    """Whether the native kernels multiply a tensor as the file has it: a matrix of a type that they know."""
    return len(info.shape) == 2 and info.type_name in TYPES


def _packed_bytes(info: TensorInfo) -> int:
    """What a tensor of a GGUF file takes for the native kernels; what they do not know becomes bfloat16."""
    if len(info.shape) != 2:
        return 4 * math.prod(info.shape)
    return packed_bytes(info.type_name if _can_be_kept(info) else "BF16", *info.shape)


def _decoded(file: GGUFFile, names: list[str]) -> Iterator[tuple[str, Any]]:
    """Tensors in order, decoded by a few threads ahead of their use: numpy works without the interpreter's lock, and
    half of the time is the system's, handing out memory. What is decoded and not yet taken is never more than the
    largest tensor, as the memory plan says."""
    sizes = {name: math.prod(file.tensors[name].shape) for name in names}
    room = max(sizes.values(), default=0)
    with ThreadPoolExecutor(_DECODE_THREADS, thread_name_prefix="sgl-decode") as pool:
        waiting = deque(names)
        ahead: deque[tuple[str, Future[Any]]] = deque()
        held = 0
        while waiting or ahead:
            while waiting and (not held or held + sizes[waiting[0]] <= room):
                held += sizes[waiting[0]]
                ahead.append((waiting[0], pool.submit(file.load, waiting.popleft())))
            name, values = ahead.popleft()
            yield name, values.result()
            held -= sizes[name]


def _halves_layout(values: Any, num_heads: int) -> Any:
    """GGUF files of Llama pair neighbouring rows of each head (0, D/2, 1, D/2 + 1, ...); the rotary op wants halves."""
    rows = values.shape[0]
    if rows % (2 * num_heads):
        return values  # of the wrong shape, which `build_model` reports
    return values.reshape(num_heads, rows // num_heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)


def _safetensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a folder, mapped: nobody may keep one without copying it."""
    from safetensors import SafetensorError, safe_open

    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    if name.endswith(".rotary_emb.inv_freq"):  # written by old converters, computed here
                        continue
                    tensor = file.get_tensor(name)
                    if str(tensor.dtype) not in _WEIGHT_DTYPES:
                        raise UnsupportedModel(
                            f"tensor {name} of {path} is of type {tensor.dtype}",
                            hint="use weights of type bfloat16, float16 or float32, or a GGUF file",
                        )
                    yield name, tensor
        except (SafetensorError, OSError) as error:
            raise CorruptModel(f"{path} cannot be read: {error}", hint="fetch the file again") from None


def _weight_files(folder: Path) -> list[Path]:
    """Files of the index, else `model.safetensors`, else all there are; each is one of the folder's own."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if model_file(folder, _INDEX) is not None:
        weight_map = json_object(folder, _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CorruptModel(f"{folder / _INDEX} has no weight_map", hint="fetch the file again")
        for name in weight_map.values():
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise CorruptModel(
                    f"{folder / _INDEX} names the file {name!r}", hint="shards lie beside their index, as *.safetensors"
                )
        names = sorted(set(weight_map.values()))
    elif "model.safetensors" in names:
        names = ["model.safetensors"]
    files = []
    for name in names:
        path = model_file(folder, name)
        if path is None:
            raise CorruptModel(f"{folder / name} is missing, and {_INDEX} names it", hint="fetch the folder again")
        files.append(path)
    return files
