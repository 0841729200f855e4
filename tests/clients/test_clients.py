"""Real clients, unmodified, do a small real task against a real server; `make test-clients`."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.clients import environments
from tests.clients.worker import SCRIPTS, TARGET, Server, run

pytestmark = [pytest.mark.clients, pytest.mark.timeout(3600)]

TASK = "Create a file named hello.py that prints the number 42. Use your tool to write the file, then stop."
SDKS = ("openai==3.57.0", "anthropic==2.14.0", "pydantic")
FRAMEWORKS: Mapping[str, tuple[str, ...]] = {
    "pydantic_ai": ("pydantic-ai-slim[openai,anthropic]==2.68.0",),
    "pydantic_ai_anthropic": ("pydantic-ai-slim[openai,anthropic]==2.68.0",),
    "instructor": ("instructor==1.17.0",),
    "openai_agents": ("openai-agents==0.24.0",),
    "smolagents": ("smolagents[openai]==1.26.0", "pydantic"),
    "litellm": ("litellm==1.108.7",),
    "langchain": ("langchain==1.5.2", "langchain-openai", "langchain-anthropic"),
    "llama_index": ("llama-index-llms-openai-like",),
}
"""Each with the packages of an environment of its own: they do not go together."""
NODE = (
    "openai@6.49.0", "@anthropic-ai/sdk@1.14.0", "ai@6.0.326", "@ai-sdk/openai", "@ai-sdk/anthropic",
    "@ai-sdk/openai-compatible", "zod",
)  # fmt: skip
AGENTS = ("@openai/codex@0.171.0", "@anthropic-ai/claude-code@2.1.197", "opencode-ai@1.18.33")


@pytest.mark.parametrize("script", ["openai_sdk", "anthropic_sdk"])
def test_an_sdk_for_python(server: Server, tmp_path: Path, script: str) -> None:
    run([environments.python(SDKS), SCRIPTS / f"{script}.py"], server, tmp_path)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework(server: Server, tmp_path: Path, name: str) -> None:
    run([environments.python(FRAMEWORKS[name]), SCRIPTS / "frameworks.py", name], server, tmp_path)


def test_the_sdks_for_node(server: Server, tmp_path: Path) -> None:
    folder = environments.node(NODE)
    script = folder / "sdks.mjs"
    script.write_text((SCRIPTS / "sdks.mjs").read_text())
    run(["node", script], server, tmp_path)


def written(folder: Path) -> None:
    """An agent's tool has written the file that was asked for."""
    output = subprocess.run([sys.executable, "hello.py"], cwd=folder, capture_output=True, text=True, check=True).stdout
    assert "42" in output


def test_codex(server: Server, tmp_path: Path) -> None:
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(
        f'model = "{TARGET}"\nmodel_provider = "here"\n[model_providers.here]\nname = "here"\n'
        f'base_url = "{server.url}/v1"\nwire_api = "responses"\n'
    )
    codex = environments.node(AGENTS) / "node_modules" / ".bin" / "codex"
    run([codex, "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", TASK], server, tmp_path)


def test_claude_code(server: Server, tmp_path: Path) -> None:
    claude = environments.node(AGENTS) / "node_modules" / ".bin" / "claude"
    run([claude, "-p", "--model", TARGET, TASK], server, tmp_path, ANTHROPIC_MODEL=TARGET)


def test_opencode(server: Server, tmp_path: Path) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": "none"},
        "models": {TARGET: {"name": TARGET}},
    }
    settings: Mapping[str, object] = {"provider": {"here": provider}, "model": f"here/{TARGET}"}
    (tmp_path / "opencode.json").write_text(json.dumps(settings))
    opencode = environments.node(AGENTS) / "node_modules" / ".bin" / "opencode"
    run([opencode, "run", TASK], server, tmp_path)


def test_aider(server: Server, tmp_path: Path) -> None:
    aider = environments.python(("aider-chat==0.86.2",)).with_name("aider")
    run(
        [
            aider, "--model", f"openai/{TARGET}", "--yes-always", "--no-git", "--no-stream", "--no-show-model-warnings",
            "--edit-format", "whole", "--message", TASK, "hello.py",
        ],
        server, tmp_path,
    )  # fmt: skip
    written(tmp_path)


def test_the_llm_command(server: Server, tmp_path: Path) -> None:
    llm = environments.python(("llm==0.36",)).with_name("llm")
    models = [{"model_id": "here", "model_name": TARGET, "api_base": f"{server.url}/v1", "supports_schema": True}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))
    answer = run(
        [llm, "-m", "here", "--schema", "name, population int", "Tell about Rome."], server, tmp_path,
        LLM_USER_PATH=str(tmp_path),
    )  # fmt: skip
    assert json.loads(answer)["name"]
