"""Text from other people and servers never steers the terminal of whoever reads it."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from omnidraft import assembly, config
from omnidraft.ports import Outgoing, Pause
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces import codec
from tests.cli_runs import run_cli
from tests.trace_records import make_record

EVIL = "\x1b]0;owned\x07\x9b2J\x1b[2J"
CONTROLS = {*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0))} - {"\n", "\r"}
COMMANDS = (
    ["status"],
    ["traces", "verify"],
    ["traces", "tail"],
    ["traces", "dead-letters", "list"],
    ["snapshots", "list"],
    ["snapshots", "show", EVIL],
    ["tenants", "factors", "list"],
)


class _Handler(BaseHTTPRequestHandler):
    """A worker and a registry that name everything so."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer(200, json.dumps({"data": [{"id": EVIL, "owned_by": "omnidraft"}]}))
        elif self.path == "/metrics":
            self._answer(200, "")
        else:
            self._answer(400, json.dumps({"error_code": "INVALID_PARAMETER_VALUE", "message": EVIL}))

    do_POST = do_GET

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def evil_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def environ(tmp_path: Path, evil_url: str) -> dict[str, str]:
    """A log in which everything has that name, and a registry that says it."""
    given = {
        "OMNIDRAFT_HOME": str(tmp_path),
        "OMNIDRAFT_LOG__URL": f"sqlite:///{tmp_path}/log.db",
        "OMNIDRAFT_REGISTRY__URL": evil_url,
        "COLUMNS": "200",
    }
    settings = config.load(None, given)
    pair = {"target": settings.models.target, "drafter": settings.models.drafter}
    record = make_record(EVIL, tenant=EVIL, worker=EVIL, alignment=EVIL, **pair)
    headers = {**codec.headers(record), EVIL: EVIL.encode()}
    letter = {"reason": EVIL.encode(), "error": EVIL.encode(), "origin_topic": EVIL.encode(), f"original.{EVIL}": b""}
    messages = {
        settings.log.traces_topic: [
            Outgoing(EVIL.encode(), codec.encode(record), headers),
            Outgoing(EVIL.encode(), EVIL.encode(), {"schema": EVIL.encode()}),
        ],
        settings.log.dead_letters_topic: [Outgoing(EVIL.encode(), EVIL.encode(), letter)],
    }
    for topic, sent in messages.items():
        with closing(assembly.log_writer(settings, topic)) as writer:
            writer.append(sent)
    with closing(assembly.control_log(settings, CountingMetrics())) as control:
        control.put(("pause",), Pause(), EVIL)
    return given


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: "-".join(command[:2]))
def test_no_control_character_reaches_the_terminal(
    command: Sequence[str],
    environ: dict[str, str],
    evil_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = ["--worker", evil_url] if command == ["status"] else []
    done = run_cli([*command, *more], monkeypatch, capsys, environ)
    shown = done.stdout + done.stderr
    assert "owned" in shown
    assert CONTROLS & set(shown) == set()
