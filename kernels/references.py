"""The table of torch references and of what comes with them, without torch.

Imported by the package itself, so that the registry is never empty. Each entry loads its module when it is called
first: `sgl doctor` and the client half list the ops for free.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
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
    "gelu_tanh_mul": "sgl.kernels.elementwise",
    "experts": "sgl.kernels.moe",
    "kv_write": "sgl.kernels.attention",
    "plan_attention": "sgl.kernels.attention",
    "paged_attention": "sgl.kernels.attention",
    "cascade_attention": "sgl.kernels.attention",
    "apply_bitmask": "sgl.kernels.bitmask",
    "argmax": "sgl.kernels.elementwise",
    "top_k": "sgl.kernels.sampling",
}


def _reads_bytes(facts: registry.OpFacts) -> str | None:
    if facts.device != "cpu":
        return "runs on the CPU"
    return None if sys.byteorder == "little" else "reads words as bytes, the lowest first"


registry.register("apply_bitmask", "cpu", priority=5, supports=_reads_bytes)(
    _lazily("sgl.kernels.bitmask", "apply_bitmask_cpu")
)

for _op, _module in _REFERENCES.items():
    registry.register(_op, "torch")(_lazily(_module, _op))


def _is_deterministic(facts: registry.OpFacts) -> str | None:
    return None if facts.deterministic else "slower; it runs in deterministic mode only"


def _is_invariant(facts: registry.OpFacts) -> str | None:
    return _is_deterministic(facts) or (None if facts.triton else "the engine does not run on Triton")


for _op, _name, _module, _function in (
    ("paged_attention", "fixed_blocks", "sgl.kernels.deterministic", "paged_attention"),
    ("experts", "fixed_rows", "sgl.kernels.moe", "experts_alike"),
):
    registry.register(_op, _name, priority=10, supports=_is_deterministic)(_lazily(_module, _function))
for _op, _module, _function in (
    ("paged_attention", "sgl.kernels.triton.invariant", "paged_attention"),
    ("experts", "sgl.kernels.triton.experts", "experts_invariant"),
):
    registry.register(_op, "triton_invariant", priority=18, supports=_is_invariant)(_lazily(_module, _function))


_ATTENTION = ("plan_attention", "paged_attention", "cascade_attention")


def _whole_context(facts: registry.OpFacts) -> str | None:
    """What the attention of the native and of Triton's kernels lacks; the reference's plan goes with its attention."""
    if facts.window:
        return f"it looks at the whole context, and layers of this model at {facts.window} tokens"
    return "it has no soft caps" if facts.softcap else None


def _runs_on_triton(op: str) -> Callable[[registry.OpFacts], str | None]:
    def supports(facts: registry.OpFacts) -> str | None:
        if not facts.triton:
            return "the engine does not run on Triton"
        return _whole_context(facts) if op in _ATTENTION else None

    return supports


def _runs_natively(op: str) -> Callable[[registry.OpFacts], str | None]:
    def supports(facts: registry.OpFacts) -> str | None:
        if not facts.native:
            return "the engine does not run on the native kernels"
        return _whole_context(facts) if op in _ATTENTION else None

    return supports


for _op, _module in {
    "rms_norm": "elementwise",
    "plan_attention": "attention",
    "paged_attention": "attention",
    "cascade_attention": "attention",
    "experts": "experts",
}.items():
    registry.register(_op, "triton", priority=15, supports=_runs_on_triton(_op))(
        _lazily(f"sgl.kernels.triton.{_module}", _op)
    )

for _op in ("rms_norm", "rotary", "silu_mul", "kv_write", "plan_attention", "paged_attention", "argmax", "top_k"):
    registry.register(
        _op,
        "native",
        priority=20,
        supports=_runs_natively(_op),
    )(_lazily("sgl.kernels.native.ops", _op))
registry.register("experts", "native", priority=20, supports=_runs_natively("experts"))(
    _lazily("sgl.kernels.moe", "experts_native")
)
