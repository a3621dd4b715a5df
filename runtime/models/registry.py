"""Which class runs a checkpoint.

Owns the table architecture name -> model class and the `ModelConfig` that every source of weights is translated into.
A model is a `torch.nn.Module` whose parameters carry the names of the checkpoint in Hugging Face form; loaders
translate other forms to these names. Importing this module imports no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from sgl.errors import UnsupportedModel

if TYPE_CHECKING:
    import torch

    from sgl.runtime.model_runner import ForwardBatch, KVCache


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder's shape, from `config.json` or GGUF metadata. Names follow Hugging Face's configs."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    checkpoint_dtype: str = "float32"

    @property
    def num_parameters(self) -> int:
        """Parameters of a Llama-like decoder of this shape."""
        heads = self.num_attention_heads + 2 * self.num_key_value_heads
        attention = self.hidden_size * self.head_dim * (heads + self.num_attention_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        tables = 1 if self.tie_word_embeddings else 2
        return self.num_hidden_layers * layer + tables * self.vocab_size * self.hidden_size + self.hidden_size


class CausalLM(Protocol):
    """What the model runner calls. Shapes: T tokens of the step, R rows of logits, V vocabulary."""

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """Compute `batch` (T tokens), writing their keys and values to `cache`; float32 logits `[R, V]`."""


_Class = TypeVar("_Class", bound=Callable[..., Any])
_classes: dict[str, Callable[..., Any]] = {}
_modules = ("sgl.runtime.models.llama",)


def register_model(*architectures: str) -> Callable[[_Class], _Class]:
    """Decorator: this class runs checkpoints whose config names one of `architectures`."""

    def add(cls: _Class) -> _Class:
        for architecture in architectures:
            _classes[architecture] = cls
        return cls

    return add


def model_class(architecture: str) -> Callable[..., Any]:
    """The class for an architecture.

    Raises:
        UnsupportedModel: none is registered; the known ones are named.
    """
    for module in _modules:
        importlib.import_module(module)
    if architecture not in _classes:
        raise UnsupportedModel(
            f"architecture {architecture!r} is not supported", hint=f"supported are {', '.join(sorted(_classes))}"
        )
    return _classes[architecture]
