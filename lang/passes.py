"""Passes over request graphs: pure functions from graph to graph.

Owns what the interpreter applies to each fragment before it is submitted (`merge_text`, `liveness`), and what the
compiler applies to a whole program besides. A pass never changes what the program means: values keep their branch, name
and order; `independent` alone moves them, because its caller says so. Passes that add or drop nodes number them anew
from the graph's first id.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from typing import cast

import msgspec

from sgl.errors import InvalidProgram
from sgl.lang.dataflow import sources
from sgl.lang.graph import Fork, Gen, Graph, Join, LiteralText, Node, Release, Segment, Select, Text, Var


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
    runs: dict[int, list[Segment]] = {}  # index in `merged` -> all segments of the texts that were joined there
    last: dict[int, int] = {}  # branch -> index in `merged` of its last node, while that is a text
    for node in graph.nodes:
        index = last.get(node.branch)
        if isinstance(node, Text) and index is not None and not _reads(node):
            runs.setdefault(index, list(cast(Text, merged[index]).segments)).extend(node.segments)
            continue
        if isinstance(node, Text):
            last[node.branch] = len(merged)
        else:
            last.pop(node.branch, None)
        merged.append(node)
    for index, segments in runs.items():
        merged[index] = msgspec.structs.replace(cast(Text, merged[index]), segments=_literals(segments))
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


def known_next(graph: Graph) -> Graph:
    """Tell each generation the literal text that follows it on its branch (`Gen.next_text`).

    Example:
        >>> graph = known_next(Graph(nodes=(Gen(id=0, name="x"), Text(id=1, segments=(LiteralText(" and "),)))))
        >>> graph.nodes[0].next_text
        ' and '
    """
    following: dict[int, str] = {}  # by branch
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        if isinstance(node, Gen):
            node = msgspec.structs.replace(node, next_text=following.get(node.branch, ""))
        following[node.branch] = _beginning(node) + (following.get(node.branch, "") if _is_literal(node) else "")
        nodes.append(node)
    return msgspec.structs.replace(graph, nodes=tuple(reversed(nodes)))


def _is_literal(node: Node) -> bool:
    return isinstance(node, Text) and not _reads(node)


def _beginning(node: Node) -> str:
    """The literal text that a node begins with."""
    texts: list[str] = []
    for segment in node.segments if isinstance(node, Text) else ():
        if not isinstance(segment, LiteralText):
            break
        texts.append(segment.text)
    return "".join(texts)


def fork_groups(graph: Graph) -> Graph:
    """Make one fork of forks that follow each other on a branch: their children are then scheduled as one group.

    Example:
        >>> graph = fork_groups(Graph(nodes=(Fork(id=0, children=(1,)), Fork(id=1, children=(2, 3)))))
        >>> [node.children for node in graph.nodes]
        [(1, 2, 3)]
    """
    nodes: list[Node] = []
    last: dict[int, int] = {}  # branch -> index in `nodes` of its last node, while that is a fork
    for node in graph.nodes:
        index = last.get(node.branch)
        if isinstance(node, Fork) and index is not None:
            first = cast(Fork, nodes[index])
            nodes[index] = msgspec.structs.replace(first, children=(*first.children, *node.children))
            continue
        if isinstance(node, Fork):
            last[node.branch] = len(nodes)
        else:
            last.pop(node.branch, None)
        nodes.append(node)
    return _numbered(graph, nodes)


def select_tries(graph: Graph, scores: Container[str] = ()) -> Graph:
    """Score options along their trie only until the best one is certain, in selects whose scores nobody wants.

    The option found is the same. Selects that draw (`temperature` > 0) or whose method has no bound are left.

    Args:
        scores: names of selects whose scores of all options are wanted.

    Example:
        >>> select_tries(Graph(nodes=(Select(id=0, name="x", choices=("a", "b")),))).nodes[0].all_scores
        False
    """
    nodes = [
        msgspec.structs.replace(node, all_scores=False)
        if isinstance(node, Select)
        and node.name not in scores
        and node.temperature == 0
        and node.method != "unconditional_likelihood_normalized"
        else node
        for node in graph.nodes
    ]
    return msgspec.structs.replace(graph, nodes=tuple(nodes))


def independent(graph: Graph, names: Collection[str]) -> Graph:
    """Generate values in parallel that the caller says do not depend on each other.

    Where generations of these names follow each other on a branch, with text alone between them, each is made on a
    branch of its own, which has everything before the first generation, and the text between the one before and this
    one; then all are appended in order. The text that comes out has the same shape, but a generation no longer sees its
    siblings: that is what the caller gives up.

    Raises:
        InvalidProgram: the text before one of them reads the value of another.

    Example:
        >>> ask = [Gen(id=0, name="x"), Text(id=1, segments=(LiteralText(" y: "),)), Gen(id=2, name="y")]
        >>> graph = independent(Graph(nodes=tuple(ask)), ["x", "y"])
        >>> [(type(node).__name__, node.branch) for node in graph.nodes[:5]]
        [('Fork', 0), ('Gen', 1), ('Text', 2), ('Gen', 2), ('Join', 0)]
    """
    runs = _runs(graph, names)
    moved: dict[int, int] = {}  # position -> its new branch
    begins: dict[int, list[int]] = {}  # first position of a run -> new branches
    ends: dict[int, list[int]] = {}  # last position of a run -> new branches
    free = max((child for node in graph.nodes if isinstance(node, Fork) for child in node.children), default=0) + 1
    for run in runs:
        children = list(range(free, free + len(run)))
        free += len(run)
        for child, positions in zip(children, run, strict=True):
            moved.update(dict.fromkeys(positions, child))
        begins[run[0][0]] = ends[run[-1][-1]] = children
    read = sources(graph)
    nodes: list[Node] = []
    for position, node in enumerate(graph.nodes):
        if isinstance(node, Text):
            node = _follow(graph, node, position, read, moved)
        if position in begins:
            children = begins[position]
            nodes.append(Fork(id=0, branch=node.branch, location=node.location, children=tuple(children)))
        nodes.append(msgspec.structs.replace(node, branch=moved.get(position, node.branch)))
        if position in ends:
            children = ends[position]
            nodes.append(
                Join(id=0, branch=node.branch, location=node.location, children=tuple(children), mode="append")
            )
            nodes.extend(Release(id=0, branch=child, location=node.location) for child in children)
    return _numbered(graph, nodes)


def _runs(graph: Graph, names: Collection[str]) -> list[list[list[int]]]:
    """Runs of at least two generations of these names: of each its position, behind those of texts that go along."""
    runs: list[list[list[int]]] = []
    open_runs: dict[int, list[list[int]]] = {}
    texts: dict[int, list[int]] = {}
    for position, node in enumerate(graph.nodes):
        branch = node.branch
        if isinstance(node, Text):
            texts.setdefault(branch, []).append(position)
        elif isinstance(node, Gen) and node.name in names:
            run = open_runs.setdefault(branch, [])
            run.append([*(texts.get(branch, []) if run else []), position])
            texts.pop(branch, None)
        else:
            runs.append(open_runs.pop(branch, []))
            texts.pop(branch, None)
    return sorted(run for run in (*runs, *open_runs.values()) if len(run) > 1)


def _follow(
    graph: Graph, node: Text, position: int, read: Mapping[tuple[int, int], int | None], moved: Mapping[int, int]
) -> Text:
    """A text whose variables are looked for where their generations have been moved to."""
    segments: list[Segment] = []
    for place, segment in enumerate(node.segments):
        source = read.get((position, place))
        if isinstance(segment, Var) and source is not None and source in moved:
            if position in moved and graph.nodes[source].branch == node.branch and source < position:
                raise InvalidProgram(
                    f"the text reads {segment.name!r}, so what follows depends on it",
                    hint="leave one of the two out of the independent names",
                    location=node.location,
                )
            segment = Var(segment.name, moved[source])
        segments.append(segment)
    return msgspec.structs.replace(node, segments=tuple(segments))
