"""One view of a checkpoint, whatever its form: shape, what the tokenizer needs, and the model with its weights.

Owns the building of a model from what `shapes`, `names` and `tensors` say of its checkpoint. Called by the worker at
start (and by `sgl doctor`, for the shape only). Importing it imports no torch.

A model is only returned complete: every parameter filled exactly once, with its own shape; otherwise `CorruptModel`
names the tensors concerned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sgl.errors import CorruptModel, UnsupportedModel
from sgl.runtime.config import Facts, ModelImpl
from sgl.runtime.loading.facts import gather_facts
from sgl.runtime.loading.folder import model_file
from sgl.runtime.loading.gguf_config import config_from_gguf
from sgl.runtime.loading.gguf_reader import GGUFFile
from sgl.runtime.loading.names import Place, Shape, WeightNames
from sgl.runtime.loading.shapes import (
    architecture_name,
    config_from_folder,
    fields_of_folder,
    parse_override,
    toy_config,
)
from sgl.runtime.loading.sources import ModelSource
from sgl.runtime.loading.tensors import dummy_tensors, gguf_tensors, kept_bytes, safetensors_tensors
from sgl.runtime.loading.tokenizer_cache import gguf_tokenizer
from sgl.runtime.models.registry import ModelConfig, architectures, find_architecture, model_class, parameter_sizes
from sgl.runtime.numerics import Kernels, Quantization
from sgl.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from sgl.runtime.loading.placing import Blocks, Placing

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
        """The tokenizer in the GGUF file or beside the weights; bytes for the built-in shape, and for a folder of which
        nothing but a shape is wanted.

        Raises:
            UnsupportedModel, CorruptModel: as `Tokenizer.from_gguf` and `Tokenizer.from_folder`.
        """
        if self._gguf is not None:
            return gguf_tokenizer(self._gguf)
        if self.folder is None:
            return Tokenizer.toy(vocab_size=self.config.vocab_size)
        return folder_tokenizer(self.source, self.folder)

    def facts(self) -> Facts:
        """Machine and model, for `resolution.resolve`. The model is made for it, without weights, and counted."""
        packed = 0 if self._gguf is None else sum(kept_bytes(info) for info in self._gguf.tensors.values())
        return gather_facts(
            self.config, parameter_sizes(self.config), weights_kind=self.source.kind, packed_bytes=packed
        )

    def check(self, *, deterministic: bool, context_len: int | None) -> None:
        """What `build_model` would refuse for what an engine resolved, before weights are read.

        Raises:
            UnsupportedModel: the reason.
        """

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

        from sgl.runtime.loading.placing import NativePlacing, TorchPlacing

        torch_dtype: torch.dtype = getattr(torch, dtype)
        placing: Placing
        if kernels == "native":
            placing, activations = NativePlacing(torch_dtype, quantization), torch.float32
        else:
            # Tensors of a folder lie in a mapped file, which may be changed or cut while the model lives.
            placing, activations = TorchPlacing(device, copy=self.folder is not None), torch_dtype
        model: torch.nn.Module = model_class(self.config.architecture)(
            msgspec.structs.replace(self.config, context_len=context_len),
            dtype=activations,
            device=torch.device(device),
            deterministic=deterministic,
            kernels=kernels,
        )
        self._fill(model, placing, keep_blocks=quantization == "gguf")
        placing.finish(model)
        return model.eval()

    def _fill(self, model: torch.nn.Module, placing: Placing, *, keep_blocks: bool) -> None:
        """Give every parameter its value, exactly once."""
        from sgl.runtime.loading.placing import added, rows_of

        shapes: dict[str, Shape] = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        names = WeightNames(find_architecture(self.config.architecture), self.config, shapes)
        ledger = _Ledger(self.source.name, shapes)
        from_gguf = self._gguf is not None
        tensors, find = self._tensors(shapes, names, keep_blocks=keep_blocks)
        for name, tensor in tensors:
            places = find(name)
            # A tied head may be stored beside the table it repeats.
            is_repeated = name.endswith("lm_head.weight") and self.config.tie_word_embeddings
            if not places and not is_repeated and not names.is_ignored(name):
                ledger.unexpected(name)
            for place in places:
                if not ledger.take(place, name, tuple(tensor.shape), of_rows=places[-1].rows):
                    continue
                part = tensor if place.rows is None else rows_of(tensor, slice(*place.rows))
                if self.source.kind != "dummy":
                    if (order := names.row_order(place.parameter, from_gguf=from_gguf)) is not None:
                        part = rows_of(part, order)
                    if offset := names.norm_offset(place.parameter, from_gguf=from_gguf):
                        part = added(part, offset)
                owner, _, leaf = place.parameter.rpartition(".")
                placing.place(model.get_submodule(owner), leaf, part, place.expert)
        ledger.check()

    def _tensors(
        self, shapes: Mapping[str, Shape], names: WeightNames, *, keep_blocks: bool
    ) -> tuple[Iterator[tuple[str, torch.Tensor | Blocks]], Callable[[str], list[Place]]]:
        """The checkpoint's tensors, and what says where one goes by its name."""
        if self.source.kind == "dummy":
            return dummy_tensors(dict(shapes)), lambda name: [Place(name)]
        if self._gguf is not None:
            places = names.of_gguf()
            return gguf_tensors(self._gguf, places, keep_blocks=keep_blocks), lambda name: places.get(name, [])
        if self.folder is None:
            raise UnsupportedModel(f"{self.source.name} has no weights", hint="set load_format to dummy")
        return safetensors_tensors(self.folder, self.config.weight_scheme), names.of_checkpoint


class _Ledger:
    """Which parts of which parameters still lack their value; a parameter of experts has one part for each."""

    def __init__(self, model: str, shapes: Mapping[str, Shape]) -> None:
        self._model = model
        self._shapes = shapes
        self._missing: dict[str, set[int | None]] = {name: {None} for name in shapes}
        self._unexpected: set[str] = set()

    def unexpected(self, name: str) -> None:
        """A tensor that the model has no place for."""
        self._unexpected.add(name)

    def take(self, place: Place, name: str, shape: Shape, of_rows: tuple[int, int] | None) -> bool:
        """Whether the tensor called `name` has what lacks at `place`, which no longer lacks from now on.

        Args:
            of_rows: the last rows of the tensor that belong somewhere, where it is cut into several parts.

        Raises:
            CorruptModel: the tensor is of another shape.
        """
        if not self._lacks(place):
            self.unexpected(name)
            return False
        expected = self._shapes[place.parameter][0 if place.expert is None else 1 :]
        if of_rows is not None:
            expected = (of_rows[1], *expected[1:])
        if shape != expected:
            raise CorruptModel(
                f"tensor {name} of {self._model} has shape {shape}; its config says {expected}",
                hint="config and weights belong to different models, or the file is damaged: fetch it again",
            )
        missing = self._missing[place.parameter]
        missing.discard(place.expert)
        if not missing:
            del self._missing[place.parameter]
        return True

    def _lacks(self, place: Place) -> bool:
        missing = self._missing.get(place.parameter, set())
        count = self._shapes[place.parameter][0]
        if missing == {None} and place.expert is not None and place.expert < count:
            missing = self._missing[place.parameter] = set(range(count))  # they come one by one
        return place.expert in missing

    def check(self) -> None:
        """All is there, and nothing else.

        Raises:
            CorruptModel: with the names of some tensors.
        """
        for what, names in (("lacks", sorted(self._missing)), ("has unexpected", sorted(self._unexpected))):
            if names:
                listed = ", ".join(names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")
                raise CorruptModel(
                    f"{self._model} {what} {len(names)} tensors: {listed}",
                    hint="config and weights belong to different models, or the file is damaged: fetch it again",
                )


def open_checkpoint(source: ModelSource, override: str | None = None, model_impl: ModelImpl = "auto") -> Checkpoint:
    """Read the shape of the model at `source`; weights are read by `Checkpoint.build_model`.

    Args:
        override: `json_model_override_args`, JSON text.
        model_impl: whose layers compute it; `auto` takes transformers' for a folder of an architecture not known here.

    Raises:
        CorruptModel: a file is damaged or lacks a field.
        UnsupportedModel: an architecture that is known nowhere, or not to who is to compute it; an encoder
            (`encoder_checkpoint` opens these).
        ConfigError: an override of an unknown key, or to what cannot be.
    """
    changes, path = parse_override(override), source.path
    if path is not None and path.is_dir():
        return _open_folder(source, path, changes, model_impl)
    if model_impl == "transformers":
        raise UnsupportedModel(
            f"model_impl is transformers, which {source.name} has nothing for: it is no folder with config.json",
            hint="leave model_impl at auto, or name a folder",
        )
    if path is None:
        return Checkpoint(source, toy_config(changes))
    gguf = GGUFFile(path)
    return Checkpoint(source, config_from_gguf(gguf, changes), gguf=gguf)


def _open_folder(source: ModelSource, folder: Path, changes: Mapping[str, Any], model_impl: ModelImpl) -> Checkpoint:
    fields = {**fields_of_folder(folder), **changes}
    name = architecture_name(fields)
    known = architectures().get(name)
    is_decoder = known is None or known.kind == "decoder"
    if is_decoder and (model_impl == "transformers" or (model_impl == "auto" and known is None)):
        from sgl.runtime.loading.transformers_checkpoint import TransformersCheckpoint

        return TransformersCheckpoint(source, folder, fields)
    return Checkpoint(source, config_from_folder(folder, changes), folder=folder)


def open_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer of the model at `source` alone, whoever computes the model; imports no torch.

    Raises:
        UnsupportedModel, CorruptModel: as `Checkpoint.tokenizer`.
    """
    if source.path is None or not source.path.is_dir():
        return open_checkpoint(source).tokenizer()
    return folder_tokenizer(source, source.path)


def folder_tokenizer(source: ModelSource, folder: Path) -> Tokenizer:
    """Of a checkpoint folder; bytes where nothing but the folder's shape is wanted."""
    if source.kind == "dummy" and model_file(folder, "tokenizer.json") is None:
        return Tokenizer.toy()
    return Tokenizer.from_folder(folder)
