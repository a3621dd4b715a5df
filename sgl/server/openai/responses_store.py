"""Responses that are kept for `previous_response_id`, where the operator wants that.

Owns the bound on their bytes, their lease and whose they are: a tenant finds its own alone. When there is no room, the
oldest goes of the tenant that holds the most, so that none flushes another's out. They end with the server.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
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
        self._kept: dict[str, OrderedDict[str, Kept]] = {}  # by tenant, oldest first
        self._bytes: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """Held now."""
        return sum(self._bytes.values())

    def keep(self, tenant: str, response: dict[str, Any], items: list[dict[str, Any]]) -> bool:
        """Keep a response; False where it is larger than all there may be."""
        num_bytes = len(encode(response)) + len(encode(items))
        if num_bytes > self._max_bytes:
            return False
        self._drop_expired()
        while self.num_bytes + num_bytes > self._max_bytes:
            largest = max(self._bytes, key=lambda each: self._bytes[each])
            self._drop(largest, next(iter(self._kept[largest])))
        kept = Kept(response, items, num_bytes, self._clock() + self._lease_s)
        self._kept.setdefault(tenant, OrderedDict())[response["id"]] = kept
        self._bytes[tenant] = self._bytes.get(tenant, 0) + num_bytes
        return True

    def find(self, tenant: str, id: str, param: str | None = None) -> Kept:
        """A response of this tenant.

        Raises:
            NotFound: there is none with this id, or no longer.
        """
        self._drop_expired()
        if tenant in self._kept and id in self._kept[tenant]:
            return self._kept[tenant][id]
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
        for tenant in list(self._kept):
            for id in [id for id, kept in self._kept[tenant].items() if kept.until <= now]:
                self._drop(tenant, id)

    def _drop(self, tenant: str, id: str) -> None:
        kept = self._kept[tenant].pop(id)
        self._bytes[tenant] -= kept.num_bytes
        if not self._kept[tenant]:
            del self._kept[tenant], self._bytes[tenant]
