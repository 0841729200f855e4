"""The lock has hashes and names no registry; image tags become the digests that a registry tells."""

import hashlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements.lock").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
MANIFEST = json.dumps({"schemaVersion": 2, "manifests": []}).encode()
DIGEST = f"sha256:{hashlib.sha256(MANIFEST).hexdigest()}"
TOKEN = "anybody-gets-this"


def test_everything_locked_has_hashes_and_no_registry_is_named():
    locked = re.split(r"\n(?=\S)", LOCK.strip())
    assert len(locked) > 200
    assert [each.split()[0] for each in locked if not re.search(r"--hash=sha256:[0-9a-f]{64}", each)] == []
    assert [each.split()[0] for each in locked if "==" not in each.split()[0]] == []
    assert not re.search(r"https?://|--index|--extra-index|--find-links", LOCK)


def test_setup_verifies_the_hashes_and_lock_writes_them():
    assert re.search(r"^\$\(STAMP\):.*(?:\n\t.*)+--require-hashes -r requirements.lock", MAKEFILE, re.M)
    assert re.search(r"^lock:.*\n(?:\t.*\n)*\t.*--generate-hashes", MAKEFILE, re.M)


class Registry(BaseHTTPRequestHandler):
    """The registry v2 API for one image, `team/tool:1.2`, to whoever fetched a token first."""

    tokens: ClassVar[list[str]] = []
    told: ClassVar[str] = DIGEST

    def do_GET(self) -> None:
        if self.path.startswith("/token?"):
            self.tokens.append(self.path)
            self.answer(200, json.dumps({"token": TOKEN}).encode())
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            realm = f"http://{self.headers['Host']}/token"
            scope = "repository:team/tool:pull"
            self.answer(401, b"", {"WWW-Authenticate": f'Bearer realm="{realm}",service="here",scope="{scope}"'})
        elif self.path == "/v2/team/tool/manifests/1.2" and "image.index" in self.headers["Accept"]:
            self.answer(200, MANIFEST, {"Docker-Content-Digest": type(self).told})
        else:
            self.answer(404, b"")

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def registry(monkeypatch) -> Iterator[str]:
    """host:port of a registry."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    monkeypatch.setattr(Registry, "tokens", [])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(10)


def pin_images(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "deploy/pin_images.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_tags_become_digests_and_images_of_our_own_stay(registry, tmp_path):
    file = tmp_path / "compose.yml"
    before = f"""
services:
  a:
    image: {registry}/team/tool:1.2 # why
  b:
    - image: {registry}/team/tool:1.2@sha256:{"0" * 64}
  c:
    image: omnidraft:${{TAG:-local}}
  d:
    image: omnidraft
"""
    file.write_text(before)
    assert pin_images("--check", file).returncode == 1
    assert file.read_text() == before
    done = pin_images(file)
    assert (done.returncode, done.stderr) == (0, "")
    pinned = f"{registry}/team/tool:1.2@{DIGEST}"
    assert file.read_text() == before.replace(f"@sha256:{'0' * 64}", "").replace(f"{registry}/team/tool:1.2", pinned)
    assert pin_images("--check", file).returncode == 0
    assert "service=here&scope=repository%3Ateam%2Ftool%3Apull" in Registry.tokens[0]


def test_nothing_is_written_when_a_registry_does_not_tell_or_lies(registry, tmp_path, monkeypatch):
    file = tmp_path / "compose.yml"
    for image in (f"{registry}/team/tool:1.2\n    image: {registry}/team/tool:9.9", "127.0.0.1:9/team/tool:1.2"):
        file.write_text(f"    image: {image}\n")
        done = pin_images(file)
        assert (done.returncode, "nothing was written" in done.stderr) == (2, True)
        assert file.read_text() == f"    image: {image}\n"
    monkeypatch.setattr(Registry, "told", f"sha256:{'1' * 64}")
    file.write_text(f"    image: {registry}/team/tool:1.2\n")
    done = pin_images(file)
    assert (done.returncode, "what it sends has" in done.stderr) == (2, True)


def test_every_image_of_others_in_our_files_is_one_that_the_script_finds(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "deploy"))
    import pin_images as script

    monkeypatch.setattr(script, "digest", lambda name, client: DIGEST)
    text = (ROOT / "docker-compose.yml").read_text()
    found = re.findall(r"image: (\S+)@sha256", script.pin(text, None))
    assert sorted(each.split("/")[-1].split(":")[0] for each in found) == ["grafana", "kafka", "postgres", "prometheus"]
    assert script.parse("postgres:17").url == "https://registry-1.docker.io/v2/library/postgres/manifests/17"
    assert script.parse("ghcr.io/a/b:c").url == "https://ghcr.io/v2/a/b/manifests/c"
