"""In which order waiting requests are admitted, and which running one gives way.

Owns the names and the meaning of the queue policies, the two that look into the prefix tree, and the choice of a
victim; `waiting` keeps the queue sorted by them. A policy orders requests of equal priority that were neither put back
nor passed over too often. Nothing here changes anything.

Policies (names are SGLang's, and `program` is ours):

* `fcfs`: in order of arrival.
* `lpm`: longest prefix in the cache first.
* `dfs-weight`: depth first through the prefix tree, the subtree with most waiting requests first, so that requests with
  a common prefix follow each other.
* `lof`: longest allowed output first.
* `random`: each request gets a random place, by the engine's seed, for experiments.
* `program`: started programs before new ones, older before younger; within a program the longest remaining path first,
  and the branches of one fork together.

`lpm` and `dfs-weight` walk the tree for each request: they order the first `TREE_WALKS` in order of arrival only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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


def _longest_prefix(requests: Sequence[Request], match: Match) -> list[Request]:
    lengths = {id(request): match(request)[1] for request in requests}
    return sorted(requests, key=lambda request: -lengths[id(request)])


def _depth_first(requests: Sequence[Request], match: Match) -> list[Request]:
    standing: dict[int, list[Request]] = {}  # node -> requests whose prefix ends there
    weight: dict[int, int] = {}
    below: dict[int, list[RadixNode]] = {}
    roots: dict[int, RadixNode] = {}
    for request in requests:
        node = match(request)[0]
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
    return ordered


RANKED: Mapping[str, Callable[[Sequence[Request], Match], list[Request]]] = {
    "lpm": _longest_prefix,
    "dfs-weight": _depth_first,
}
"""Policies whose order depends on the prefix tree of the moment: from requests in order of arrival to theirs."""


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
