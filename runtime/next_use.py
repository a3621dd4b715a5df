"""When each state of a program is computed on next, as far as its submitted graph says.

Owns a small simulation of the nodes that a program has yet to execute, in steps of the engine. `program_run` asks when
the scheduler runs out of memory; the answers order what is given up. Generations take as many steps as they may have
tokens, a select takes one, everything else none; waiting for free rows is not foreseen. Only the order of the answers
matters much, and only what was submitted is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sgl.lang.graph import Fork, Gen, Join, Release, Select, Text, Var


class Lane(NamedTuple):
    """A branch: the nodes that it has yet to execute, and the steps until it gets to them."""

    nodes: Sequence[object]
    delay: float = 0.0


def next_uses(
    lanes: Mapping[int, Lane],
    unborn: Mapping[int, Sequence[object]],
    values: Mapping[tuple[int, str], float],
    lineage: Mapping[int, int],
) -> dict[int, float]:
    """Steps until each branch is computed on; without those that never are, or of which nothing is known.

    Args:
        lanes: the branches that exist, by number.
        unborn: nodes of branches that a fork is going to make.
        values: (branch, name) -> steps until the value exists.
        lineage: branch -> the one it was or will be forked from.

    Example:
        >>> from sgl.lang.graph import Sampling
        >>> ten = Sampling(max_new_tokens=10)
        >>> main = Lane((Join(id=2, children=(1,)), Gen(id=3, name="y", sampling=ten)))
        >>> child = Lane((Gen(id=1, branch=1, name="x", sampling=ten),), 5)
        >>> next_uses({0: main, 1: child}, {}, {}, {1: 0})
        {1: 5, 0: 15}
    """
    return _Simulation(lanes, unborn, values, lineage).run()


class _Simulation:
    def __init__(
        self,
        lanes: Mapping[int, Lane],
        unborn: Mapping[int, Sequence[object]],
        values: Mapping[tuple[int, str], float],
        lineage: Mapping[int, int],
    ) -> None:
        self._nodes = {id: lane.nodes for id, lane in lanes.items()}
        self._unborn = unborn
        self._clock = {id: lane.delay for id, lane in lanes.items()}
        self._position = dict.fromkeys(lanes, 0)
        self._values = dict(values)
        self._lineage = lineage
        self._uses: dict[int, float] = {}

    def run(self) -> dict[int, float]:
        waiting = list(self._nodes)
        moved = True
        while moved and waiting:
            moved = False
            for id in tuple(waiting):
                while self._position[id] < len(self._nodes[id]) and self._execute(
                    id, self._nodes[id][self._position[id]], waiting
                ):
                    self._position[id] += 1
                    moved = True
                if self._is_done(id):
                    waiting.remove(id)
        return self._uses

    def _execute(self, id: int, node: object, waiting: list[int]) -> bool:
        """Go past a node; False when it has to wait."""
        match node:
            case Gen(name=name, sampling=sampling):
                self._compute(id, name, sampling.max_new_tokens)
            case Select(name=name):
                self._compute(id, name, 1)
            case Fork(children=children):
                self._uses.setdefault(id, self._clock[id])
                for child in children:
                    self._nodes[child] = self._unborn.get(child, ())
                    self._clock[child] = self._clock[id]
                    self._position[child] = 0
                    waiting.append(child)
            case Join(children=children):
                if not all(self._is_done(child) for child in children):
                    return False
                self._clock[id] = max(self._clock[id], *(self._clock.get(child, 0.0) for child in children))
            case Text(segments=segments):
                times = [self._value(segment) for segment in segments if isinstance(segment, Var)]
                if None in times:
                    return False
                self._clock[id] = max(self._clock[id], *(time for time in times if time is not None), 0.0)
            case Release():
                return False
            case _:
                pass
        return True

    def _compute(self, id: int, name: str, num_steps: int) -> None:
        self._uses.setdefault(id, self._clock[id])
        self._clock[id] += num_steps
        self._values[id, name] = self._clock[id]

    def _is_done(self, id: int) -> bool:
        """Whether a branch has nothing left that a join would wait for; one that is gone has not."""
        if id not in self._nodes:
            return id not in self._unborn
        position = self._position[id]
        return position >= len(self._nodes[id]) or isinstance(self._nodes[id][position], Release)

    def _value(self, variable: Var) -> float | None:
        """When a value exists: the branch's own, or that of one it was forked from."""
        walk: int | None = variable.branch
        while walk is not None:
            if (walk, variable.name) in self._values:
                return self._values[walk, variable.name]
            walk = self._lineage.get(walk)
        return None
