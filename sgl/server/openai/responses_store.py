"""Responses that are kept for `previous_response_id`, where the operator wants that.

Owns the bound on their bytes, their lease and whose they are: a tenant finds its own alone. When there is no room, the
oldest goes of the tenant that holds the most, so that none flushes another's out. They end with the server.

All have one lease, so the oldest expires first: what an operation drops it finds at the front, and each response is
dropped once. Making room looks at the tenants, which are as many as the server has keys.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sgl.errors import NotFound
from sgl.server.failures import encode


@dataclass(frozen=True)
class Kept:
    """A response, and the items of its conversation: those before it, its input and its output."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    num_bytes: int
    until: float

    @property
    def input(self) -> list[dict[str, Any]]:
        """What the response answers: the items before its output."""
        return self.items[: len(self.items) - len(self.response.get("output", ()))]


@dataclass
class _Holding:
    """What one tenant holds; ids in the order in which they came."""

    ids: OrderedDict[str, None] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class ResponseStore:
    """Responses by tenant and id.

    Args:
        max_bytes: of all of them, as JSON.
        lease_s: that each is kept.

    Example:
        >>> store = ResponseStore(max_bytes=1000, lease_s=60)
        >>> store.keep("tenant", {"id": "resp-1"}, [])
        True
        >>> store.find("tenant", "resp-1").response
        {'id': 'resp-1'}
        >>> store.find("another", "resp-1")
        Traceback (most recent call last):
        sgl.errors.NotFound: there is no response 'resp-1' (it may have expired; send the whole conversation as input)
    """

    def __init__(self, max_bytes: int, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._lease_s = lease_s
        self._clock = clock
        self._kept: OrderedDict[tuple[str, str], Kept] = OrderedDict()  # by tenant and id, oldest first
        self._held: dict[str, _Holding] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Held now."""
        return self._num_bytes

    def keep(self, tenant: str, response: dict[str, Any], items: list[dict[str, Any]]) -> bool:
        """Keep a response; False where it is larger than all there may be."""
        num_bytes = len(encode(response)) + len(encode(items))
        if num_bytes > self._max_bytes:
            return False
        self._drop_expired()
        while self._num_bytes + num_bytes > self._max_bytes:
            largest = max(self._held, key=lambda each: self._held[each].num_bytes)
            self._drop(largest, next(iter(self._held[largest].ids)))
        id = response["id"]
        self._kept[tenant, id] = Kept(response, items, num_bytes, self._clock() + self._lease_s)
        holding = self._held.setdefault(tenant, _Holding())
        holding.ids[id] = None
        holding.num_bytes += num_bytes
        self._num_bytes += num_bytes
        return True

    def find(self, tenant: str, id: str, param: str | None = None) -> Kept:
        """A response of this tenant.

        Raises:
            NotFound: there is none with this id, or no longer.
        """
        self._drop_expired()
        if (kept := self._kept.get((tenant, id))) is not None:
            return kept
        raise NotFound(
            f"there is no response {id!r}",
            hint="it may have expired; send the whole conversation as input",
            param=param,
        )

    def delete(self, tenant: str, id: str) -> None:
        """Forget one; raises like `find`."""
        self.find(tenant, id)
        self._drop(tenant, id)

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._kept:
            (tenant, id), oldest = next(iter(self._kept.items()))
            if oldest.until > now:
                return
            self._drop(tenant, id)

    def _drop(self, tenant: str, id: str) -> None:
        kept = self._kept.pop((tenant, id))
        holding = self._held[tenant]
        del holding.ids[id]
        holding.num_bytes -= kept.num_bytes
        self._num_bytes -= kept.num_bytes
        if not holding.ids:
            del self._held[tenant]
