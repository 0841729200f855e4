"""Start-time fair queueing over the clients of one engine, by the seconds that their texts took.

The client that has used the least time is next; its own requests are served in order of arrival. A client that returns
after a while starts at the virtual time of the queue, so that nobody saves up time by staying away. A full queue admits
a client with few requests by evicting the newest request of the client with most: one client cannot fill it for all.
Source: Goyal, Vin, Cheng 1996, https://doi.org/10.1145/248156.248171; for language models: Sheng et al. 2024,
https://arxiv.org/abs/2401.00588.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

from omnidraft.serving.queued_request import QueuedRequest

MAX_IDLE_CLIENTS = 256
"""Clients without a waiting request whose time is remembered."""


class FairQueue:
    """A queue of requests that is fair to clients. It is not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[QueuedRequest]] = {}
        """Only clients with waiting requests, in the order in which they came."""
        self._served_s: dict[str, float] = {}
        self._virtual_time_s = 0.0
        """The time that the client served last had used when its turn came."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, request: QueuedRequest) -> None:
        """Append a request behind the others of its client."""
        if request.client not in self._waiting:
            self._waiting[request.client] = deque()
            self._served_s[request.client] = max(self._served_s.get(request.client, 0.0), self._virtual_time_s)
        self._waiting[request.client].append(request)

    def peek(self) -> QueuedRequest:
        """Return the next request; the queue must not be empty."""
        return self._waiting[self._next_client()][0]

    def next(self) -> QueuedRequest:
        """Remove and return the next request; the queue must not be empty."""
        client = self._next_client()
        self._virtual_time_s = self._served_s[client]
        request = self._waiting[client].popleft()
        self._drop_if_empty(client)
        return request

    def charge(self, client: str, seconds: float) -> None:
        """Add the seconds that a request of this client took."""
        self._served_s[client] = self._served_s.get(client, self._virtual_time_s) + seconds
        if not self._waiting:
            self._served_s.clear()  # nobody is left to share with
            self._virtual_time_s = 0.0
        elif len(self._served_s) - len(self._waiting) > MAX_IDLE_CLIENTS:
            idle = [other for other in self._served_s if other not in self._waiting]
            del self._served_s[min(idle, key=lambda other: self._served_s[other])]

    def remove(self, request: QueuedRequest) -> bool:
        """Remove this request; return False when it does not wait here."""
        waiting = self._waiting.get(request.client, deque())
        if request not in waiting:
            return False
        waiting.remove(request)
        self._drop_if_empty(request.client)
        return True

    def evict_for(self, client: str) -> QueuedRequest | None:
        """Remove and return the newest request of the client with most of them; None unless this client has fewer."""
        most = max(self._waiting, key=lambda each: len(self._waiting[each]))
        if len(self._waiting[most]) <= len(self._waiting.get(client, ())) + 1:
            return None
        return self._waiting[most].pop()

    def clear(self) -> list[QueuedRequest]:
        """Remove and return all requests."""
        requests = [request for waiting in self._waiting.values() for request in waiting]
        self._waiting.clear()
        return requests

    def _next_client(self) -> str:
        return min(self._waiting, key=lambda each: self._served_s[each])

    def _drop_if_empty(self, client: str) -> None:
        if not self._waiting[client]:
            del self._waiting[client]


SHORT_BYTES = 65_536
"""Of a text that is tokenized in less than a tenth of a second."""
_Result = TypeVar("_Result")


class FairTurns:
    """Two lines of clients, each in front of one thread: for short pieces and for long ones."""

    def __init__(self) -> None:
        self._lock_of_client: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._short, self._long = asyncio.Lock(), asyncio.Lock()  # first come, first served

    async def run(self, client: str, work: Callable[[], _Result], num_bytes: int = 0) -> _Result:
        """Return the result of `work` on so many bytes, which runs in a thread when it is this client's turn. Raises
        what it raises."""
        own = self._lock_of_client.setdefault(client, asyncio.Lock())
        async with own, self._long if num_bytes > SHORT_BYTES else self._short:
            return await asyncio.to_thread(work)
