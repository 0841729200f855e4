"""An application behind the worker's own server, and what it streams."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from starlette.types import ASGIApp

from omnidraft.config import WorkerSettings
from omnidraft.hosts.http_server import Deadlines, http_server
from tests.tiny_engine import PATIENCE_S


@contextmanager
def served(app: ASGIApp, limits: WorkerSettings | None = None, deadlines: Deadlines | None = None) -> Iterator[str]:
    """Its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = http_server(app, limits or WorkerSettings(), deadlines)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        deadline = time.monotonic() + PATIENCE_S
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(PATIENCE_S)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Of a stream that came to its end."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
