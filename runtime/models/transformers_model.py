"""Decoders that sgl has no layers for: transformers' own model, its attention replaced by ours over the KV pool.

Owns the attention function that transformers calls (`attn_implementation="sgl_paged"`). A step goes in as one packed
sequence with the position of each token; the function writes keys and values to the pool and attends by the step's
plan, so cache, forks and chunks are what they are elsewhere. Called by `loading/transformers_checkpoint.py`.

Nothing about a model is taken on trust. What its layers ask for is looked at first, and that no token reaches another
on another path than attention (a state, a convolution): `transformers_probe.py`. Then the logits of two sequences, cut
in chunks and computed together, have to be those of transformers' eager attention for each alone. A model that fails is
refused, never computed wrongly.

Shapes: T tokens of the step, R rows of logits, V vocabulary, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn

from sgl.errors import InternalError, UnsupportedModel
from sgl.kernels import registry
from sgl.kernels.attention import AttentionPlan, plan_attention
from sgl.runtime.models.layers import op_facts
from sgl.runtime.models.registry import ModelConfig
from sgl.runtime.models.transformers_probe import HINT, Layer, check_tokens_apart, layers_of, set_attention

if TYPE_CHECKING:
    from sgl.runtime.model_runner import ForwardBatch, KVCache

PAGED = "sgl_paged"
"""The name under which transformers finds the attention that serves."""
_PROBE_TOKENS = (7, 5)
"""Lengths of the two sequences that a model is examined with."""
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_16_BIT = 0.25
"""Of the norm of logits, between two ways to attend: rounding is far below in either, a missing term far above. What is
small and wrong has been found before, in either dtype."""


class _Step(NamedTuple):
    """What the attention function works on; `ops` are `kv_write` and `paged_attention`."""

    layers: dict[int, Layer]
    plan: AttentionPlan
    cache: KVCache
    ops: tuple[Callable[..., Any], Callable[..., Any]]


_step: ContextVar[_Step] = ContextVar("sgl_step")


class TransformersForCausalLM(nn.Module):
    """The model runner's view of a model of transformers (see `CausalLM`).

    Args:
        model: loaded, on its device, in its dtype.
        config: its shape.

    Raises:
        UnsupportedModel: it cannot be computed over pages; the reason.
    """

    def __init__(self, model: Any, config: ModelConfig) -> None:
        super().__init__()
        register()
        self.model = model
        self.vocab_size = config.vocab_size
        self._layers = layers_of(model, config)
        check_tokens_apart(model, config)
        facts = msgspec.structs.replace(
            op_facts(config, model.dtype, model.device, deterministic=False),
            window=max(layer.window for layer in self._layers.values()),
            softcap=max(layer.softcap for layer in self._layers.values()),
        )
        self._ops = (registry.get("kv_write", facts), registry.get("paged_attention", facts))
        self._check(config)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """See `CausalLM`."""
        token = _step.set(_Step(self._layers, batch.attention, cache, self._ops))
        try:
            return self._logits(batch.token_ids, batch.positions, batch.logit_rows)
        finally:
            _step.reset(token)

    def _logits(self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """Float32 `[R, V]` of one packed sequence, by the attention that the model is set to."""
        result = self.model(
            input_ids=token_ids_T[None],
            position_ids=positions_T[None],
            use_cache=False,
            return_dict=True,
            logits_to_keep=rows_R if len(rows_R) else rows_R.new_zeros(1),
        )
        logits_RV: torch.Tensor = result.logits[0, : len(rows_R)]
        return logits_RV.float()

    # --- before it serves ---------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _check(self, config: ModelConfig) -> None:
        """Compare the model over pages, two sequences in chunks, with each of them alone in transformers' attention."""
        ids_T = torch.arange(1, 1 + sum(_PROBE_TOKENS), device=self.model.device) * 7919 % config.vocab_size
        sequences = list(ids_T.split(_PROBE_TOKENS))
        set_attention(self.model, "eager")
        expected = torch.cat([self._alone(sequence) for sequence in sequences])
        set_attention(self.model, PAGED)
        error = float((self._in_chunks(sequences, config) - expected).norm() / expected.norm())
        allowed = _TOLERANCE.get(self.model.dtype, _TOLERANCE_16_BIT)
        if not error <= allowed:
            raise UnsupportedModel(
                f"{config.architecture} over pages gives other logits than transformers alone (by {error:.2g} of their "
                f"norm; at most {allowed:g} is rounding)",
                hint=HINT,
            )

    def _alone(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(len(token_ids_T), device=token_ids_T.device)
        return self._logits(token_ids_T, positions, positions)

    def _in_chunks(self, sequences: Sequence[torch.Tensor], config: ModelConfig) -> torch.Tensor:
        """Logits of all positions, the sequences computed together: four tokens of each, then the rest one by one."""
        from sgl.runtime.model_runner import ForwardBatch, KVCache

        longest, device = max(map(len, sequences)), self.model.device
        cache = KVCache(config, len(sequences) * longest, 1, self.model.dtype, device)
        tables = np.arange(len(sequences) * longest, dtype=np.int32).reshape(len(sequences), longest)
        rows: list[list[torch.Tensor]] = [[] for _ in sequences]
        for start, end in ((0, 4), *((i, i + 1) for i in range(4, longest))):
            taking = [index for index, ids in enumerate(sequences) if start < len(ids)]
            parts = [sequences[index][start:end] for index in taking]
            lengths = [len(part) for part in parts]
            positions = torch.cat([torch.arange(start, start + length, device=device) for length in lengths])
            plan = plan_attention([start] * len(parts), lengths, [tables[index] for index in taking], 1, device)
            batch = ForwardBatch(torch.cat(parts), positions, torch.arange(len(positions), device=device), plan)
            for index, logits in zip(taking, self(batch, cache).split(lengths), strict=True):
                rows[index].append(logits)
        return torch.cat([block for blocks in rows for block in blocks])


def register() -> None:
    """Make the attention known to transformers. Again is harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(PAGED, _attend)  # without a mask function of this name no mask is made


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Of one layer: query `[1, H, T, D]`, key and value `[1, K, T, D]`; `[1, T, H, D]` and no weights."""
    step, index = _step.get(), int(module.layer_idx)  # type: ignore[arg-type]
    layer = step.layers[index]
    if attention_mask is not None:
        raise InternalError(f"layer {index} attends under a mask that it did not have when the model was examined")
    kv_write, paged_attention = step.ops
    keys_SKD, values_SKD = step.cache.layer(index)
    kv_write(keys_SKD, values_SKD, key[0].transpose(0, 1), value[0].transpose(0, 1), step.plan.write_slots)
    query_THD = query[0].transpose(0, 1).contiguous()
    mixed_THD = paged_attention(
        query_THD, keys_SKD, values_SKD, step.plan, layer.scale, window=layer.window, softcap=layer.softcap
    )
    return mixed_THD[None], None
