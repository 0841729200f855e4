"""Frameworks, proxies and load tests, unmodified, against a real server."""

import json
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from omnidraft.models.catalog import store
from tests.clients import environments
from tests.clients.worker import SCRIPTS, SDKS, Server, run, running

pytestmark = [pytest.mark.clients, pytest.mark.timeout(3600)]

FRAMEWORKS: Mapping[str, tuple[str, ...]] = {
    "pydantic_ai": ("pydantic-ai-slim[openai,anthropic]==2.68.0",),
    "pydantic_ai_anthropic": ("pydantic-ai-slim[openai,anthropic]==2.68.0",),
    "instructor": ("instructor==1.17.0",),
    "openai_agents": ("openai-agents==0.24.0",),
    "smolagents": ("smolagents[openai]==1.26.0", "pydantic"),
    "litellm": ("litellm==1.108.7",),
    "langchain": ("langchain==1.5.2", "langchain-openai", "langchain-anthropic"),
    "llama_index": ("llama-index-llms-openai-like",),
    "dspy": ("dspy==3.4.1",),
    "haystack": ("haystack-ai==3.4.1",),
    "outlines": ("outlines[openai]==1.3.3",),
    "guidance": ("guidance==0.3.1", "openai"),
    "inspect_ai": ("inspect-ai==0.3.285", "openai", "anthropic"),
}
"""Each with the packages of an environment of its own: they do not go together."""


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework(server: Server, tmp_path: Path, name: str) -> None:
    run([environments.python(FRAMEWORKS[name]), SCRIPTS / "frameworks.py", name], server, tmp_path)


def test_aiperf_reads_the_answers_and_how_drafts_were_accepted(server: Server, tmp_path: Path) -> None:
    aiperf = environments.python(("aiperf==0.13.0",)).with_name("aiperf")
    cached = tmp_path / ".cache" / "huggingface" / "hub" / "models--local--target"
    for folder in (cached / "refs", cached / "snapshots"):
        folder.mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots" / ("0" * 40)).symlink_to(store.resolve(server.model))
    run(
        [
            aiperf, "profile", "--model", server.model, "--url", server.url, "--endpoint-type", "chat", "--streaming",
            "--request-count", "4", "--tokenizer", "local/target", "--isl", "30", "--osl", "16",
            "--use-server-token-count", "--artifact-dir", tmp_path / "out", "--ui", "none",
        ],
        server, tmp_path,
    )  # fmt: skip
    (report,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
    figures = json.loads(report.read_text())
    accepted = {int(count): times for count, times in figures["pooled_spec_decode_acceptance_histogram"].items()}
    assert figures["request_count"]["avg"] == 4
    assert figures["total_output_tokens"]["avg"] > 4
    assert figures["total_spec_decode_steps"]["avg"] == sum(accepted.values()) > 0
    assert figures["total_accepted_draft_tokens"]["avg"] == sum(each * times for each, times in accepted.items())


def test_the_proxy_of_litellm(server: Server, tmp_path: Path) -> None:
    upstream = {"model": f"hosted_vllm/{server.model}", "api_base": f"{server.url}/v1", "api_key": "none"}
    models = [{"model_name": server.model, "litellm_params": upstream}]
    (tmp_path / "config.yaml").write_text(json.dumps({"model_list": models}))
    litellm = environments.python(("litellm[proxy]==1.108.7",)).with_name("litellm")
    environment = server.environment(tmp_path) | {"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}
    command = [litellm, "--config", "config.yaml", "--host", "127.0.0.1"]
    with running(command, tmp_path, environment, "/health/liveliness") as (url, log):
        run([environments.python(SDKS), SCRIPTS / "proxied.py"], Server(url, server.model, log), tmp_path)


def test_open_webui(server: Server, tmp_path: Path) -> None:
    webui = environments.python(("open-webui==0.12.4",)).with_name("open-webui")
    quiet = {"ENABLE_OLLAMA_API": "False", "OFFLINE_MODE": "True", "RAG_EMBEDDING_ENGINE": "openai"}
    own = {"DATA_DIR": str(tmp_path), "WEBUI_SECRET_KEY": "none", "WEBUI_AUTH": "False"}
    environment = server.environment(tmp_path) | {"OPENAI_API_BASE_URL": f"{server.url}/v1"} | quiet | own
    ask = {"model": server.model, "messages": [{"role": "user", "content": "Write the word hello and nothing else."}]}
    with running([webui, "serve", "--host", "127.0.0.1"], tmp_path, environment, "/health") as (url, _):
        page = httpx.Client(base_url=url, timeout=600)
        page.headers["authorization"] = f"Bearer {page.post('/api/v1/auths/signin', json=NOBODY).json()['token']}"
        assert server.model in [model["id"] for model in page.get("/api/models").json()["data"]]
        streamed = page.post("/api/chat/completions", json=ask | {"stream": True, "params": {"temperature": 0}})
        titled = page.post("/api/v1/tasks/title/completions", json=ask | {"chat_id": "local"})
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert "hello" in "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks).lower()
    assert titled.json()["choices"][0]["message"]["content"]


NOBODY = {"email": "", "password": ""}
"""Who signs in where no one has to."""
