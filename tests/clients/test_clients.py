"""Real clients, unmodified, do a small real task against a real server; `make test-clients`."""

import json
from pathlib import Path

import pytest

from tests.clients import environments
from tests.clients.worker import SCRIPTS, SDKS, TARGET, Server, run

pytestmark = [pytest.mark.clients, pytest.mark.timeout(3600)]

NODE = (
    "openai@6.49.0", "@anthropic-ai/sdk@1.14.0", "ai@6.0.326", "@ai-sdk/openai", "@ai-sdk/anthropic",
    "@ai-sdk/openai-compatible", "zod",
)  # fmt: skip


@pytest.mark.parametrize("script", ["openai_sdk", "anthropic_sdk"])
def test_an_sdk_for_python(server: Server, tmp_path: Path, script: str) -> None:
    run([environments.python(SDKS), SCRIPTS / f"{script}.py"], server, tmp_path)


def test_the_sdks_for_node(server: Server, tmp_path: Path) -> None:
    folder = environments.node(NODE)
    script = folder / "sdks.mjs"
    script.write_text((SCRIPTS / "sdks.mjs").read_text())
    run(["node", script], server, tmp_path)


def test_the_llm_command(server: Server, tmp_path: Path) -> None:
    llm = environments.python(("llm==0.36",)).with_name("llm")
    models = [{"model_id": "here", "model_name": TARGET, "api_base": f"{server.url}/v1", "supports_schema": True}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))
    name = {"type": "string", "maxLength": 40}  # bounded: the model may repeat itself until its context is full
    schema = {"type": "object", "properties": {"name": name}, "required": ["name"], "additionalProperties": False}
    command = [llm, "-m", "here", "--schema", json.dumps(schema), "Tell about Rome."]
    assert json.loads(run(command, server, tmp_path, LLM_USER_PATH=str(tmp_path)))["name"]
