"""Clients that keep to no protocol, over raw sockets."""

import json
import socket
from collections.abc import Iterable
from dataclasses import dataclass

import httpx

from tests.tiny_engine import PATIENCE_S


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str
    port: int

    @staticmethod
    def of(url: str) -> "Address":
        parsed = httpx.URL(url)
        return Address(parsed.host, parsed.port or 0)

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=PATIENCE_S)

    def ask(self, request: bytes | Iterable[bytes]) -> bytes:
        """All that comes back for these bytes; a server that stops listening is read to its end."""
        with self.connect() as client:
            try:
                for piece in [request] if isinstance(request, bytes) else request:
                    client.sendall(piece)
            except OSError:
                pass  # refused before all of it was sent
            return read_all(client)

    def get(self, path: str = "/healthz") -> int:
        """The status that an honest client gets."""
        return status_of(self.ask(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()))


def read_all(client: socket.socket) -> bytes:
    """What comes until the server closes or resets the connection."""
    got = bytearray()
    try:
        while piece := client.recv(65536):
            got += piece
    except ConnectionResetError:
        pass
    return bytes(got)


def status_of(response: bytes) -> int:
    """0: there was none."""
    return int(response.split(b" ", 2)[1]) if response.startswith(b"HTTP/1.1 ") else 0


def message_of(response: bytes) -> str:
    """Of an error in OpenAI's shape."""
    return json.loads(response.partition(b"\r\n\r\n")[2])["error"]["message"]


def post(body: bytes, *headers: bytes) -> bytes:
    """A request for a completion, whatever its body."""
    lines = [b"POST /v1/completions HTTP/1.1", b"Host: localhost", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"Content-Type: application/json", b"Connection: close", b"", body])
