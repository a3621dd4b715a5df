"""Which implementation of an op runs, and why.

Owns the table op name -> implementations. Every op has a torch reference (priority 0, supports everything), which is
the oracle of the others' tests. An implementation says itself whether it can run: `supports(facts)` returns `None`, or
the reason why not, and `sgl doctor` prints these. Models ask for a function once, at load, and call it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from sgl.errors import InternalError

Function = Callable[..., Any]


class OpFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an implementation may decide on."""

    device: str = "cpu"
    dtype: str = "float32"
    head_dim: int = 64
    num_heads: int = 1
    num_kv_heads: int = 1
    page_size: int = 1
    window: int = 0
    """Keys that a query sees in layers that do not see all; 0 where all do. The longest, where layers differ."""
    softcap: float = 0.0
    """Bound of attention's scores, `c * tanh(score / c)`; 0 is none."""
    deterministic: bool = False
    """Every row's result must be the same bits whatever else is in the step."""
    native: bool = False
    """The native library is loaded, activations are float32 on the CPU, and weights are packed for it."""
    triton: bool = False
    """Triton is there, and the engine plans its steps for it."""


class Implementation(msgspec.Struct, frozen=True):
    """One way to compute an op; among those that support the facts the highest priority runs."""

    op: str
    name: str
    function: Function
    priority: int
    supports: Callable[[OpFacts], str | None]


class Choice(msgspec.Struct, frozen=True):
    """What was chosen for an op, and why the others were not."""

    op: str
    chosen: str
    rejected: tuple[tuple[str, str], ...] = ()


_table: dict[str, list[Implementation]] = {}


def register(
    op: str, name: str, *, priority: int = 0, supports: Callable[[OpFacts], str | None] | None = None
) -> Callable[[Function], Function]:
    """Decorator: add an implementation of `op`. The name is unique in the op."""

    def add(function: Function) -> Function:
        rows = _table.setdefault(op, [])
        if any(row.name == name for row in rows):
            raise InternalError(f"op {op!r} already has an implementation {name!r}")
        rows.append(Implementation(op, name, function, priority, supports or (lambda facts: None)))
        rows.sort(key=lambda row: -row.priority)
        return function

    return add


def get(op: str, facts: OpFacts = OpFacts(), name: str | None = None) -> Function:
    """The function to call for `op`: the best that supports `facts`, or the one called `name`.

    Raises:
        InternalError: no such op or name, or nothing supports the facts.
    """
    for row in implementations(op):
        if (name is None or row.name == name) and row.supports(facts) is None:
            return row.function
    raise InternalError(f"no implementation of op {op!r}" + (f" called {name!r}" if name else "") + f" for {facts}")


def implementations(op: str) -> tuple[Implementation, ...]:
    """All implementations of an op, best first."""
    if op not in _table:
        raise InternalError(f"unknown op {op!r}; known are {', '.join(sorted(_table)) or 'none'}")
    return tuple(_table[op])


def ops() -> list[str]:
    """Names of all ops."""
    return sorted(_table)


def explain(facts: OpFacts) -> list[Choice]:
    """For every op what `get` would choose, and why not the ones before it."""
    choices = []
    for op in ops():
        rejected: list[tuple[str, str]] = []
        chosen = "none"
        for row in implementations(op):
            reason = row.supports(facts)
            if reason is None:
                chosen = row.name
                break
            rejected.append((row.name, reason))
        choices.append(Choice(op, chosen, tuple(rejected)))
    return choices
