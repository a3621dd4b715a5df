"""In which order waiting requests are admitted, and which running one gives way.

Owns the queue policies and the choice of a victim. The scheduler asks `order` only when it could admit something, and
`victim` only when it has to make room or preempt; neither changes anything. Requests of higher priority always come
first; a policy orders those of equal priority. What was put back, and what was passed over too often, comes before
everything else of its priority, so that no order starves anyone.

Policies (names are SGLang's, and `program` is ours):

* `fcfs`: in order of arrival.
* `lpm`: longest prefix in the cache first.
* `dfs-weight`: depth first through the prefix tree, the subtree with most waiting requests first, so that requests with
  a common prefix follow each other.
* `lof`: longest allowed output first.
* `random`: shuffled by the engine's seed, for experiments.
* `program`: started programs before new ones, older before younger; within a program the longest remaining path first,
  and the branches of one fork together.

`lpm` and `dfs-weight` walk the tree for each request: they look at the first `TREE_WALKS` in order of arrival only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

from sgl.runtime.radix import RadixNode
from sgl.runtime.sequence import Request

QueuePolicyName: TypeAlias = Literal["program", "fcfs", "lpm", "dfs-weight", "lof", "random"]
RetractionPolicyName: TypeAlias = Literal["latest", "length", "priority"]

TREE_WALKS = 128
MAX_SKIPS = 256
"""Later requests that may be admitted before a waiting one of the same priority."""

Match: TypeAlias = Callable[[Request], tuple[RadixNode, int]]
"""Where the cached prefix of a request ends, and its length in tokens."""


class QueuePolicy:
    """Orders the waiting requests.

    Args:
        name: which order.
        match: looks a request up in the prefix tree.
        seed: of the `random` order.
    """

    def __init__(self, name: QueuePolicyName, match: Match, *, seed: int = 0) -> None:
        self.name = name
        self._match = match
        self._random = random.Random(seed)
        self._orders: dict[str, Callable[[list[Request]], Iterable[Request]]] = {
            "fcfs": lambda requests: requests,
            "lof": lambda requests: sorted(requests, key=lambda request: -request.new_tokens),
            "program": lambda requests: sorted(requests, key=_program_order),
            "random": self._shuffled,
            "lpm": self._longest_prefix,
            "dfs-weight": self._depth_first,
        }

    def order(self, waiting: Iterable[Request], num_admitted: int) -> list[Request]:
        """The requests, given in order of arrival, in order of admission.

        Args:
            num_admitted: admissions so far; a request is overdue when this reaches its `due`.
        """
        first: list[Request] = []
        fresh: list[Request] = []
        for request in waiting:
            (first if request.last_step or num_admitted >= request.due else fresh).append(request)
        ordered = [*first, *self._orders[self.name](fresh)]
        ordered.sort(key=lambda request: -request.priority)  # stable: the order above holds among equals
        return ordered

    def _shuffled(self, requests: list[Request]) -> list[Request]:
        return self._random.sample(requests, len(requests))

    def _longest_prefix(self, requests: list[Request]) -> list[Request]:
        seen, rest = requests[:TREE_WALKS], requests[TREE_WALKS:]
        lengths = {id(request): self._match(request)[1] for request in seen}
        return sorted(seen, key=lambda request: -lengths[id(request)]) + rest

    def _depth_first(self, requests: list[Request]) -> list[Request]:
        seen, rest = requests[:TREE_WALKS], requests[TREE_WALKS:]
        standing: dict[int, list[Request]] = {}  # node -> requests whose prefix ends there
        weight: dict[int, int] = {}
        below: dict[int, list[RadixNode]] = {}
        roots: dict[int, RadixNode] = {}
        for request in seen:
            node = self._match(request)[0]
            standing.setdefault(id(node), []).append(request)
            while True:
                known = id(node) in weight
                weight[id(node)] = weight.get(id(node), 0) + 1
                if node.parent is None:
                    roots[id(node)] = node
                    break
                if not known:
                    below.setdefault(id(node.parent), []).append(node)
                node = node.parent
        ordered: list[Request] = []
        stack = sorted(roots.values(), key=lambda node: weight[id(node)])
        while stack:
            node = stack.pop()
            ordered += standing.get(id(node), ())
            stack += sorted(below.get(id(node), ()), key=lambda child: weight[id(child)])
        return ordered + rest


def _program_order(request: Request) -> tuple[bool, int, int]:
    program = request.program
    if program is None:
        return (True, 0, -request.path_len)
    return (not program.started, program.number, -request.path_len)


def victim(policy: RetractionPolicyName, running: Sequence[Request], planned: Iterable[int]) -> Request | None:
    """Which running request gives way; `None` when none may.

    The one admitted first never does, so that something always finishes; neither does one that is in the plan already,
    since other chunks of the plan may read what it will write.

    Args:
        policy: `latest` gives up the latest admission; `length` the shortest output, and of equals the longest prompt,
            as these lose least; `priority` the lowest priority, and of equals as `length`.
        running: in order of admission.
        planned: ids of the sequences in the plan.
    """
    taken = set(planned)
    candidates = [request for request in running[1:] if request.sequence.id not in taken]
    if not candidates:
        return None
    match policy:
        case "latest":
            return candidates[-1]
        case "length":
            return min(candidates, key=_loss)
        case "priority":
            return min(candidates, key=lambda request: (request.priority, *_loss(request)))


def _loss(request: Request) -> tuple[int, int]:
    return request.completion_tokens, -request.prompt_len
