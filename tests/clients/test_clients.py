"""Real clients, unmodified, do a small real task against a real server; `make test-clients`."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.clients import environments
from tests.clients.worker import SCRIPTS, TARGET, Server, run

pytestmark = [pytest.mark.clients, pytest.mark.timeout(3600)]

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


def test_the_llm_command(server: Server, tmp_path: Path) -> None:
    llm = environments.python(("llm==0.36",)).with_name("llm")
    models = [{"model_id": "here", "model_name": TARGET, "api_base": f"{server.url}/v1", "supports_schema": True}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))
    answer = run(
        [llm, "-m", "here", "--schema", "name, population int", "Tell about Rome."], server, tmp_path,
        LLM_USER_PATH=str(tmp_path),
    )  # fmt: skip
    assert json.loads(answer)["name"]
