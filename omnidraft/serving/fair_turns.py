"""Work that takes long enough to be felt, done one piece at a time beside the event loop, with clients taking turns.

A client waits for one piece of each other client, not for the hundred that one of them sent.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

_Result = TypeVar("_Result")


class FairTurns:
    """One line of clients, in front of one thread at a time."""

    def __init__(self) -> None:
        self._lock_of_client: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._lock = asyncio.Lock()  # first come, first served

    async def run(self, client: str, work: Callable[[], _Result]) -> _Result:
        """Return the result of `work`, which runs in a thread when it is this client's turn. Raises what it raises."""
        own = self._lock_of_client.setdefault(client, asyncio.Lock())
        async with own, self._lock:
            return await asyncio.to_thread(work)
