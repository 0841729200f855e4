"""Frameworks, proxies and load tests, unmodified, against a real server."""

import json
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from tests.clients import environments
from tests.clients.worker import SCRIPTS, SDKS, Server, run

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
    run(
        [
            aiperf, "profile", "--model", server.model, "--url", server.url, "--endpoint-type", "chat", "--streaming",
            "--request-count", "4", "--tokenizer", "builtin", "--isl", "30", "--osl", "16",
            "--use-server-token-count", "--artifact-dir", tmp_path / "out", "--ui", "none",
        ],
        server, tmp_path,
    )  # fmt: skip
    (report,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
    figures = json.loads(report.read_text())
    Path("/tmp/evdev/aiperf.json").write_text(json.dumps(figures, indent=1))
    assert figures["request_count"]["avg"] == 4


@pytest.fixture
def litellm_proxy(server: Server, tmp_path: Path) -> Iterator[Server]:
    """LiteLLM's proxy in front of the worker."""
    upstream = {"model": f"hosted_vllm/{server.model}", "api_base": f"{server.url}/v1", "api_key": "none"}
    models = [{"model_name": server.model, "litellm_params": upstream}]
    (tmp_path / "config.yaml").write_text(json.dumps({"model_list": models}))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    litellm = environments.python(("litellm[proxy]==1.108.7",)).with_name("litellm")
    with open(tmp_path / "proxy.log", "w") as log:
        process = subprocess.Popen(
            [litellm, "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)],
            stdout=log, stderr=log, cwd=tmp_path,
            env=server.environment(tmp_path) | {"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"},
        )  # fmt: skip
        proxy = Server(f"http://127.0.0.1:{port}", server.model, tmp_path / "proxy.log")
        deadline = time.monotonic() + 300
        try:
            while not _is_alive(proxy):
                assert process.poll() is None, proxy.log.read_text()[-2000:]
                assert time.monotonic() < deadline
                time.sleep(0.5)
            yield proxy
        finally:
            process.terminate()
            process.wait(60)


def _is_alive(proxy: Server) -> bool:
    try:
        return httpx.get(f"{proxy.url}/health/liveliness").status_code == 200
    except httpx.HTTPError:
        return False


def test_the_proxy_of_litellm(litellm_proxy: Server, tmp_path: Path) -> None:
    run([environments.python(SDKS), SCRIPTS / "proxied.py"], litellm_proxy, tmp_path)
