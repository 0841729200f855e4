"""DNS rebinding: a web page whose own name was pointed to this machine gets no answer from any of our servers."""

import json
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from omnidraft.config import WorkerSettings
from tests.attack.raw_http import Address, message_of, status_of
from tests.http_server import served

EVIL = [
    "evil.example:8000",
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "evil-localhost",
    "worker",
]
MALFORMED = [
    "",
    ":8000",
    "[::1",
    "localhost@evil.example",
    "localhost:8000:1",
    "localhost evil.example",
    "[evil.example]",
]
LOOPBACK = [
    "localhost",
    "LocalHost:8000",
    "localhost.:8000",
    "page.localhost",
    "127.0.0.1:8000",
    "127.9.9.9",
    "[::1]:8000",
]
ADDRESSES = ["10.0.3.7:8000", "[fe80::1]"]
ALLOWED = ["worker.svc:8000", "WORKER.svc.", "bound"]
REQUESTS = {
    "page": "GET / HTTP/1.1",
    "metrics": "GET /metrics HTTP/1.1",
    "probe": "GET /healthz HTTP/1.1",
    "completion": "POST /v1/completions HTTP/1.1",
}
BODY = json.dumps({"prompt": "clips", "max_tokens": 2})


@pytest.fixture
def address(app: FastAPI) -> Iterator[Address]:
    """The worker's own server."""
    with served(app, WorkerSettings(host="bound", allowed_hosts=("Worker.svc.",))) as url:
        yield Address.of(url)


def ask(address: Address, line: str, *headers: str) -> bytes:
    lines = [line, *headers, "Connection: close", f"Content-Length: {len(BODY)}", "Content-Type: application/json"]
    return address.ask("\r\n".join([*lines, "", BODY]).encode())


@pytest.mark.parametrize("line", REQUESTS.values(), ids=REQUESTS)
def test_only_names_of_this_machine_are_answered(address: Address, line: str) -> None:
    for host in EVIL + MALFORMED:
        refused = ask(address, line, f"Host: {host}")
        assert (host, status_of(refused)) == (host, 421)
        assert "worker.allowed_hosts" in message_of(refused)
    for host in LOOPBACK + ADDRESSES + ALLOWED:
        assert (host, status_of(ask(address, line, f"Host: {host}"))) == (host, 200)


def test_a_client_without_the_header_is_no_browser(address: Address) -> None:
    assert status_of(ask(address, "GET /healthz HTTP/1.0")) == 200
    assert status_of(ask(address, "GET /healthz HTTP/1.1")) == 400


def test_any_name_may_be_allowed(app: FastAPI) -> None:
    with served(app, WorkerSettings(allowed_hosts=("*",))) as url:
        assert status_of(ask(Address.of(url), "GET /healthz HTTP/1.1", "Host: evil.example")) == 200


@pytest.mark.parametrize("name", ["", "worker:8000", "http://worker", "*.example.com"])
def test_a_setting_that_could_never_match_is_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        WorkerSettings(allowed_hosts=(name,))
