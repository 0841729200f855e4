"""A real server behind a real socket, and clients that keep to no protocol."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.types import ASGIApp

from omnidraft.config import WorkerSettings
from omnidraft.hosts.http_server import http_server
from tests.tiny_engine import PATIENCE_S


@dataclass(frozen=True)
class Address:
    """Where the server listens."""

    host: str
    port: int

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=PATIENCE_S)

    def get(self, path: str = "/healthz") -> int:
        """The status that an honest client gets."""
        with self.connect() as client:
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            return status_of(read_all(client))


@contextmanager
def bounded_server(app: ASGIApp, limits: WorkerSettings) -> Iterator[Address]:
    """The worker's own server around this application."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = http_server(app, limits)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        deadline = time.monotonic() + PATIENCE_S
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.005)
        try:
            yield Address(*listener.getsockname())
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)


def read_all(client: socket.socket) -> bytes:
    """What comes until the server closes; nothing where it resets the connection."""
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


def sent(address: Address, *pieces: bytes) -> bytes:
    """The answer to these bytes; the client goes on reading when the server stops listening."""
    with address.connect() as client:
        try:
            for piece in pieces:
                client.sendall(piece)
        except OSError:
            pass  # refused before all of it was sent
        return read_all(client)


def post(body: bytes, *headers: bytes, path: bytes = b"/v1/completions") -> bytes:
    lines = [b"POST " + path + b" HTTP/1.1", b"Host: x", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"Content-Type: application/json", b"Connection: close", b"", body])
