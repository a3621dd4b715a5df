"""Passes over request graphs: pure functions from graph to graph.

Owns what the interpreter applies to each fragment before it is submitted. A pass never changes what the program means:
values keep their branch, name and order. Passes that add or drop nodes number them anew from the graph's first id.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import msgspec

from sgl.lang.graph import Fork, Graph, Join, LiteralText, Node, Release, Segment, Text, Var


def _numbered(graph: Graph, nodes: list[Node]) -> Graph:
    first = graph.nodes[0].id if graph.nodes else 0
    renumbered = tuple(msgspec.structs.replace(node, id=first + index) for index, node in enumerate(nodes))
    return msgspec.structs.replace(graph, nodes=renumbered)


def merge_text(graph: Graph) -> Graph:
    """Join texts that follow each other on a branch; the location of the first stays.

    Example:
        >>> lines = tuple(Text(id=i, segments=(LiteralText(t),)) for i, t in enumerate(["a", "b"]))
        >>> merge_text(Graph(nodes=lines)).nodes[0].segments
        (LiteralText(text='ab'),)
    """
    merged: list[Node] = []
    last: dict[int, int] = {}  # branch -> index in `merged` of its last node, while that is a text
    for node in graph.nodes:
        index = last.get(node.branch)
        if isinstance(node, Text) and index is not None and not _reads(node):
            before = cast(Text, merged[index])
            merged[index] = msgspec.structs.replace(before, segments=_literals((*before.segments, *node.segments)))
            continue
        if isinstance(node, Text):
            last[node.branch] = len(merged)
        else:
            last.pop(node.branch, None)
        merged.append(node)
    return _numbered(graph, merged)


def _reads(node: Text) -> bool:
    """Whether it waits for a value: moving it before another branch's node could then close a cycle."""
    return any(isinstance(segment, Var) for segment in node.segments)


def _literals(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    joined: list[Segment] = []
    run: list[str] = []
    for segment in segments:
        if isinstance(segment, LiteralText):
            run.append(segment.text)
            continue
        if run:
            joined.append(LiteralText("".join(run)))
            run = []
        joined.append(segment)
    if run:
        joined.append(LiteralText("".join(run)))
    return tuple(joined)


def liveness(graph: Graph, dead: Iterable[int]) -> Graph:
    """Release each branch in `dead` after its last use here: its own nodes, forks that make it, joins of it.

    A branch that is not used here is released at the start of the graph; one that a node releases already is left.

    Example:
        >>> graph = liveness(Graph(nodes=(Fork(id=0, children=(1,)), Join(id=1, children=(1,)))), dead=[1])
        >>> [type(node).__name__ for node in graph.nodes], graph.nodes[2].branch
        (['Fork', 'Join', 'Release'], 1)
    """
    waiting = set(dead) - {node.branch for node in graph.nodes if isinstance(node, Release)}
    last_use: dict[int, int] = dict.fromkeys(waiting, -1)
    for index, node in enumerate(graph.nodes):
        used = {node.branch}
        if isinstance(node, (Fork, Join)):
            used.update(node.children)
        if isinstance(node, Text):
            used.update(segment.branch for segment in node.segments if isinstance(segment, Var))
        for branch in used & waiting:
            last_use[branch] = index
    after: dict[int, list[int]] = {}
    for branch in sorted(waiting):
        after.setdefault(last_use[branch], []).append(branch)
    nodes: list[Node] = [Release(id=0, branch=branch) for branch in after.get(-1, ())]
    for index, node in enumerate(graph.nodes):
        nodes.append(node)
        nodes.extend(Release(id=0, branch=branch, location=node.location) for branch in after.get(index, ()))
    return _numbered(graph, nodes)


def common_prefix(graphs: Iterable[Graph]) -> Graph:
    """The longest run of leading nodes that all graphs share, ids and locations aside.

    Where the first nodes that differ are literal texts of one branch, their common beginning is kept as a text.

    Example:
        >>> texts = [Graph(nodes=(Text(id=0, segments=(LiteralText(t),)),)) for t in ("Q: a", "Q: b")]
        >>> common_prefix(texts).nodes[0].segments
        (LiteralText(text='Q: '),)
    """
    rows = [merge_text(graph).nodes for graph in graphs]
    shared: list[Node] = []
    if not rows:
        return Graph(nodes=())
    for nodes in zip(*rows, strict=False):
        bare = [msgspec.structs.replace(node, id=0, location=None) for node in nodes]
        if all(node == bare[0] for node in bare):
            shared.append(nodes[0])
            continue
        text = _common_text(nodes)
        if text:
            shared.append(msgspec.structs.replace(nodes[0], segments=(LiteralText(text),)))
        break
    return Graph(nodes=tuple(shared))


def _common_text(nodes: tuple[Node, ...]) -> str:
    begins = []
    for node in nodes:
        if not isinstance(node, Text) or node.branch != nodes[0].branch:
            return ""
        first = node.segments[0] if node.segments else None
        if not isinstance(first, LiteralText):
            return ""
        begins.append(first.text)
    low, high = min(begins), max(begins)
    length = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return low[:length]
