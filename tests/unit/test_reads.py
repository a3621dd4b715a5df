"""What variables read in forks of forks: what a plain walk up the lineage finds, each step of which is taken once."""

from __future__ import annotations

from bisect import bisect_left
from collections import UserDict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sgl.lang.graph import Var
from sgl.lang.reads import Reads


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("gfr"), st.sampled_from("xy")), max_size=40))
@settings(max_examples=100, deadline=None)
def test_variables_read_what_a_walk_finds(steps: list[tuple[int, str, str]]) -> None:
    reads = Reads()
    made: dict[tuple[int, str], list[int]] = {}
    lineage: dict[int, tuple[int, int]] = {}

    def walk(branch: int, name: str, at: int) -> int | None:
        own = made.get((branch, name), [])
        if own:
            return own[max(bisect_left(own, at) - 1, 0)]
        while branch in lineage:
            branch, at = lineage[branch]
            if before := [place for place in made.get((branch, name), []) if place < at]:
                return before[-1]
        return None

    for at, (number, kind, name) in enumerate(steps):
        branch = number % (len(lineage) + 1)
        if kind == "g":
            made.setdefault((branch, name), []).append(at)
            reads.generated(branch, name, at)
        elif kind == "f":
            child = len(lineage) + 1
            lineage[child] = (branch, at)
            reads.forked(branch, [child], at)
        else:
            assert reads.of(Var(name, branch), at) == walk(branch, name, at)


def test_a_deep_lineage_is_walked_once() -> None:
    num_looks = 0

    class Lineage(UserDict[int, tuple[int, int]]):
        def __getitem__(self, branch: int) -> Any:
            nonlocal num_looks
            num_looks += 1
            return super().__getitem__(branch)

    reads = Reads()
    reads._lineage = Lineage()  # type: ignore[assignment]
    reads.generated(0, "x", 0)
    for depth in range(1000):
        reads.forked(depth, [depth + 1], depth + 1)
    assert {reads.of(Var("x", branch), 5000) for branch in range(1, 1001)} == {0}
    assert num_looks < 3000
