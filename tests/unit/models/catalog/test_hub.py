"""What the hub's own client fetches from a hub that answers as the real one does: told first, and as it was told."""

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import HfApi

from omnidraft.errors import ModelCorrupt, ModelDownloadError, ModelError, ModelUnknown
from omnidraft.models.catalog.hub import fetch_repository

REVISION = "5" * 40
WEIGHTS = b"the weights of a model"
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
FILES = {
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "consolidated.safetensors": WEIGHTS,
    "pytorch_model.bin": b"a pickle",
    "tokenizer.json": b"{}",
}


@dataclass
class Hub:
    """A repository with these files; `sent` replaces what is sent of one, and `refusal` is the answer to everything."""

    files: dict[str, bytes]
    sent: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    refusal: tuple[int, str] | None = None

    def info(self) -> dict[str, Any]:
        siblings: list[dict[str, Any]] = []
        for name, content in self.files.items():
            siblings.append({"rfilename": name, "size": len(content), "blobId": "0" * 40})
            if not name.endswith(".json"):
                sha256 = hashlib.sha256(content).hexdigest()
                siblings[-1]["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
        return {"id": "owner/model", "sha": REVISION, "siblings": siblings, "tags": [], "private": False}

    def tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": each["rfilename"], "size": each["size"], "oid": each["blobId"]}
            | ({"lfs": {"oid": each["lfs"]["sha256"], **each["lfs"]}} if "lfs" in each else {})
            for each in self.info()["siblings"]
        ]

    @contextmanager
    def serving(self) -> Iterator[HfApi]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer()

            def do_GET(self) -> None:
                self.answer()

            def answer(self) -> None:
                path = self.path.partition("?")[0]
                name = path.removeprefix(f"/owner/model/resolve/{REVISION}/")
                is_file = name != path
                body = json.dumps(hub.tree() if "/tree/" in path else hub.info()).encode()
                if is_file:
                    body = hub.sent.get(name, hub.files[name])
                    if self.command == "GET":
                        hub.requests.append(name)
                status, error = hub.refusal or (200, "")
                self.send_response(status)
                self.send_header("X-Error-Code", error)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Type", "application/octet-stream" if is_file else "application/json")
                self.send_header("X-Repo-Commit", REVISION)
                self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
            thread.start()
            try:
                yield HfApi(endpoint=f"http://127.0.0.1:{server.server_port}", token=False)
            finally:
                server.shutdown()
                thread.join()


def fetch(hub: Hub, folder: Path, **options: bool) -> str:
    with hub.serving() as api:
        return fetch_repository("owner/model", folder, api=api, **{"with_weights": True, **options})


def test_what_is_fetched_is_told_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub = Hub(FILES)
    told: list[tuple[str, list[str]]] = []
    logger = logging.getLogger("omnidraft.models.catalog.hub")
    handler = logging.Handler()
    handler.emit = lambda record: told.append((record.getMessage(), list(hub.requests)))  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        assert fetch(hub, tmp_path) == REVISION
    finally:
        logger.removeHandler(handler)
    assert told == [
        (f"fetching owner/model from the hub, revision {REVISION}: 3 files, 26 bytes", []),
        (f"model.safetensors: 22 bytes, sha256 {SHA256}", []),
    ]
    assert sorted(hub.requests) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {name: FILES[name] for name in hub.requests}


def test_weights_of_another_digest_are_refused_and_deleted(tmp_path: Path) -> None:
    changed = b"the weights of amodel?"
    hub = Hub(FILES, {"model.safetensors": changed})
    named = f"sha256 of model.safetensors is {hashlib.sha256(changed).hexdigest()}, the hub names {SHA256}; pull again"
    with pytest.raises(ModelCorrupt, match=named):
        fetch(hub, tmp_path)
    hub.sent.clear()
    assert fetch(hub, tmp_path) == REVISION
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS


def test_of_a_repository_without_a_model_nothing_is_fetched_but_a_tokenizer_alone(tmp_path: Path) -> None:
    hub = Hub({name: content for name, content in FILES.items() if not name.endswith("safetensors")})
    with pytest.raises(ModelUnknown, match=r"no \*\.safetensors; it has pytorch_model\.bin$"):
        fetch(hub, tmp_path)
    assert not hub.requests
    fetch(hub, tmp_path, with_weights=False)
    assert sorted(hub.requests) == ["config.json", "tokenizer.json"]


@pytest.mark.parametrize(
    ("refusal", "error", "message"),
    [
        ((401, "RepoNotFound"), ModelUnknown, "the hub has no repository 'owner/model'"),
        ((403, "GatedRepo"), ModelDownloadError, "owner/model is gated: accept its terms on its page"),
        ((500, ""), ModelDownloadError, "owner/model: the hub cannot be reached: Server error"),
    ],
)
def test_a_hub_that_refuses_is_told_in_one_line(
    refusal: tuple[int, str], error: type[ModelError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message) as refused:
        fetch(Hub(FILES, refusal=refusal), tmp_path)
    assert "\n" not in str(refused.value)
