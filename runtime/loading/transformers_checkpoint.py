"""Checkpoints of architectures that sgl has no layers for, as transformers reads them.

Owns the translation of a transformers configuration into a `ModelConfig`, and the loading of such a model. Used by
`checkpoint.open_checkpoint` for a folder whose architecture is not in the registry, or where `model_impl` says so. This
is the one place of the engine that imports transformers, at the first such checkpoint. No code of a repository is run:
configuration and class are those of the installed transformers, by name, and weights come through `tensors`, as those
of every other folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sgl.errors import CorruptModel, UnsupportedModel
from sgl.runtime.config import Facts
from sgl.runtime.loading.checkpoint import Checkpoint
from sgl.runtime.loading.facts import gather_facts
from sgl.runtime.loading.shapes import architecture_name
from sgl.runtime.loading.sources import ModelSource
from sgl.runtime.loading.tensors import safetensors_tensors
from sgl.runtime.models.registry import ModelConfig, nearest
from sgl.runtime.numerics import Kernels, Quantization

if TYPE_CHECKING:
    import torch

_DUMMY_SEED = 20250101
_NOT_PASSED = ("auto_map", "_attn_implementation", "attn_implementation", "_name_or_path", "quantization_config")
"""Keys of a config that would have transformers fetch or run something, or choose for us."""


class TransformersCheckpoint(Checkpoint):
    """A folder whose model is transformers' own; see `sgl.runtime.models.transformers_model`.

    Args:
        given: the config.json, with the override's fields in place of its own.

    Raises:
        UnsupportedModel: transformers is missing, has no such decoder, or its class cannot be computed over pages.
        CorruptModel: a configuration that transformers does not take.
    """

    def __init__(self, source: ModelSource, folder: Path, given: Mapping[str, Any]) -> None:
        self._class, self._theirs = _class_and_config(folder, given)
        super().__init__(source, _model_config(self._class.__name__, self._theirs), folder=folder)

    def facts(self) -> Facts:
        """See `Checkpoint.facts`; no kernels but torch's take part.

        Raises:
            UnsupportedModel: what shows of the model without weights and cannot be computed over pages.
        """
        from sgl.runtime.models.transformers_probe import check_shape

        model = self._empty().eval().bfloat16()  # products of experts have a shape without numbers in this dtype only
        sizes = [parameter.numel() for parameter in model.parameters()]
        check_shape(model, self.config)
        facts = gather_facts(self.config, sizes, weights_kind=self.source.kind)
        obstacle = f"{self.config.architecture} is computed by transformers' layers"
        return msgspec.structs.replace(facts, native="", native_obstacle=obstacle, layers_obstacle=obstacle)

    def check(self, *, deterministic: bool, context_len: int | None) -> None:
        """See `Checkpoint.check`.

        Raises:
            UnsupportedModel: deterministic mode, or rotary tables that would change while the engine lives.
        """
        if deterministic:
            raise UnsupportedModel(
                f"{self.config.architecture} is computed by transformers' layers, whose bits depend on what else is in "
                "a step",
                hint="leave out enable_deterministic_inference",
            )
        _check_rotary(self._theirs, context_len or self.config.max_position_embeddings)

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
        """See `Checkpoint.build_model`.

        Raises:
            UnsupportedModel: as `check`, or what the examination of the model found.
            CorruptModel: tensors are missing, unexpected, of another shape, or unreadable.
        """
        import torch

        from sgl.runtime.models.transformers_model import PAGED, TransformersForCausalLM, register

        self.check(deterministic=deterministic, context_len=context_len)
        register()
        torch_dtype: torch.dtype = getattr(torch, dtype)
        if self.source.kind == "dummy":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(_DUMMY_SEED)
                model = self._class._from_config(self._theirs, dtype=torch_dtype, attn_implementation=PAGED)
        else:
            model = self._loaded(torch_dtype, PAGED)
        model.requires_grad_(False)
        return TransformersForCausalLM(model.eval().to(device), self.config).eval()

    def _loaded(self, dtype: torch.dtype, attention: str) -> Any:
        if self.folder is None:
            raise UnsupportedModel(f"{self.source.name} has no weights", hint="set load_format to dummy")
        try:
            with _quiet():
                model, found = self._class.from_pretrained(
                    None,
                    config=self._theirs,
                    state_dict=dict(safetensors_tensors(self.folder, left_out=self._left_out())),
                    dtype=dtype,
                    attn_implementation=attention,
                    trust_remote_code=False,
                    local_files_only=True,
                    ignore_mismatched_sizes=True,  # so that they are named; refused they are all the same
                    output_loading_info=True,
                )
        except (CorruptModel, UnsupportedModel):
            raise
        except Exception as error:
            raise CorruptModel(
                f"transformers cannot load {self.source.name}: {error}", hint="fetch the model again"
            ) from error
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
            names = sorted(str(name[0] if isinstance(name, tuple) else name) for name in found.get(what) or ())
            if names:
                raise CorruptModel(
                    f"{self.source.name} has {len(names)} {what.replace('_', ' ')}: {', '.join(names[:5])}",
                    hint="config and weights belong to different models, or the file is damaged: fetch it again",
                )
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()  # the file is mapped, and may be changed or cut while the model lives
        return model

    def _empty(self) -> Any:
        """The model without weights."""
        import torch

        with torch.device("meta"):
            return self._class(self._theirs)

    def _left_out(self) -> Callable[[str], bool]:
        """Whether a name is of what old versions stored and the class computes, such as masks."""
        names = {name for name, _ in self._empty().named_parameters()}
        names |= {name.removeprefix(f"{self._class.base_model_prefix}.") for name in names}
        patterns = self._class._keys_to_ignore_on_load_unexpected or ()
        return lambda name: name not in names and any(re.search(pattern, name) for pattern in patterns)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and reports: what is wrong is raised."""
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def _class_and_config(folder: Path, given: Mapping[str, Any]) -> tuple[Any, Any]:
    """transformers' class of the checkpoint's architecture, and its configuration."""
    name, kind = architecture_name(given), given.get("model_type")
    try:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError as error:
        raise UnsupportedModel(
            f"architecture {name!r} is computed by transformers only, which cannot be imported: {error}",
            hint="install transformers >= 5.17",
        ) from None
    if not isinstance(kind, str) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) != name:
        raise UnsupportedModel(
            f"architecture {name!r} is not supported, and transformers {transformers.__version__} has no decoder of "
            f"that name and model_type {kind!r}",
            hint=f"code that a repository brings along is never run; {nearest(name)}",
        )
    if given.get("quantization_config"):
        raise UnsupportedModel(
            f"the weights of {name!r} are quantized (quantization_config), which sgl reads for its own layers only",
            hint="use the model's unquantized weights",
        )
    try:
        config = CONFIG_MAPPING[kind].from_dict({key: given[key] for key in given if key not in _NOT_PASSED})
        model_class = getattr(transformers, name)
    except Exception as error:
        raise CorruptModel(
            f"{folder / 'config.json'}: transformers refuses it: {error}", hint="fetch it again"
        ) from error
    _check_class(model_class, config)
    return model_class, config


def _check_class(model_class: Any, config: Any) -> None:
    """What is known without weights; the rest is seen when the model is examined."""
    from sgl.runtime.models.transformers_probe import no_interface

    name = model_class.__name__
    reason = ""
    if getattr(config, "is_encoder_decoder", False):
        reason = "is an encoder with a decoder"
    elif getattr(model_class, "_is_stateful", False):
        reason = "keeps a state in place of keys and values"
    elif config.get_text_config() is not config:
        reason = "has more than a model of text"
    if reason:
        raise UnsupportedModel(f"{name} of transformers {reason}", hint="use a decoder of text with attention")
    if not model_class._can_set_attn_implementation():
        raise no_interface(name)


def _model_config(name: str, theirs: Any) -> ModelConfig:
    """What the pool and the memory plan need. What only a model's own layers need keeps its defaults."""
    heads = int(theirs.num_attention_heads)
    kv_heads = _first(theirs, "num_key_value_heads", "num_kv_heads")
    if kv_heads is None:
        kv_heads = 1 if getattr(theirs, "multi_query", False) else heads
    hidden = int(theirs.hidden_size)
    inner = _first(theirs, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    return ModelConfig(
        architecture=name,
        model_impl="transformers",
        vocab_size=int(theirs.vocab_size),
        hidden_size=hidden,
        intermediate_size=int(inner or 4 * hidden),
        num_hidden_layers=int(theirs.num_hidden_layers),
        num_attention_heads=heads,
        num_key_value_heads=int(kv_heads),
        head_dim=int(_first(theirs, "head_dim") or hidden // heads),
        max_position_embeddings=int(_first(theirs, "max_position_embeddings") or 2048),
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=bool(getattr(theirs, "tie_word_embeddings", False)),
        attention_softcap=float(_first(theirs, "attn_logit_softcapping") or 0.0),
        checkpoint_dtype=str(theirs.dtype or "float32").removeprefix("torch."),
    )


def _first(config: Any, *names: str) -> Any:
    """The first of these fields that a configuration has."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _check_rotary(config: Any, context_len: int) -> None:
    """transformers computes the tables of two scalings anew by the longest sequence of a call: keys in the cache would
    meet queries of another table, and answers depend on who else is in the step."""
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = part.get("rope_type")
        if kind not in ("dynamic", "longrope"):
            continue
        own = part.get("original_max_position_embeddings") or config.max_position_embeddings
        if context_len > own:
            raise UnsupportedModel(
                f"rope scaling {kind!r} of a model that transformers computes changes beyond {own} tokens; the context "
                f"has {context_len}",
                hint=f"set context_length to at most {own}",
            )
