"""What the layers of a model of transformers ask of attention, seen in one call on a few tokens.

Owns the attention and the mask function that stand in for the model's own during that call, and what is refused: a
layer has to attend once through transformers' interface, with the heads that the configuration says, under a causal
mask or a window, subject to nothing that the paged op does not know. Called by `transformers_model.py`.

Shapes: H query heads, K key/value heads, D head size, Q queries, L keys.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn

from sgl.errors import UnsupportedModel
from sgl.runtime.models.registry import ModelConfig

PROBE = "sgl_probe"
"""The name under which transformers finds the attention that looks."""
HINT = "use an architecture that sgl has layers for"
_UNKNOWN = -1
"""In place of a window: a mask of another kind."""
_PASSED_ALONG = {"position_ids", "position_embeddings", "cache_position", "use_cache", "return_dict", "logits_to_keep"}
"""Arguments that reach the attention function of some models and mean nothing to it."""


class Layer(NamedTuple):
    """What the scores of a layer are subject to, and its heads: H, K, D."""

    scale: float
    window: int
    softcap: float
    heads: tuple[int, int, int]


_found: ContextVar[dict[int, Layer]] = ContextVar("sgl_layers")


@torch.inference_mode()
def layers_of(model: Any, config: ModelConfig) -> dict[int, Layer]:
    """What each layer asks for, by its number.

    Raises:
        UnsupportedModel: something that pages cannot give, or layers that do not attend.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PROBE, _probe)
    AttentionMaskInterface.register(PROBE, _probe_mask)
    set_attention(model, PROBE)
    layers: dict[int, Layer] = {}
    ids = torch.arange(1, 4, device=model.device)[None] % config.vocab_size
    token = _found.set(layers)
    try:
        model(input_ids=ids, position_ids=torch.arange(3, device=model.device)[None], use_cache=False)
    finally:
        _found.reset(token)
    _check_layers(layers, config)
    return layers


def set_attention(model: Any, name: str) -> None:
    """Have the model attend by another function of transformers' table."""
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise no_interface(type(model).__name__)


def _probe(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Note what a layer asks for, in place of computing it.

    Raises:
        UnsupportedModel: something that `_attend` cannot give.
    """
    layers, index = _found.get(), getattr(module, "layer_idx", None)
    if not isinstance(index, int) or index in layers:
        raise _cannot(module, "attends twice in a layer, or in one without a number")
    if given.pop("is_causal", None) is False or not getattr(module, "is_causal", True):
        raise _cannot(module, "sees tokens that come later")
    if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
        raise _cannot(module, f"has queries, keys and values of different sizes ({shapes})")
    window = _window_of(module, attention_mask, given.pop("sliding_window", None))
    softcap = float(given.pop("softcap", None) or 0.0)
    if unknown := sorted(name for name, asked in given.items() if name not in _PASSED_ALONG and _is_set(asked)):
        raise _cannot(module, f"is subject to {', '.join(unknown)}")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layers[index] = Layer(scale, window, softcap, (query.shape[1], key.shape[1], key.shape[3]))
    return torch.zeros_like(query).transpose(1, 2).contiguous(), None


def _is_set(asked: Any) -> bool:
    return asked is not None and not (isinstance(asked, (bool, int, float)) and not asked)


def _window_of(module: nn.Module, mask: torch.Tensor | None, asked: int | None) -> int:
    """Keys that a query of this layer sees, by its mask; 0 for all."""
    if mask is None:
        return asked or 0
    repeats = all(stride == 0 for stride, size in zip(mask.stride(), mask.shape, strict=True) if size > 1)
    is_ours = mask.dtype == torch.int64 and repeats and mask.numel() > 0
    window = int(mask.flatten()[0]) if is_ours else _UNKNOWN
    if window == _UNKNOWN:
        raise _cannot(module, "is under a mask that is neither causal nor a window")
    if asked not in (None, window):
        raise _cannot(module, f"has a sliding_window of {asked} and a mask of {window or 'all'}")
    return window


def _probe_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **given: Any,
) -> torch.Tensor:
    """In place of a mask `[1, 1, q, kv]`: its window in every element, all of them one number in memory."""
    window = local_size or 0
    if use_vmap or not _is_window(mask_function, window):
        window = _UNKNOWN
    return torch.full((1, 1, 1, 1), window, device=device).expand(1, 1, q_length, kv_length)


def _is_window(mask_function: Callable[..., torch.Tensor], window: int) -> bool:
    """Whether a mask shows a query the last `window` keys up to its own, or all of them; tried at the places where
    others would differ."""
    last = 2 * max(window, 4) + 1
    queries_Q1 = torch.tensor([0, 1, max(window - 1, 2), max(window, 3), window + 4, last])[:, None]
    keys_L = torch.arange(last + 1)
    expected_QL = keys_L <= queries_Q1
    if window:
        expected_QL = expected_QL & (keys_L > queries_Q1 - window)
    zero = torch.tensor(0)
    try:
        got_QL = mask_function(zero, zero, queries_Q1, keys_L)
    except (IndexError, RuntimeError):  # it looks positions up in a table of this call's tokens
        return False
    return bool((got_QL == expected_QL).all())


def _check_layers(layers: dict[int, Layer], config: ModelConfig) -> None:
    """Every layer attends, with the heads that the pool was planned for."""
    if sorted(layers) != list(range(config.num_hidden_layers)):
        raise UnsupportedModel(
            f"{len(layers)} of {config.num_hidden_layers} layers of {config.architecture} attend through transformers' "
            "attention interface; the others keep something else than keys and values",
            hint=HINT,
        )
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    for index, layer in layers.items():
        if layer.heads != heads:
            raise UnsupportedModel(
                f"layer {index} of {config.architecture} has {layer.heads} query heads, key heads and features of a "
                f"head; its configuration says {heads}, which the pool is made for",
                hint=HINT,
            )


def no_interface(name: str) -> UnsupportedModel:
    """The error of a class that attends by code of its own."""
    return UnsupportedModel(f"{name} of transformers does not attend through its attention interface", hint=HINT)


def _cannot(module: nn.Module, what: str) -> UnsupportedModel:
    return UnsupportedModel(f"{type(module).__name__} of transformers {what}, which pages cannot give", hint=HINT)
