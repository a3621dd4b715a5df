"""The ways our engine can compute one model, by name: what `sgl bench quality` and `throughput` go through.

Owns the table. A path is a few fields of `EngineConfig`; which of them a model and a machine allow, the engine says
when it starts, and a bench reports that in the path's row.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from sgl.errors import InvalidParameter


class EnginePath(msgspec.Struct, frozen=True):
    """A name for people, and the engine options behind it."""

    name: str
    fields: dict[str, Any]

    def applied(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The user's options with those of this path, which win."""
        return {**fields, **self.fields}


def _path(kernels: str, dtype: str, quantization: str = "none") -> EnginePath:
    name = f"{kernels}-{dtype if quantization == 'none' else quantization}"
    return EnginePath(name, {"kernels": kernels, "dtype": dtype, "quantization": quantization})


REFERENCE = _path("torch", "float32")
"""What the others are compared with: the exact one."""
PATHS: dict[str, EnginePath] = {
    path.name: path
    for path in (
        REFERENCE,
        _path("torch", "bfloat16"),
        _path("native", "float32"),
        _path("native", "bfloat16"),
        _path("native", "bfloat16", "gguf"),
        _path("native", "bfloat16", "int8"),
        _path("native", "bfloat16", "int4"),
        _path("triton", "float32"),
        _path("triton", "bfloat16"),
    )
}


def chosen_paths(names: Iterable[str]) -> list[EnginePath]:
    """The paths of these names; all of them for none.

    Raises:
        InvalidParameter: a name that is not known.

    Example:
        >>> [path.fields["kernels"] for path in chosen_paths(["native-gguf"])]
        ['native']
    """
    names = list(names) or list(PATHS)
    for name in names:
        if name not in PATHS:
            near = difflib.get_close_matches(name, PATHS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(PATHS)}"
            raise InvalidParameter(f"no path {name!r}", hint=hint, param="path")
    return [PATHS[name] for name in names]
