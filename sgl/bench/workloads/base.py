"""What a workload is, and the registry of all of them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

import sgl
from sgl.bench.workloads.draw import Draw, Unit
from sgl.errors import ConfigError
from sgl.lang.backend import Backend
from sgl.lang.function import SglFunction
from sgl.lang.state import ProgramState


class Call(msgspec.Struct, frozen=True):
    """One run of a program: `function.run(**arguments)`, in the given wave."""

    function: SglFunction
    arguments: Mapping[str, Any]
    wave: int = 0

    def run(self, backend: Backend) -> ProgramState:
        """Run it and wait for its end."""
        return self.function.run(backend=backend, **self.arguments)


class Workload(msgspec.Struct, frozen=True):
    """A named list of calls.

    Attributes:
        name: as on the command line.
        stresses: what it is there for, in a line.
        static: every program is one submission: it reads nothing of its own before its end.
        make: builds the calls from drawn material.
    """

    name: str
    stresses: str
    static: bool
    make: Callable[[Draw], list[Call]]

    def build(self, seed: int = 0, scale: float = 1.0, unit: Unit = "words") -> list[Call]:
        """The calls, in order of arrival, wave by wave. The same arguments give the same calls.

        Args:
            scale: shrinks (or grows) the tokens of the workload by about this factor; see `sgl.bench.workloads.draw`.
            unit: what is about one token for the model: `bytes` for `dummy`, else `words`.
        """
        return self.make(Draw(self.name, seed, scale, unit))


WORKLOADS: dict[str, Workload] = {}
"""All workloads by name."""


def workload(name: str, stresses: str, *, static: bool = True) -> Callable[[Callable[[Draw], list[Call]]], Workload]:
    """Decorator of a builder: registers the workload."""

    def register(make: Callable[[Draw], list[Call]]) -> Workload:
        WORKLOADS[name] = Workload(name, stresses, static, make)
        return WORKLOADS[name]

    return register


def named(names: Iterable[str]) -> list[Workload]:
    """The workloads of these names, or all of them when there are none.

    Raises:
        ConfigError: a name that is not known, with the nearest one.
    """
    chosen = list(names) or list(WORKLOADS)
    for name in chosen:
        if name not in WORKLOADS:
            near = difflib.get_close_matches(name, WORKLOADS, n=1)
            raise ConfigError(
                f"no workload {name!r}",
                hint=f"did you mean {near[0]!r}?" if near else f"they are {', '.join(WORKLOADS)}",
                param="workload",
            )
    return [WORKLOADS[name] for name in chosen]


def forced(name: str, length: int, **sampling: Any) -> Any:
    """A greedy generation of exactly `length` tokens."""
    return sgl.gen(name, max_tokens=length, ignore_eos=True, temperature=0, **sampling)


def drawn(name: str, length: int, seed: int, temperature: float = 1.0) -> Any:
    """A sampled generation of exactly `length` tokens, the same at each run."""
    return sgl.gen(name, max_tokens=length, ignore_eos=True, temperature=temperature, seed=seed)
