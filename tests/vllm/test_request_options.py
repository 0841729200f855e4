"""With our worker class a request of vLLM's server decides about its own drafts and records."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from omnidraft import config
from omnidraft.traces.record import TraceRecord
from pipelines.lib.vllm_server import VllmServer, custom_class, serve
from tests.vllm.conftest import VENV
from tests.vllm.test_vllm import ARGUMENTS, NUM_TOKENS, metric, records, settings_of, wait_for

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, target: Path, drafter: Path, home: Path) -> config.Settings:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIDRAFT_HOME", str(home))
        return settings_of(tmp_path_factory.mktemp("options"), target, drafter)


@pytest.fixture(scope="module")
def server(settings: config.Settings, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    environment = {
        "OMNIDRAFT_HOME": str(home),
        "OMNIDRAFT_MODELS__DRAFTER": settings.models.drafter,
        "OMNIDRAFT_MODELS__DRAFTER_PRECISION": "float32",
        "OMNIDRAFT_DECODE__POLICY": "fixed",
        "OMNIDRAFT_LOG": settings.log.url,
        "MLFLOW_TRACKING_URI": settings.registry.url,
    }
    log_path = tmp_path_factory.mktemp("server") / "vllm.log"
    arguments = (*ARGUMENTS, "--worker-cls", "omnidraft.hosts.vllm_worker.Worker")
    options = {"speculation": custom_class(NUM_TOKENS), "settings": environment, "arguments": arguments, "threads": 1}
    with serve(VENV, Path(settings.models.target), log_path, **options) as server:
        yield server


def complete(server: VllmServer, prompt: str, **arguments: str | int) -> str:
    body = {"model": "target", "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    body |= {"vllm_xargs": arguments} if arguments else {}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).raise_for_status()
    return response.json()["choices"][0]["text"]


def num_drafted(server: VllmServer) -> float:
    return metric(server, "vllm:spec_decode_num_draft_tokens_total")


def test_a_request_turns_its_drafts_off_and_keeps_its_text(server: VllmServer) -> None:
    text, before = complete(server, "How many clips?"), num_drafted(server)
    assert before > 0
    assert complete(server, "How many clips?", omnidraft_speculation="off") == text
    assert num_drafted(server) == before
    assert complete(server, "How many clips?", omnidraft_speculation=2) == text
    assert num_drafted(server) > before


def test_a_request_names_its_tenant_or_is_not_recorded(server: VllmServer, settings: config.Settings) -> None:
    complete(server, "Not to be recorded.", omnidraft_store=0, omnidraft_user="b")
    complete(server, "To be recorded as somebody's.", omnidraft_user="a")
    found: list[TraceRecord] = []

    def recorded() -> bool:
        found[:] = [record for record in records(settings) if record.tenant != "default"]
        return bool(found)

    wait_for(recorded, "the record")
    assert {record.tenant for record in found} == {"a"}
