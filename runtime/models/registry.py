"""Which class runs a checkpoint.

Owns the table architecture name -> model class and the `ModelConfig` that every source of weights is translated into.
A model is a `torch.nn.Module` whose parameters carry the names of the checkpoint in Hugging Face form; loaders
translate other forms to these names. Importing this module imports no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import msgspec

from sgl.errors import UnsupportedModel

if TYPE_CHECKING:
    import torch

    from sgl.runtime.model_runner import ForwardBatch, KVCache


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How rotary frequencies are stretched: Hugging Face's `rope_scaling`, and factors per frequency as GGUF files
    bring them. What a type needs and how it computes is in `models/rope.py`."""

    rope_type: Literal["linear", "dynamic", "yarn", "longrope", "llama3", "factors"]
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    factors: tuple[float, ...] = ()
    """What each frequency is divided by (`rope_freqs.weight` of a GGUF file); beside it `factor` divides all."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder's shape, from `config.json` or GGUF metadata. Names follow Hugging Face's configs.

    `context_len` is what the engine resolved, once it has: two kinds of rope scaling are decided on it.
    """

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
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    checkpoint_dtype: str = "float32"
    context_len: int | None = None

    @property
    def longest_context_len(self) -> int:
        """Tokens that the model was made for, at most: beyond `max_position_embeddings` as far as its scaling goes."""
        scaling = self.rope_scaling
        if scaling is None or scaling.factor is None:
            return self.max_position_embeddings
        unscaled = scaling.original_max_position_embeddings
        if unscaled is None and scaling.rope_type in ("linear", "dynamic"):
            unscaled = self.max_position_embeddings
        return max(self.max_position_embeddings, int((unscaled or 0) * scaling.factor))

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
_modules = {"LlamaForCausalLM": "sgl.runtime.models.llama"}
"""Where the classes that come with sgl are registered, so that a name can be checked before torch is imported."""


def register_model(*architectures: str) -> Callable[[_Class], _Class]:
    """Decorator: this class runs checkpoints whose config names one of `architectures`."""

    def add(cls: _Class) -> _Class:
        for architecture in architectures:
            _classes[architecture] = cls
        return cls

    return add


def check_architecture(architecture: str) -> None:
    """Refuse an architecture that no class is registered for; imports no torch.

    Raises:
        UnsupportedModel: the known ones are named.
    """
    known = {*_classes, *_modules}
    if architecture not in known:
        raise UnsupportedModel(
            f"architecture {architecture!r} is not supported", hint=f"supported are {', '.join(sorted(known))}"
        )


def model_class(architecture: str) -> Callable[..., Any]:
    """The class for an architecture. Raises as `check_architecture`."""
    check_architecture(architecture)
    if architecture not in _classes:
        importlib.import_module(_modules[architecture])
    return _classes[architecture]
