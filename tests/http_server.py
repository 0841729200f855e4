"""An application behind the worker's own server, and what it streams."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from starlette.types import ASGIApp

from omnidraft.config import WorkerSettings
from omnidraft.hosts.http_server import Deadlines, http_server
from tests.tiny_engine import PATIENCE_S, wait_until


@contextmanager
def served(app: ASGIApp, limits: WorkerSettings | None = None, deadlines: Deadlines | None = None) -> Iterator[str]:
    """Its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = http_server(app, limits or WorkerSettings(), deadlines)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(PATIENCE_S)


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What a request that is not refused is answered."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream_parts(text: str) -> list[list[str]]:
    """The lines of each event of a stream, without its comments."""
    return [part.split("\n") for part in text.split("\n\n") if part and not part.startswith(":")]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Of a stream that came to its end."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    lines = [line.removeprefix("data: ") for (line,) in stream_parts(response.text)]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@contextmanager
def threads_until_over(*runs: Callable[[threading.Event], None], patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Each in a thread of its own, until the event is set, which happens at the end."""
    stop = threading.Event()
    threads = [threading.Thread(target=run, args=(stop,)) for run in runs]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(patience_s)
