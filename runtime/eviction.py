"""Which cached pages go first: the eviction policies of the radix tree.

Owns the policies and the strict reading of their parameters. A policy only ranks leaves that nobody uses; the tree
decides what is a candidate and how much goes, and asks again whenever something that a rank depends on has changed.
No policy pins: what it ranks last still goes when nothing else is left. Ties go to the least recently used.

Names, parameters and defaults are SGLang's, and `program` is ours:

| name | goes first | parameters |
|---|---|---|
| `program` | what released states left, then what no submitted graph needs, then what is needed last | |
| `lru` | what was unused longest | |
| `lfu` | what later requests found least often | |
| `slru` | what was found fewer than `protected_threshold` times | `protected_threshold` (2) |
| `priority` | what only requests of low priority used | |
| `tlru` | the tail that a conversation can lose and still meet its budget | `threshold`, `next_prompt_estimate` |
| `fifo` | what was computed first | |
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, TypeAlias

import msgspec
from msgspec import Meta

from sgl.errors import ConfigError

if TYPE_CHECKING:
    from sgl.runtime.radix import RadixNode

Rank: TypeAlias = tuple[float, ...]
EvictionPolicyName: TypeAlias = Literal["program", "lru", "lfu", "slru", "priority", "tlru", "fifo"]


class EvictionPolicy(Protocol):
    """Ranks leaves. Stateless: everything it looks at stands in the node."""

    looks_ahead: ClassVar[bool]
    """Whether `RadixNode.next_use` matters, which costs the scheduler a look at the queue."""

    def rank(self, node: RadixNode) -> Rank:
        """The lowest goes first; all ranks of one policy have the same length."""

    def portion(self, node: RadixNode) -> int:
        """Most pages to take off the node's end before it is ranked again."""


class _Whole(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy whose rank holds for all of a node."""

    looks_ahead: ClassVar[bool] = False

    def portion(self, node: RadixNode) -> int:
        return len(node.pages)


class Lru(_Whole, frozen=True, forbid_unknown_fields=True):
    """By the last use."""

    def rank(self, node: RadixNode) -> Rank:
        return (node.touched,)


class Lfu(_Whole, frozen=True, forbid_unknown_fields=True):
    """By the number of later requests that found it, then by the last use."""

    def rank(self, node: RadixNode) -> Rank:
        return node.hits, node.touched


class Slru(_Whole, frozen=True, forbid_unknown_fields=True):
    """Two segments, each by the last use: what was found often enough goes after everything else.

    Args:
        protected_threshold: how often that is.
    """

    protected_threshold: Annotated[int, Meta(ge=1)] = 2

    def rank(self, node: RadixNode) -> Rank:
        return node.hits >= self.protected_threshold, node.touched


class Priority(_Whole, frozen=True, forbid_unknown_fields=True):
    """By the highest priority of the requests that used it, then by the last use."""

    def rank(self, node: RadixNode) -> Rank:
        return node.priority, node.touched


class Fifo(_Whole, frozen=True, forbid_unknown_fields=True):
    """By the time it was computed."""

    def rank(self, node: RadixNode) -> Rank:
        return node.created, node.touched


class Tlru(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tail-optimized LRU (arXiv:2510.15152): what a conversation can lose without missing its budget goes first.

    The next prompt of a conversation computes what the cache lost of its history, and its own tokens. While that is at
    most `threshold`, time to first token stays within its target; so the last `threshold - next_prompt_estimate` tokens
    of a history are not worth keeping. After these, by the last use.

    Args:
        threshold: most tokens that a prompt should compute.
        next_prompt_estimate: tokens that a turn adds, on average.
    """

    looks_ahead: ClassVar[bool] = False

    threshold: Annotated[int, Meta(ge=1)]
    next_prompt_estimate: Annotated[int, Meta(ge=0)]

    def rank(self, node: RadixNode) -> Rank:
        return not self._spare(node), node.touched

    def portion(self, node: RadixNode) -> int:
        return self._spare(node) or len(node.pages)

    def _spare(self, node: RadixNode) -> int:
        """Pages at the node's end beyond what its conversation has to keep."""
        keep = node.reach - (self.threshold - self.next_prompt_estimate)
        return min(len(node.pages), max(0, node.end - keep) * len(node.pages) // len(node.tokens))


class Program(_Whole, frozen=True, forbid_unknown_fields=True):
    """By what the submitted graphs say of the future.

    First what forked states left when they were released: their program does not read it again, and others hardly can.
    Then what no submitted graph is known to need, by the last use. Last what waiting requests and live states will
    use, farthest use first.
    """

    looks_ahead: ClassVar[bool] = True

    def rank(self, node: RadixNode) -> Rank:
        if node.next_use < math.inf:
            return 2, -node.next_use, node.touched
        return not node.dead, 0, node.touched


POLICIES: Mapping[str, type[EvictionPolicy]] = {
    "program": Program,
    "lru": Lru,
    "lfu": Lfu,
    "slru": Slru,
    "priority": Priority,
    "tlru": Tlru,
    "fifo": Fifo,
}


def make_policy(name: str, parameters: Mapping[str, Any] | None = None) -> EvictionPolicy:
    """The policy called `name`.

    Raises:
        ConfigError: no such policy, a parameter that it does not have or lacks, or a value out of range.

    Example:
        >>> make_policy("slru", {"protected_threshold": 4})
        Slru(protected_threshold=4)
        >>> make_policy("slru", {"threshold": 4})
        Traceback (most recent call last):
        sgl.errors.ConfigError: eviction policy 'slru' has no parameter 'threshold' (it has protected_threshold)
    """
    kind = POLICIES.get(name)
    if kind is None:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        raise ConfigError(
            f"unknown eviction policy {name!r}",
            hint=f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(POLICIES)}",
            param="radix_eviction_policy",
        )
    given = dict(parameters or {})
    known: tuple[str, ...] = kind.__struct_fields__  # type: ignore[attr-defined]
    for key in given:
        if key not in known:
            raise _wrong(f"eviction policy {name!r} has no parameter {key!r}", f"it has {', '.join(known) or 'none'}")
    try:
        policy = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _wrong(f"eviction policy {name!r}: {error}", f"its parameters are {', '.join(known)}") from None
    if isinstance(policy, Tlru) and policy.threshold <= policy.next_prompt_estimate:
        raise _wrong(
            f"threshold is {policy.threshold} and next_prompt_estimate {policy.next_prompt_estimate}: nothing could be "
            "spared, as with 'lru'",
            "raise threshold above next_prompt_estimate",
        )
    return policy


def parse_parameters(name: str, text: str | None) -> dict[str, int]:
    """The parameters of policy `name` from JSON text, checked by making the policy.

    Raises:
        ConfigError: as `make_policy`, or the text is no JSON object.
    """
    try:
        given = msgspec.json.decode(text) if text is not None else {}
    except msgspec.DecodeError as error:
        raise _wrong(f"radix_eviction_policy_config {text!r} is no JSON: {error}", "give a JSON object") from None
    if not isinstance(given, dict):
        raise _wrong(f"radix_eviction_policy_config is {text!r}", 'give a JSON object, as {"protected_threshold": 4}')
    make_policy(name, given)
    return given


def _wrong(message: str, hint: str) -> ConfigError:
    return ConfigError(message, hint=hint, param="radix_eviction_policy_config")
