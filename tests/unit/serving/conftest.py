"""One engine for all HTTP tests, a queue before it for each."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from omnidraft.config import WorkerSettings
from omnidraft.decode.engine import Engine
from omnidraft.decode.snapshot.slot import SnapshotSlot
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.tiny_models import make_drafter, make_target
from tests.http_server import served
from tests.tiny_engine import PATIENCE_S, tiny_worker
from tests.unit.tools.templates import QWEN2_5


@pytest.fixture(scope="session")
def tiny_engine(tiny_models: tuple[Path, Path], omnidraft_home: Path) -> Engine:
    """Decodes one text at a time, so that others wait."""
    return tiny_worker(tiny_models, omnidraft_home, CountingMetrics(), max_num_seqs=1).engine


@pytest.fixture(scope="session")
def many_engine(tiny_models: tuple[Path, Path], omnidraft_home: Path) -> Engine:
    """Decodes many texts together."""
    return tiny_worker(tiny_models, omnidraft_home, CountingMetrics(), max_num_seqs=8).engine


@pytest.fixture(scope="session")
def tool_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target with Qwen's template and a drafter that knows no tools, both with room for an agent's prompt."""
    root = tmp_path_factory.mktemp("tools")
    models = make_target(root / "target", spread=0.3), make_drafter(root / "drafter")
    for folder in models:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16_384}))
    (models[0] / "chat_template.jinja").write_text(QWEN2_5)
    return models


@pytest.fixture(scope="session")
def tool_engine(tool_models: tuple[Path, Path], omnidraft_home: Path) -> Engine:
    """Calls tools in Qwen's format."""
    return tiny_worker(tool_models, omnidraft_home, CountingMetrics()).engine


@pytest.fixture
def engine(tiny_engine: Engine) -> Iterator[Engine]:
    """With a slot of its own."""
    shared = tiny_engine.slot
    tiny_engine.slot = SnapshotSlot(shared.current)
    yield tiny_engine
    tiny_engine.slot = shared


@pytest.fixture
def metrics() -> CountingMetrics:
    return CountingMetrics()


@pytest.fixture
def requests(metrics: CountingMetrics) -> Iterator[RequestQueue]:
    """Two may wait for each engine."""
    made = RequestQueue(metrics, max_waiting=2)
    yield made
    made.close(PATIENCE_S)


@pytest.fixture
def app(requests: RequestQueue, engine: Engine) -> FastAPI:
    settings = WorkerSettings(max_queue=2, max_body_bytes=20_000, max_new_tokens=64)
    return application(requests, [ServedModel(engine, "print")], settings, lambda: b"# metrics\n")


@pytest.fixture
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, raise_server_exceptions=False) as made:
        yield made


@pytest.fixture
def url(app: FastAPI) -> Iterator[str]:
    """The application behind a real server."""
    with served(app) as made:
        yield made


@pytest.fixture
def tool_url(tool_engine: Engine) -> Iterator[str]:
    """The engine that calls tools, behind a real server."""
    requests = RequestQueue(CountingMetrics(), max_waiting=4)
    with served(application(requests, [ServedModel(tool_engine, "print")], WorkerSettings(), lambda: b"")) as made:
        yield made
    requests.close(PATIENCE_S)
