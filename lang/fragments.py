"""What a running program has submitted: fragments with their numbers, the branches that live, values still to come.

Owns the numbering of nodes over all fragments, which branches exist on the backend and which are used no more, state
handles, and the captures that wait for their event. Called by `interpreter.Program` under its lock, except `abandon`,
which takes none. Fails with `InvalidProgram` for a fragment that breaks a rule of the graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from sgl.errors import InvalidProgram, SourceLocation
from sgl.lang.capture import Capture
from sgl.lang.graph import (
    MAIN_BRANCH,
    Fork,
    Gen,
    Graph,
    HandlesEvent,
    Node,
    Release,
    Select,
    StateHandle,
    ValueEvent,
    validate,
)
from sgl.lang.passes import liveness, merge_text

Buffered = tuple[Node, Capture | None]


class Fragments:
    """The fragments of one program so far.

    Attributes:
        captures: by node, until their event.
    """

    def __init__(self) -> None:
        self.captures: dict[int, Capture] = {}
        self._locations: dict[int, SourceLocation | None] = {}
        self._next_node = 0
        self._live: set[int] = {MAIN_BRANCH}  # on the backend, after everything submitted
        self._next_live: set[int] = {MAIN_BRANCH}  # after the fragment that is on its way
        self._abandoned: deque[int] = deque()  # filled by finalizers, at any moment
        self._dead: set[int] = set()  # used no more, not yet released
        self._handles: dict[int, StateHandle] = {}
        self._start = 0
        self._confirmed = False  # the backend is known to have the latest fragment

    def abandon(self, branch: int) -> None:
        """The branch is used no more: it is released with the next fragment. Safe in a finalizer: takes no lock."""
        self._abandoned.append(branch)

    def make(self, buffered: Sequence[Buffered], *, finish: bool) -> Graph:
        """The next fragment out of buffered nodes; `submitted` says that the backend has it."""
        nodes = [msgspec.structs.replace(node, id=self._next_node + i) for i, (node, _) in enumerate(buffered)]
        graph = liveness(merge_text(Graph(nodes=tuple(nodes))), self._to_release(nodes, finish))
        if nodes and graph.nodes and graph.nodes[0].id != self._next_node:
            raise InvalidProgram("internal numbering of nodes is broken")
        self._note(graph, [capture for _, capture in buffered if capture is not None])
        touched = {node.branch for node in graph.nodes}
        handles = tuple(self._handles.pop(branch) for branch in sorted(touched & set(self._handles)))
        graph = msgspec.structs.replace(graph, handles=handles)
        self._next_live = validate(graph, self._live)
        self._start = self._next_node
        self._next_node += len(graph.nodes)
        self._confirmed = False
        return graph

    def submitted(self) -> None:
        """The backend took the fragment that was made last."""
        self._live = self._next_live

    def _to_release(self, nodes: Sequence[Node], finish: bool) -> set[int]:
        """Branches that nobody uses after `nodes`."""
        born = {child for node in nodes if isinstance(node, Fork) for child in node.children}
        present = self._live | born
        released = {node.branch for node in nodes if isinstance(node, Release)}
        while self._abandoned:
            self._dead.add(self._abandoned.popleft())
        # At the end every branch is dead, but its pages may go before the others are done.
        dead = (present - {MAIN_BRANCH} if finish and nodes else self._dead & present) - released
        self._dead -= dead | released
        return dead

    def _note(self, graph: Graph, captures: Iterable[Capture]) -> None:
        """Remember the line of each node, and give each generation and select its capture."""
        waiting = iter(captures)
        for node in graph.nodes:
            self._locations[node.id] = node.location
            if isinstance(node, (Gen, Select)):
                capture = next(waiting)
                capture.node = node.id
                self.captures[node.id] = capture

    # --- what came back ---

    def location(self, node: int) -> SourceLocation | None:
        """The program line that made a node."""
        return self._locations.get(node)

    def take_value(self, event: ValueEvent) -> Capture | None:
        """Fill the capture of an event; it is returned."""
        self.passed(event.node)
        capture = self.captures.pop(event.node, None)
        if capture is not None:
            capture.event = event
        return capture

    def passed(self, node: int) -> None:
        """The backend is known to have executed a node."""
        self._confirmed = self._confirmed or node >= self._start

    def take_handles(self, event: HandlesEvent) -> None:
        """Keep them, unless they were on their way when the latest fragment left: those speak of an older state."""
        if self._confirmed:
            self._handles.update({handle.branch: handle for handle in event.handles})
