"""Coding agents, unmodified, write a file with a tool of their own, and drafts change nothing of what they are told."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from tests.clients import environments
from tests.clients.worker import TARGET, Server, run

pytestmark = [pytest.mark.clients, pytest.mark.timeout(3600)]

TASK = "Create a file named hello.py that prints the number 42. Use your tool to write the file, then stop."
COMMAND = "echo 'print(42)' > hello.py"
AGENTS = ("@openai/codex@0.171.0", "@anthropic-ai/claude-code@2.1.197", "opencode-ai@1.18.33")
PATIENCE_MS = "3000000"
"""Claude Code gives up a stream without an event for 300 s, and pings are none to it; two cores may take 700 s to read
what it sends."""
SILENCE_MS = 20_000
"""Codex gives up a stream without an event for so long, less than its prompt takes to be read."""
TRIES = 4
"""So small a model does not call a tool each time, and most agents let nobody set a temperature."""


def agent(name: str) -> Path:
    return environments.node(AGENTS) / "node_modules" / ".bin" / name


def written(folder: Path, ask: Callable[[], object]) -> None:
    """An agent's tool has written the file that was asked for."""
    for _ in range(TRIES):
        ask()
        if (folder / "hello.py").exists():
            break
    output = subprocess.run([sys.executable, "hello.py"], cwd=folder, capture_output=True, text=True, check=True).stdout
    assert output.strip() == "42"


def test_codex(server: Server, tmp_path: Path) -> None:
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(
        f'model = "{TARGET}"\nmodel_context_window = 32768\nmodel_provider = "here"\n[model_providers.here]\n'
        f'name = "here"\nbase_url = "{server.url}/v1"\nwire_api = "responses"\nstream_idle_timeout_ms = {SILENCE_MS}\n'
    )
    task = f"Call exec_command with the command: {COMMAND}"
    command = [agent("codex"), "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", task]
    written(tmp_path, lambda: run(command, server, tmp_path))


def test_claude_code(server: Server, tmp_path: Path) -> None:
    tools = ("--permission-mode", "acceptEdits", "--tools", "Write,Edit,Read")
    command = [agent("claude"), "-p", TASK, "--model", TARGET, *tools]
    patient = {"CLAUDE_STREAM_IDLE_TIMEOUT_MS": PATIENCE_MS, "API_TIMEOUT_MS": PATIENCE_MS}
    written(tmp_path, lambda: run(command, server, tmp_path, ANTHROPIC_MODEL=TARGET, **patient))


def opencode(url: str, folder: Path) -> list[str | Path]:
    """The command that does the task, once its settings lie in its folder."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {TARGET: {"name": TARGET}},
    }
    settings = {"provider": {"here": provider}, "model": f"here/{TARGET}"}
    (folder / "opencode.json").write_text(json.dumps(settings))
    return [agent("opencode"), "run", TASK]


def test_opencode(server: Server, tmp_path: Path) -> None:
    command = opencode(server.url, tmp_path)
    written(tmp_path, lambda: run(command, server, tmp_path))


def test_aider(server: Server, tmp_path: Path) -> None:
    aider = environments.python(("aider-chat==0.86.2",)).with_name("aider")
    command = [
        aider, "--model", f"openai/{TARGET}", "--yes-always", "--no-git", "--no-stream", "--no-show-model-warnings",
        "--edit-format", "whole", "--message", TASK, "hello.py",
    ]  # fmt: skip
    written(tmp_path, lambda: run(command, server, tmp_path))


@contextmanager
def refusing(bodies: list[dict[str, Any]]) -> Iterator[str]:
    """A server that keeps what it is asked and answers nothing."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_error(400)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as refuser:
        thread = Thread(target=refuser.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{refuser.server_port}"
        refuser.shutdown()
        thread.join()


def test_an_agents_request_gets_the_same_text_whatever_drafts(server: Server, tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = []
    with refusing(bodies) as url:
        subprocess.run(
            opencode(url, tmp_path), env=server.environment(tmp_path), cwd=tmp_path, capture_output=True, check=False
        )
    asked = next(body for body in bodies if body.get("tools"))
    asked |= {"temperature": 0, "mode": "reproducible", "max_tokens": 96, "stream": False, "stream_options": None}
    answers = []
    for speculation in ("off", "auto", 6):
        response = httpx.post(
            f"{server.url}/v1/chat/completions", json=asked | {"speculation": speculation}, timeout=3000
        )
        assert response.status_code == 200, response.text
        answers.append(response.json())
    plain, *drafted = [answer["choices"][0]["message"] for answer in answers]
    assert plain.get("content") or plain["tool_calls"]
    assert [_without_ids(each) for each in drafted] == [_without_ids(plain)] * 2
    assert answers[0]["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert answers[2]["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def _without_ids(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"tool_calls": [each["function"] for each in message.get("tool_calls") or ()]}
