"""Whether a whole program's graph makes sense, said with the lines of the program.

Owns the checks that compiling makes and that a fragment cannot have: they need to see all of a program. What holds for
every graph is `sgl.lang.graph.validate`, which is called first; that an empty list is no choice, the node itself says.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter

from sgl.errors import InvalidProgram
from sgl.lang.dataflow import captures, needs, sources
from sgl.lang.graph import ARGUMENTS, Graph, LiteralText, Node, Text, Var, validate


def check(graph: Graph, parameters: Collection[str] = ()) -> None:
    """Raise what is wrong with a whole program.

    Args:
        parameters: names that its arguments may have.

    Raises:
        InvalidProgram: a branch used after its release, a variable that nothing captures, an argument that is no
            parameter, a name captured twice on one branch, or nodes that wait for each other; `location` is the line.

    Example:
        >>> check(Graph(nodes=(Text(id=0, segments=(Var("x"),)),)))
        Traceback (most recent call last):
        sgl.errors.InvalidProgram: nothing captures 'x' on branch 0 (names there: none)
    """
    validate(_without_arguments(graph))
    _check_names(graph)
    _check_variables(graph, parameters)
    _check_order(graph)


def _without_arguments(graph: Graph) -> Graph:
    """The graph as it will be with its arguments filled in, as far as `validate` looks."""
    nodes: list[Node] = [
        Text(id=node.id, branch=node.branch, location=node.location, segments=(LiteralText("x"),))
        if isinstance(node, Text)
        else node
        for node in graph.nodes
    ]
    return Graph(nodes=tuple(nodes), protocol=graph.protocol)


def _check_names(graph: Graph) -> None:
    for (_, name), positions in captures(graph).items():
        if len(positions) > 1:
            first, second = (graph.nodes[position].location for position in positions[:2])
            raise InvalidProgram(
                f"{name!r} is captured twice on one branch, first at {first}",
                hint="give each its own name: in a compiled program a name has one value, also with list_append",
                location=second,
            )


def _check_variables(graph: Graph, parameters: Collection[str]) -> None:
    found = sources(graph)
    names = captures(graph)
    for position, node in enumerate(graph.nodes):
        for place, segment in enumerate(node.segments if isinstance(node, Text) else ()):
            if not isinstance(segment, Var):
                continue
            if segment.branch == ARGUMENTS:
                if segment.name not in parameters:
                    raise InvalidProgram(f"{segment.name!r} is no parameter of this program", location=node.location)
            elif found[position, place] is None:
                known = sorted({name for branch, name in names if branch == segment.branch})
                near = difflib.get_close_matches(segment.name, known, n=1)
                raise InvalidProgram(
                    f"nothing captures {segment.name!r} on branch {segment.branch}",
                    hint=f"did you mean {near[0]!r}?" if near else f"names there: {', '.join(known) or 'none'}",
                    location=node.location,
                )


def _check_order(graph: Graph) -> None:
    try:
        TopologicalSorter(dict(enumerate(needs(graph)))).prepare()
    except CycleError as error:
        nodes = [graph.nodes[position] for position in sorted(set(error.args[1]))]
        lines = ", ".join(dict.fromkeys(str(node.location) for node in nodes if node.location is not None))
        raise InvalidProgram(
            "the program waits for itself: " + " and ".join(f"{type(n).__name__.lower()} {n.id}" for n in nodes),
            hint=f"the lines concerned: {lines}" if lines else "",
            location=nodes[-1].location,
        ) from None
