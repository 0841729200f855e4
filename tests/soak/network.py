"""A network between processes of this machine that can be cut."""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from omnidraft.demo.local_cluster import free_port

CHUNK_BYTES = 1 << 16


class Network:
    """The way to one port: what comes in at `port` goes on to `behind`, from a thread of its own."""

    def __init__(self, behind: int) -> None:
        self.port, self._behind = free_port(), behind
        self._loop, self._flows = asyncio.new_event_loop(), asyncio.Event()
        self._flows.set()
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"network to {behind}", daemon=True)
        self._thread.start()
        self.mend()

    def lose(self) -> None:
        """Lose all bytes, which arrive once it is mended: connections stay open."""
        self._call(self._lose())

    def refuse(self) -> None:
        """Break all connections, and take no new ones."""
        self._call(self._refuse())

    def mend(self) -> None:
        """Forward again."""
        self._call(self._mend())

    def close(self) -> None:
        """End it for good."""
        self.refuse()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, action: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(action, self._loop).result()

    async def _lose(self) -> None:
        self._flows.clear()

    async def _refuse(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._open:
            writer.transport.abort()
        self._flows.set()
        await asyncio.sleep(0)

    async def _mend(self) -> None:
        self._flows.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._forward, "127.0.0.1", self.port)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", self._behind)
            self._open |= {writer, back}
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
            self._open -= {writer, back}
        writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES):
                await self._flows.wait()
                writer.write(chunk)
                await writer.drain()
        writer.close()
