"""Who waits for whom in a graph: which generation a variable reads, and what each node needs to have happened.

Owns pure functions over whole programs (graphs that begin with the main branch). Passes, validation and explaining use
them. The rule by which a variable finds its generation is `sgl.lang.reads`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sgl.lang.graph import ARGUMENTS, Fork, Gen, Graph, Join, Node, Reads, Select, Text, Var


def parents(graph: Graph) -> dict[int, tuple[int, int]]:
    """Per branch that a fork makes: the branch that it continues, and the position of the fork's node.

    Example:
        >>> parents(Graph(nodes=(Fork(id=0, children=(1, 2)),)))
        {1: (0, 0), 2: (0, 0)}
    """
    return {
        child: (node.branch, position)
        for position, node in enumerate(graph.nodes)
        if isinstance(node, Fork)
        for child in node.children
    }


def captures(graph: Graph) -> dict[tuple[int, str], list[int]]:
    """Positions of the generations and selects of each name on each branch, in order."""
    found: dict[tuple[int, str], list[int]] = {}
    for position, node in enumerate(graph.nodes):
        if isinstance(node, (Gen, Select)):
            found.setdefault((node.branch, node.name), []).append(position)
    return found


def variables(graph: Graph) -> Iterator[tuple[int, int, Var]]:
    """Every variable that a text reads, arguments aside: position of the text, place in it, variable."""
    for position, node in enumerate(graph.nodes):
        if isinstance(node, Text):
            for place, segment in enumerate(node.segments):
                if isinstance(segment, Var) and segment.branch != ARGUMENTS:
                    yield position, place, segment


def note_reads(reads: Reads, nodes: Iterable[Node]) -> None:
    """Tell `reads` of more nodes of its program; places are node ids."""
    for node in nodes:
        if isinstance(node, (Gen, Select)):
            reads.generated(node.branch, node.name, node.id)
        elif isinstance(node, Fork):
            reads.forked(node.branch, node.children, node.id)


def reads_of(nodes: Iterable[Node]) -> Reads:
    """What the variables of these nodes read."""
    reads = Reads()
    note_reads(reads, nodes)
    return reads


def sources(graph: Graph) -> dict[tuple[int, int], int | None]:
    """Positions of the generations that variables read (`None`: there is none), by position of the text and place in
    it."""
    reads = reads_of(graph.nodes)
    positions = {node.id: position for position, node in enumerate(graph.nodes)}
    found: dict[tuple[int, int], int | None] = {}
    for at, place, variable in variables(graph):
        source = reads.of(variable, graph.nodes[at].id)
        found[at, place] = positions[source] if source is not None else None
    return found


def needs(graph: Graph) -> list[set[int]]:
    """Per position, the positions of the nodes that have to be done before.

    Example:
        >>> needs(Graph(nodes=(Fork(id=0, children=(1,)), Gen(id=1, branch=1, name="x"), Join(id=2, children=(1,)))))
        [set(), {0}, {0, 1}]
    """
    last: dict[int, int] = {}
    lineage = parents(graph)
    found: list[set[int]] = []
    reads: dict[int, set[int]] = {}
    for (at, _), source in sources(graph).items():
        if source is not None:
            reads.setdefault(at, set()).add(source)
    for position, node in enumerate(graph.nodes):
        before = last.get(node.branch)
        if before is None and node.branch in lineage:
            before = lineage[node.branch][1]
        needed = {before} if before is not None else set()
        if isinstance(node, Join):
            needed |= {last.get(child, lineage[child][1] if child in lineage else position) for child in node.children}
        found.append(needed | reads.get(position, set()) - {position})
        last[node.branch] = position
    return found
