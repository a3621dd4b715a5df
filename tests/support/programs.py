"""Programs for a hand-driven engine core, as short as tests write them."""

from __future__ import annotations

from support.scripted import Rig

from sgl.lang.graph import Gen, Graph, LiteralText, ProgramOptions, Sampling, Text


def text(id: int, value: str, branch: int = 0) -> Text:
    """Append `value`."""
    return Text(id=id, branch=branch, segments=(LiteralText(value),))


def gen(id: int, n: int, branch: int = 0, name: str = "x") -> Gen:
    """Generate exactly `n` tokens, greedily."""
    return Gen(id=id, branch=branch, name=name, sampling=Sampling(max_new_tokens=n, temperature=0.0, ignore_eos=True))


def start(rig: Rig, program: int, *nodes: object, finish: bool = True, **options: object) -> None:
    """Open a program and submit its nodes as one fragment."""
    rig.core.open(program, ProgramOptions(**options))  # type: ignore[arg-type]
    rig.core.submit(program, Graph(nodes=nodes), finish=finish)  # type: ignore[arg-type]
