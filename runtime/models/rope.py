"""Rotary frequencies: one table per model, decided when the model is built.

Owns the variants of `RopeScaling`. A cached key was rotated once and is read by every later query, so here frequencies
never change while an engine lives. transformers recomputes two variants from the length of the current sequence, and
then compares queries of one table with cached keys of another; both are decided from the engine's context length here:

* `dynamic` (NTK): the table of a sequence as long as the context. Up to `max_position_embeddings` that is the unscaled
  one, which is also the default context; `context_length` up to `factor` times as much switches the scaling on.
* `longrope`: the long factors when the context is longer than `original_max_position_embeddings`, else the short ones.

Answers then depend on a position and the engine's configuration, never on who else is in the cache. Within the context
that a table was made for, logits equal those of transformers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from sgl.runtime.models.registry import ModelConfig, RopeScaling


class Rotary(NamedTuple):
    """Inverse frequencies `[D / 2]` in float32, and what cosines and sines are multiplied by.

    A model that rotates a part of each head has zeros for the rest, which is then left as it is: the loader orders the
    rows of its queries and keys so that what is rotated lies in pairs of halves (`loading/names.py`).
    """

    inverse_frequencies: torch.Tensor
    attention_factor: float = 1.0

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines `[T, D]` of positions `[T]`, both halves equal.

        Angles are float32 whatever the model's dtype: at position 8,000 sixteen bits cannot tell neighbours apart.
        """
        angles_TD = torch.outer(positions.float(), self.inverse_frequencies).repeat(1, 2)
        cos_TD, sin_TD = angles_TD.cos(), angles_TD.sin()
        if self.attention_factor != 1.0:
            gain_D = torch.where(self.inverse_frequencies == 0, 1.0, self.attention_factor).repeat(2)
            cos_TD, sin_TD = cos_TD * gain_D, sin_TD * gain_D
        return cos_TD.to(dtype), sin_TD.to(dtype)


def rotary_tables(config: ModelConfig, device: torch.device) -> tuple[Rotary, ...]:
    """The model's table and, where layers with a window have their own, that one, which is not scaled."""
    tables = [rotary(config, device)]
    if config.local_rope_theta is not None:
        tables.append(Rotary(_filled(_inverse(config.local_rope_theta, _dim(config)), config).to(device)))
    return tuple(tables)


def rotary(config: ModelConfig, device: torch.device) -> Rotary:
    """The table of a model for `config.context_len`, or for its own length where the engine has not resolved one."""
    scaling = config.rope_scaling
    if scaling is None:
        return Rotary(_filled(_inverse(config.rope_theta, _dim(config)), config).to(device))
    frequencies, attention_factor = _VARIANTS[scaling.rope_type](config, scaling)
    return Rotary(_filled(frequencies, config).to(device), attention_factor)


def _dim(config: ModelConfig) -> int:
    """Features of a head that are rotated."""
    return config.rotary_dim or config.head_dim


def _filled(frequencies: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """With zeros for what is not rotated."""
    return torch.nn.functional.pad(frequencies, (0, config.head_dim // 2 - len(frequencies)))


def _inverse(base: float, dim: int) -> torch.Tensor:
    """`base ** (-2i / dim)` (RoFormer, Su et al. 2021), in the order of operations that gives transformers' bits."""
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def _linear(config: ModelConfig, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """Positions divided by `factor` (position interpolation, Chen et al. 2023)."""
    return _inverse(config.rope_theta, _dim(config)) / _given(scaling.factor), 1.0


def _dynamic(config: ModelConfig, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """A larger base, as a sequence of the context's length needs it (NTK-aware scaling)."""
    dim, own = _dim(config), config.max_position_embeddings
    factor = _given(scaling.factor)
    length = max(config.context_len or own, own)
    stretch = factor * length / own - (factor - 1)
    return _inverse(config.rope_theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _yarn(config: ModelConfig, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """Fast frequencies kept, slow ones divided by `factor`, a ramp between them (YaRN, Peng et al. 2023)."""
    dim, base, factor = _dim(config), config.rope_theta, _given(scaling.factor)
    original = scaling.original_max_position_embeddings or config.max_position_embeddings
    first, last = (
        dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (scaling.beta_fast or 32.0, scaling.beta_slow or 1.0)
    )
    if scaling.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first or 0.001)
    share_kept = 1 - ramp.clamp(0, 1)
    powers = base ** (torch.arange(0, dim, 2).float() / dim)
    frequencies = 1.0 / (factor * powers) * (1 - share_kept) + 1.0 / powers * share_kept
    if scaling.attention_factor is not None:
        return frequencies, scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return frequencies, _yarn_gain(factor, scaling.mscale) / _yarn_gain(factor, scaling.mscale_all_dim)
    return frequencies, _yarn_gain(factor, 1.0)


def _yarn_gain(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(config: ModelConfig, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """A factor of its own for each frequency, from one of two searched lists (LongRoPE, Ding et al. 2024)."""
    own = config.max_position_embeddings
    original = scaling.original_max_position_embeddings or own
    long = (config.context_len or own) > original
    factors = torch.tensor(scaling.long_factor if long else scaling.short_factor, dtype=torch.float32)
    dim = _dim(config)
    frequencies = 1.0 / (factors * config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    if scaling.attention_factor is not None:
        return frequencies, scaling.attention_factor
    factor = scaling.factor or own / original
    return frequencies, 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _llama3(config: ModelConfig, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """Long waves are stretched by `factor`, short ones kept, those between are interpolated (Llama 3.1)."""
    inverse = _inverse(config.rope_theta, _dim(config))
    low, high = _given(scaling.low_freq_factor), _given(scaling.high_freq_factor)
    original = scaling.original_max_position_embeddings or config.max_position_embeddings
    turns = original * inverse / (2 * math.pi)
    share_kept = ((turns - low) / (high - low)).clamp(0, 1)
    return inverse * (share_kept + (1 - share_kept) / _given(scaling.factor)), 1.0


def _factors(config: ModelConfig, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """A divisor for each frequency, computed by the converter of a GGUF file."""
    divisors = torch.tensor(scaling.factors, dtype=torch.float32) * (scaling.factor or 1.0)
    return _inverse(config.rope_theta, _dim(config)) / divisors, 1.0


def _given(value: float | None) -> float:
    """A field whose presence was checked when the configuration was read."""
    if value is None:
        raise ValueError("a field of rope_scaling is missing")
    return value


_VARIANTS = {
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "factors": _factors,
}
