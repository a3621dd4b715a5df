"""Numerics: one registry; per op a torch reference and the implementations that replace it where they win.

Importing this package fills the registry with the names below but imports no torch: each entry loads its module when
it is called first. So `sgl doctor` and the client half can list the ops for free.
"""

from __future__ import annotations

import importlib
from typing import Any

from sgl.kernels import registry


def _lazily(module: str, name: str) -> registry.Function:
    """A function that imports `module` at its first call and is `module.name` from then on."""
    target: registry.Function | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal target
        if target is None:
            target = getattr(importlib.import_module(module), name)
        return target(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"See `{module}.{name}`."
    return call


_REFERENCES = {
    "rms_norm": "sgl.kernels.elementwise",
    "rotary": "sgl.kernels.elementwise",
    "silu_mul": "sgl.kernels.elementwise",
    "kv_write": "sgl.kernels.attention",
    "paged_attention": "sgl.kernels.attention",
}

# From the repository root this folder also answers to the bare name `kernels`, under which transformers looks for
# another package; a second run under that name must not register everything twice.
if __name__ == "sgl.kernels":
    for _op, _module in _REFERENCES.items():
        registry.register(_op, "torch")(_lazily(_module, _op))
