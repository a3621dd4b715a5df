"""What the layers of a model of transformers ask of attention, and whether its tokens meet anywhere else, seen in calls
on a few tokens.

Owns the attention and the mask function that stand in for the model's own during these calls, and what is refused: a
layer has to attend once through transformers' interface, with the heads that the configuration says, under a causal
mask or a window, subject to nothing that the paged op does not know; while attention gives every token its own query
back, no token may reach another; and no call may reach the next. Called by `transformers_model.py`, and for what shows
without weights by `loading/transformers_checkpoint.py`.

Shapes: T tokens, N hidden size, V vocabulary, H query heads, K key/value heads, D head size, Q queries, L keys.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn

from sgl.errors import UnsupportedModel
from sgl.runtime.models.registry import ModelConfig

log = logging.getLogger("sgl.worker")

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


class _Look(NamedTuple):
    """A call under way: the layers that it has come by, and the one token that others must not show a trace of."""

    layers: dict[int, Layer]
    poisoned: int | None


_look: ContextVar[_Look] = ContextVar("sgl_look")

_NUM_TOKENS = 65
"""That are looked at together: one may meet those of its block, or find an expert full, only where there are many."""
_POISONED = 5
"""Position of the token that is not a number; some stand before it, and many behind it."""
_ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-3}
"""Of the norm of logits: how far they may move with what other tokens are. Products of one shape round each row alike,
so it is nothing, but for an activation whose vector holds the end of one row and the beginning of another."""
_ROUNDING_OF_EXPERTS = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Where other tokens share a token's experts, whose products then have another number of rows."""


def check_shape(model: Any, config: ModelConfig) -> None:
    """What `layers_of` would refuse, of a model without weights (on the meta device), as far as it can be followed
    there: not through experts that are chosen by numbers.

    Raises:
        UnsupportedModel: as `layers_of`.
    """
    try:
        layers_of(model, config)
    except (NotImplementedError, RuntimeError) as error:
        log.debug("%s cannot be followed without weights: %s", config.architecture, error)


@torch.inference_mode()
def layers_of(model: Any, config: ModelConfig) -> dict[int, Layer]:
    """What each layer asks for, by its number. The model may be without weights, on the meta device.

    Raises:
        UnsupportedModel: something that pages cannot give, or layers that do not attend.
    """
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(
            f"{config.architecture} of transformers computes the logits of all tokens, not of chosen ones", hint=HINT
        )
    ids_T = torch.arange(1, 4, device=model.device) % config.vocab_size
    layers, _ = _call(model, ids_T)
    _check_layers(layers, config)
    return layers


@torch.inference_mode()
def check_tokens_apart(model: Any, config: ModelConfig) -> None:
    """No token may reach another but by attention, however little of it, and no call the next.

    Attention gives every token its own query back, one token's embedding is not a number, and every second one is made
    like the last: what is not a number spreads through any sum, in 16 bits as in 32, so it must not be found in what
    another token asks of attention, nor in its logits. Nor may it be found in a later call. And because a maximum, a
    choice or a comparison may swallow it, the embeddings and logits of the tokens that were left as they are stay what
    they were.

    Raises:
        UnsupportedModel: the tokens meet somewhere else; or the model's logits are no numbers to begin with.
    """
    num_tokens = min(_NUM_TOKENS, config.max_position_embeddings)
    ids_T = torch.arange(1, 1 + num_tokens, device=model.device) * 7919 % config.vocab_size
    allowed = (_ROUNDING_OF_EXPERTS if _has_experts(model) else _ROUNDING)[model.dtype]
    _check_calls_apart(model, ids_T[:3], config.architecture, allowed)
    others = slice(1, num_tokens - 1, 2)
    is_kept_T = torch.ones(num_tokens, dtype=torch.bool, device=model.device)
    is_kept_T[others] = False
    changed_T = ids_T.clone()
    changed_T[others] = ids_T[-1]
    with _embedding(model, poisoned=None) as plain:
        _, expected_TV = _call(model, ids_T)
    with _embedding(model, poisoned=_POISONED) as changed:
        _, logits_TV = _call(model, changed_T, poisoned=_POISONED)
    if not plain or any(
        not torch.equal(before[is_kept_T], after[is_kept_T]) for before, after in zip(plain, changed, strict=True)
    ):
        raise _meet(config.architecture, "the embedding of a token depends on others")
    if _is_reached(logits_TV, _POISONED):
        raise _meet(config.architecture, "the logits of a token depend on others")
    for rows in (is_kept_T, slice(-1, None)):  # the last alone, too: it is the one that has many like it before it
        moved = _moved(logits_TV[rows], expected_TV[rows])
        if not moved <= allowed:
            raise _meet(config.architecture, f"other tokens move the logits of one by {moved:.2g} of their norm")


def _check_calls_apart(model: Any, ids_T: torch.Tensor, architecture: str, allowed: float) -> None:
    """A call of nothing but what is no number leaves the next one what it was."""
    _, expected_TV = _call(model, ids_T)
    if not bool(expected_TV.isfinite().all()):
        raise UnsupportedModel(
            f"{architecture} of transformers gives logits that are not finite in {str(model.dtype).split('.')[-1]}",
            hint="set dtype to float32, or fetch the model again",
        )
    with _embedding(model, poisoned=slice(None)):
        _call(model, ids_T)
    moved = _moved(_call(model, ids_T)[1], expected_TV)
    if not moved <= allowed:
        raise UnsupportedModel(
            f"{architecture} of transformers keeps something of a call for the next one, which moves its logits by "
            f"{moved:.2g} of their norm",
            hint=HINT,
        )


def _moved(got: torch.Tensor, expected: torch.Tensor) -> float:
    """By how much of their norm logits are others; not a number where they are none."""
    return float((got - expected).norm() / expected.norm()) if not torch.equal(got, expected) else 0.0


def _has_experts(model: Any) -> bool:
    """Whether some layer shares experts among tokens, by the names that transformers' modules have."""
    return any(
        part in name
        for path, module in model.named_modules()
        for name in (path.lower(), type(module).__name__.lower())
        for part in ("expert", "moe")
    )


def _call(model: Any, ids_T: torch.Tensor, poisoned: int | None = None) -> tuple[dict[int, Layer], torch.Tensor]:
    """One sequence through the model, which attends by `_probe`: the layers that it came by, and logits `[T, V]`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PROBE, _probe)
    AttentionMaskInterface.register(PROBE, _probe_mask)
    set_attention(model, PROBE)
    layers: dict[int, Layer] = {}
    token = _look.set(_Look(layers, poisoned))
    try:
        # Without a mask a model looks at its positions for the seams of several sequences, and on the meta device there
        # is nothing to look at; with one it may look whether it hides anything.
        mask = torch.ones(1, len(ids_T)) if ids_T.is_meta else None
        positions = torch.arange(len(ids_T), device=ids_T.device)[None]
        result = model(
            input_ids=ids_T[None], position_ids=positions, attention_mask=mask, use_cache=False, return_dict=True
        )
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if ids_T.is_meta:
            raise
        raise UnsupportedModel(
            f"{type(model).__name__} of transformers cannot compute its configuration: {error}", hint=HINT
        ) from error
    finally:
        _look.reset(token)
    return layers, result.logits[0].float()


@contextmanager
def _embedding(model: Any, poisoned: int | slice | None) -> Iterator[list[torch.Tensor]]:
    """What the model's embedding gives in calls within, `[T, N]` each; those of `poisoned` are then made no numbers."""
    given: list[torch.Tensor] = []

    def see(module: nn.Module, inputs: Any, output_TN: torch.Tensor) -> torch.Tensor:
        given.append(output_TN.flatten(0, -2).clone())
        if poisoned is not None:
            output_TN = output_TN.clone()
            output_TN[..., poisoned, :] = torch.nan
        return output_TN

    hook = model.get_input_embeddings().register_forward_hook(see)
    try:
        yield given
    finally:
        hook.remove()


def _is_reached(rows: torch.Tensor, poisoned: int) -> bool:
    """Whether what is no number shows in the row of another token; tokens come first."""
    reached_T = rows.isnan().flatten(1).any(dim=1)
    reached_T[poisoned] = False
    return bool(reached_T.any())


def _meet(architecture: str, how: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{architecture} of transformers lets its tokens meet in other ways than attention: {how}", hint=HINT
    )


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
    """Note what a layer asks for, and give every token its own query, in place of computing it.

    Raises:
        UnsupportedModel: something that `_attend` cannot give.
    """
    look, index = _look.get(), getattr(module, "layer_idx", None)
    layers = look.layers
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
    if look.poisoned is not None:
        for what, rows in (("query", query), ("key", key), ("value", value)):
            if _is_reached(rows[0].transpose(0, 1), look.poisoned):
                raise _meet(type(module).__name__, f"the {what} of a token depends on others")
    return query.transpose(1, 2).contiguous(), None


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
    **given: Any,
) -> torch.Tensor:
    """In place of a mask `[1, 1, q, kv]`: its window in every element, all of them one number in memory."""
    window = local_size or 0
    if use_vmap or not _is_window(mask_function, window):
        window = _UNKNOWN
    return torch.full((1, 1, 1, 1), window).expand(1, 1, q_length, kv_length)  # of a meta device it could not be read


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
    if heads[0] % heads[1]:
        raise UnsupportedModel(
            f"no possible model: {heads[0]} query heads of {config.architecture} share {heads[1]} key heads", hint=HINT
        )
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
