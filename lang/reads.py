"""Which generation a variable of a text reads.

Owns the rule, for everything that executes, foresees or shows a graph. Part of the graph's contract: other rooms import
it from `sgl.lang.graph`. It knows numbers and names alone; a place is a node's id, or its position in a whole graph:
whatever increases in program order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Protocol


class _Variable(Protocol):
    @property
    def branch(self) -> int: ...
    @property
    def name(self) -> str: ...


class Reads:
    """The generations of a program so far, and what its variables read of them.

    A variable has the value of the last generation of its name on its branch before the text, or else of the first one
    after it, which the text waits for; on a branch that has none, what its parent had at the fork.

    Example:
        >>> from sgl.lang.graph import Var
        >>> reads = Reads()
        >>> reads.generated(0, "x", at=0)
        >>> reads.forked(0, (1,), at=1)
        >>> reads.generated(0, "x", at=2)
        >>> reads.generated(1, "y", at=4)
        >>> reads.of(Var("x", 0), 3), reads.of(Var("x", 1), 3), reads.of(Var("y", 1), 3), reads.of(Var("y", 0), 5)
        (2, 0, 4, None)
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, str], list[int]] = {}
        self._lineage: dict[int, tuple[int, int]] = {}
        self._inherited: dict[tuple[int, str], int | None] = {}  # what was found so far: forks of forks may be deep

    def generated(self, branch: int, name: str, at: int) -> None:
        """A generation or select of the program, behind those before it."""
        self._made.setdefault((branch, name), []).append(at)
        self._inherited.clear()

    def forked(self, branch: int, children: Iterable[int], at: int) -> None:
        """A fork of the program."""
        self._lineage.update(dict.fromkeys(children, (branch, at)))

    def of(self, variable: _Variable, at: int) -> int | None:
        """The place of the generation that `variable` reads in a text at `at`; `None` while there is none."""
        places = self._made.get((variable.branch, variable.name), [])
        before = bisect_left(places, at)
        if before:
            return places[before - 1]
        return places[0] if places else self._from_parent(variable.branch, variable.name)

    def _from_parent(self, branch: int, name: str) -> int | None:
        """What the branch had of a name when it was forked."""
        passed = []
        found: int | None = None
        while branch in self._lineage:
            if (branch, name) in self._inherited:
                found = self._inherited[branch, name]
                break
            passed.append(branch)
            branch, until = self._lineage[branch]
            places = self._made.get((branch, name), [])
            if before := bisect_left(places, until):
                found = places[before - 1]
                break
        self._inherited.update(((each, name), found) for each in passed)
        return found
