"""What a submitted graph says about the future: how long the path is that starts at each generation.

Owns pure functions from a graph to numbers. `program_run` asks once per fragment; the scheduler uses the answers to run
the critical path first.
"""

from __future__ import annotations

from sgl.lang.graph import Fork, Gen, Graph, Join, Select, Text, Var


def path_lengths(graph: Graph) -> dict[int, int]:
    """Per `Gen` and `Select`, tokens on the longest chain of generations that begins with it, itself included.

    Generations count as long as they may become; forks lead to their children, joins and variables to who waits.

    Example:
        >>> from sgl.lang.graph import Sampling
        >>> short, long = Sampling(max_new_tokens=5), Sampling(max_new_tokens=50)
        >>> nodes = (
        ...     Fork(id=0, children=(1, 2)),
        ...     Gen(id=1, branch=1, name="a", sampling=short),
        ...     Gen(id=2, branch=2, name="b", sampling=long),
        ...     Join(id=3, children=(1, 2)),
        ...     Gen(id=4, name="c", sampling=short),
        ... )
        >>> path_lengths(Graph(nodes=nodes))
        {4: 5, 2: 55, 1: 10}
    """
    ahead: dict[int, int] = {}  # branch -> tokens from here on
    lengths: dict[int, int] = {}
    for node in reversed(graph.nodes):
        here = ahead.get(node.branch, 0)
        match node:
            case Gen(sampling=sampling):
                lengths[node.id] = ahead[node.branch] = here + sampling.max_new_tokens
            case Select():
                lengths[node.id] = ahead[node.branch] = here + 1
            case Fork(children=children):
                ahead[node.branch] = max(here, *(ahead.pop(child, 0) for child in children), 0)
            case Join(children=children):
                for child in children:
                    ahead[child] = max(ahead.get(child, 0), here)
            case Text(segments=segments):
                for segment in segments:
                    if isinstance(segment, Var) and segment.branch != node.branch:
                        ahead[segment.branch] = max(ahead.get(segment.branch, 0), here)
            case _:
                pass
    return lengths
