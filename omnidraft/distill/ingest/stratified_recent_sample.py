"""The newest items of every tenant, tenants with equal shares, in bounded memory.

Who is kept depends on what was added and not on the order in which it came: the audit, which reads the log in another
order, keeps the same. A tenant's share never grows once something gave way, so what it dropped is never wanted again.
Where shares cannot be equal, a hash decides which tenants have one more.
"""

import hashlib
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Item = TypeVar("Item")
Newness = tuple[int, int, int]
"""When a record ended in Unix milliseconds, partition, offset: no two records have the same."""


class StratifiedRecentSample(Generic[Item]):
    """At most `capacity` items."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._of_tenant: dict[str, list[tuple[Newness, Item]]] = {}
        self._num = 0
        self._largest_first: list[tuple[int, bytes, str]] = []  # what a tenant has less of by now comes up and goes

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Item]:
        """In no order."""
        return (item for items in self._of_tenant.values() for _, item in items)

    @property
    def num_tenants(self) -> int:
        return len(self._of_tenant)

    def add(self, tenant: str, newness: Newness, item: Item) -> Item | None:
        """Returns what gave way, which may be the new item itself; None while there is room."""
        heappush(self._of_tenant.setdefault(tenant, []), (newness, item))
        self._num += 1
        self._has_changed(tenant)
        return self._give_way() if self._num > self._capacity else None

    def _give_way(self) -> Item:
        """The oldest item of the tenant that has most."""
        tenant = self._largest()
        items = self._of_tenant[tenant]
        _, item = heappop(items)
        self._num -= 1
        if items:
            self._has_changed(tenant)
        else:
            del self._of_tenant[tenant]
        return item

    def _largest(self) -> str:
        while True:
            size, _, tenant = self._largest_first[0]
            if len(self._of_tenant.get(tenant, ())) == -size:
                return tenant
            heappop(self._largest_first)

    def _has_changed(self, tenant: str) -> None:
        heappush(self._largest_first, self._entry(tenant))
        if len(self._largest_first) > 4 * len(self._of_tenant) + 64:
            self._largest_first = [self._entry(each) for each in self._of_tenant]
            heapify(self._largest_first)

    def _entry(self, tenant: str) -> tuple[int, bytes, str]:
        rank = hashlib.sha256(tenant.encode(errors="surrogatepass")).digest()
        return -len(self._of_tenant[tenant]), rank, tenant
