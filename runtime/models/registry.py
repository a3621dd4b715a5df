"""Which class runs a checkpoint.

Owns the table of architectures, by the name that a `config.json` gives, and the `ModelConfig` that every source of
weights is translated into. An `Architecture` is what is known before torch is imported: how its configuration is read,
how its checkpoints name and pack their weights, where its class is. The entries are in `architectures.py`.

A model is a `torch.nn.Module` whose parameters carry Hugging Face's names; loaders translate other forms to these.
Importing this module imports no torch.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import msgspec

from sgl.errors import UnsupportedModel
from sgl.runtime.loading.quantized import WeightScheme

if TYPE_CHECKING:
    import torch

    from sgl.runtime.loading.fields import CompleteFields
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


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Feed-forward blocks of which a router picks a few for each token.

    Attributes:
        count, per_token: how many there are, and how many compute a token.
        inner_size: of each, between its two products.
        normalized: the picked ones' weights are scaled to a sum of one.
        layers: which layers have them; the others have one dense block.
    """

    count: int
    per_token: int
    inner_size: int
    normalized: bool
    layers: tuple[int, ...]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder's shape, from `config.json` or GGUF metadata. Names follow Hugging Face's configs where these agree.

    Attributes:
        model_impl: whose layers compute it; `transformers` takes shape, heads and context from here and nothing else.
        rotary_dim: features of a head that are rotated, the first ones; 0 is all.
        unrotated_layers: layers whose queries and keys carry no position.
        local_rope_theta: base of layers with a window, where they have a rotary table of their own, unscaled.
        attention_bias, output_bias: of queries, keys and values; of the product after attention.
        qk_norm: each head's query and key goes through a norm before it is rotated.
        attention_scale: of queries times keys; 0 is `head_dim ** -0.5`.
        attention_softcap, logit_softcap: `c` of `c * tanh(x / c)` over scores and logits; 0 is none.
        windows: per layer how many keys a query sees, its own included, 0 for all; empty when all layers see all.
        own: numbers that only the architecture's own layers read (`Architecture.own`).
        weight_scheme: how a safetensors checkpoint stores matrices that are quantized.
        context_len: what the engine resolved, once it has: two kinds of rope scaling, and whether windows matter, are
            decided on it.
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
    rotary_dim: int = 0
    unrotated_layers: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    windows: tuple[int, ...] = ()
    experts: Experts | None = None
    hidden_act: str = "silu"
    own: Mapping[str, float] = {}
    checkpoint_dtype: str = "float32"
    model_impl: Literal["sgl", "transformers"] = "sgl"
    weight_scheme: WeightScheme | None = None
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
    def scale(self) -> float:
        """What scores are multiplied by."""
        return self.attention_scale or self.head_dim**-0.5

    def window(self, layer: int) -> int:
        """Keys that a query of `layer` sees, its own included; 0 for all, as where the context is no longer than it."""
        window = self.windows[layer] if self.windows else 0
        return window if window < (self.context_len or self.max_position_embeddings) else 0

    @property
    def longest_window(self) -> int:
        """Of the layers that see a part of the context; 0 where there is none."""
        return max((self.window(layer) for layer in range(self.num_hidden_layers)), default=0)

    @property
    def feed_forward_size(self) -> int:
        """Numbers of one token in the widest of four tensors that a layer's feed-forward holds at once.

        Experts compute a row for each token and expert that was picked: its input and output lie there beside the three
        inner ones.
        """
        if self.experts is None:
            return self.intermediate_size
        routed = self.experts.per_token * (self.experts.inner_size + self.hidden_size // 2)
        is_dense_somewhere = len(self.experts.layers) < self.num_hidden_layers
        return max(routed, self.intermediate_size if is_dense_somewhere else 0)


class CausalLM(Protocol):
    """What the model runner calls. Shapes: T tokens of the step, R rows of logits, V vocabulary."""

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """Compute `batch` (T tokens), writing their keys and values to `cache`; float32 logits `[R, V]`."""


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an architecture before torch is imported.

    Attributes:
        name: as `architectures` of a `config.json` has it.
        module: where its class is, which that module registers with `register_model`.
        kind: a decoder writes keys and values and gives logits; an encoder reads a text as a whole and keeps nothing.
        read: what its configuration says beyond what all have: values of `ModelConfig` in place of the plain ones.
        gguf: `general.architecture` of its GGUF files; empty where it has none.
        pairs, gguf_pairs: its checkpoints, its GGUF files pair neighbouring rows of a head's query and key, where the
            rotary op pairs halves.
        renamed: parts of a checkpoint's names -> what the model calls them.
        fused: last part of a checkpoint's name -> the model's products whose rows it holds, one after another.
        text_config: the field of `config.json` that holds the decoder's, in models that see more than text.
        defaults: fields of `config.json` that its makers leave out.
        ignored: beginnings of names of tensors that are not of the decoder.
        own: numbers that only this architecture's config has, with what they are where it leaves them out.
        norm_offset: added to a Hugging Face checkpoint's norm weights; GGUF files have it added already.
    """

    name: str
    module: str
    kind: Literal["decoder", "encoder"] = "decoder"
    read: Callable[[CompleteFields], dict[str, Any]] | None = None
    gguf: str = ""
    pairs: bool = False
    gguf_pairs: bool = False
    renamed: Mapping[str, str] = {}
    fused: Mapping[str, tuple[str, ...]] = {}
    text_config: str = ""
    defaults: Mapping[str, Any] = {}
    ignored: tuple[str, ...] = ()
    own: Mapping[str, float] = {}
    norm_offset: float = 0.0


_Class = TypeVar("_Class", bound=Callable[..., Any])
_SUFFIX = "ForCausalLM"
_architectures: dict[str, Architecture] = {}
_classes: dict[str, Callable[..., Any]] = {}


def register_architecture(architecture: Architecture) -> Architecture:
    """Make an architecture known; its class is imported when a model of it is built."""
    _architectures[architecture.name] = architecture
    return architecture


def register_model(*names: str) -> Callable[[_Class], _Class]:
    """Decorator: this class runs checkpoints of the architectures called `names`."""

    def add(cls: _Class) -> _Class:
        for name in names:
            _classes[name] = cls
        return cls

    return add


def architectures() -> dict[str, Architecture]:
    """All that are known, by name; imports no torch."""
    importlib.import_module("sgl.runtime.models.architectures")
    return dict(_architectures)


def find_architecture(name: str) -> Architecture:
    """The architecture called `name`; imports no torch.

    Raises:
        UnsupportedModel: it is not known; the nearest one and all others are named.

    Example:
        >>> find_architecture("Qwen4ForCausalLM")
        Traceback (most recent call last):
        sgl.errors.UnsupportedModel: architecture 'Qwen4ForCausalLM' is not supported (the nearest is ...
    """
    known = architectures()
    if name not in known:
        raise UnsupportedModel(f"architecture {name!r} is not supported", hint=nearest(name))
    return known[name]


def nearest(name: str) -> str:
    """What to say about a name that is not known."""
    known = architectures()
    stems = {other.removesuffix(_SUFFIX): other for other in known}
    near = [stems[stem] for stem in difflib.get_close_matches(name.removesuffix(_SUFFIX), stems, 1, 0.65)]
    listed = ", ".join(sorted(known))
    return f"the nearest is {near[0]}; supported are {listed}" if near else f"supported are {listed}"


def model_class(name: str) -> Callable[..., Any]:
    """The class for an architecture. Raises as `find_architecture`."""
    architecture = find_architecture(name)
    if name not in _classes:
        importlib.import_module(architecture.module)
    return _classes[name]


def parameter_sizes(config: ModelConfig) -> list[int]:
    """Numbers in each parameter of a model, which is made for it without weights. Imports torch."""
    import torch

    model = model_class(config.architecture)(config, dtype=torch.float32, device=torch.device("cpu"))
    return [parameter.numel() for parameter in model.parameters()]
