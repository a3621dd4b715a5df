"""Where a checkpoint's tensors go in a model: which parameter, which rows of the tensor, in which order.

Owns the translation of names, from Hugging Face's and from GGUF's, and of layouts: matrices that hold several of the
model's, experts one by one, heads whose rows are paired otherwise. What is particular to an architecture is in its
entry (`models/architectures.py`); names of GGUF tensors are the `gguf` package's. Called by `checkpoint`. No torch
here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sgl.runtime.models.registry import Architecture, ModelConfig

Shape = tuple[int, ...]
_EXPERT = re.compile(r"^(?P<before>.*\.experts)\.(?P<number>\d{1,6})\.(?P<after>.*)$")
_HEADS = ("q_proj", "k_proj", "q_norm", "k_norm")
"""Products and norms whose features are those of heads that are rotated."""


class Place(NamedTuple):
    """Where a tensor, or a part of it, belongs.

    Attributes:
        parameter: name in the model.
        rows: the part's first row and the row behind its last; `None` for the whole tensor.
        expert: index in the parameter's first dimension; `None` for the whole parameter.
    """

    parameter: str
    rows: tuple[int, int] | None = None
    expert: int | None = None


class WeightNames:
    """The names of one model's checkpoint.

    Args:
        shapes: of the model's parameters, by name.
    """

    def __init__(self, architecture: Architecture, config: ModelConfig, shapes: Mapping[str, Shape]) -> None:
        self._architecture = architecture
        self._config = config
        self._shapes = shapes
        self._fused = {part: whole for whole, parts in architecture.fused.items() for part in parts}

    def of_checkpoint(self, name: str) -> list[Place]:
        """Where the tensor that a Hugging Face checkpoint calls `name` goes; nowhere when it is not the model's."""
        for theirs, ours in self._architecture.renamed.items():
            name = name.replace(theirs, ours)
        expert = None
        if match := _EXPERT.match(name):
            name, expert = f"{match['before']}.{match['after']}", int(match["number"])
        owner, leaf = _split(name)
        stem, last = _split(owner)
        parts = self._architecture.fused.get(last)
        if parts is None:
            return [Place(name, None, expert)] if name in self._shapes else []
        places, begin = [], 0
        for part in parts:
            parameter = f"{stem}.{part}.{leaf}"
            if parameter not in self._shapes:
                return []
            end = begin + self._shapes[parameter][0 if expert is None else 1]
            places.append(Place(parameter, (begin, end), expert))
            begin = end
        return places

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor is of a part of the checkpoint that is not computed here."""
        return name.startswith(self._architecture.ignored)

    def of_gguf(self) -> dict[str, list[Place]]:
        """Where the tensors of a GGUF file go, by their names there."""
        import gguf

        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        table = gguf.get_tensor_name_map(kinds[self._architecture.gguf], self._config.num_hidden_layers)
        places: dict[str, list[Place]] = {}
        for parameter in self._shapes:
            owner, leaf = _split(parameter)
            stem, last = _split(owner)
            owner = f"{stem}.{self._fused.get(last, last)}" if stem else owner
            name = table.get_name(owner)
            if name is not None:
                places[f"{name}.{leaf}"] = self.of_checkpoint(f"{owner}.{leaf}")
        return places

    def row_order(self, parameter: str, *, from_gguf: bool) -> npt.NDArray[np.int64] | None:
        """In which order the rows of a tensor become those of `parameter`; `None` where they stay.

        The rotary op pairs feature `i` of a head with `i + D / 2`. Checkpoints of some architectures pair neighbours. A
        model that rotates `R < D` features pairs `i` with `i + R / 2`: what is rotated is spread over both halves, the
        rest behind it in each.
        """
        _, last = _split(_split(parameter)[0])
        if last not in _HEADS:
            return None
        head_dim = self._config.head_dim
        rotated = self._config.rotary_dim or head_dim
        order = np.arange(head_dim)
        pairs = self._architecture.pairs
        if from_gguf:
            pairs = self._architecture.gguf_pairs and last.endswith("_proj")
        if pairs:
            order[:rotated] = np.concatenate([np.arange(0, rotated, 2), np.arange(1, rotated, 2)])
        if rotated < head_dim:
            halves, rest = order[:rotated].reshape(2, -1), order[rotated:].reshape(2, -1)
            order = np.concatenate([halves, rest], axis=1).reshape(-1)
        if (order == np.arange(head_dim)).all():
            return None
        num_heads = self._shapes[parameter][0] // head_dim
        return (np.arange(num_heads)[:, None] * head_dim + order).reshape(-1)

    def norm_offset(self, parameter: str, *, from_gguf: bool) -> float:
        """What is added to a tensor."""
        return self._architecture.norm_offset if parameter.endswith("norm.weight") and not from_gguf else 0.0


def _split(name: str) -> tuple[str, str]:
    """What stands before the last dot, and behind it."""
    before, _, last = name.rpartition(".")
    return before, last
