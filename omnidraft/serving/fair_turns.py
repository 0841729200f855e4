"""Work that takes long enough to be felt, done beside the event loop, with clients taking turns.

A client waits for one piece of each other client, not for the hundred that one of them sent; and with a short piece
never for a long one.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

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
