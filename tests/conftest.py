"""Fixtures that every test may use: a Kafka broker, MLflow on PostgreSQL, tiny models, a home for caches."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnidraft.models.tiny import make_drafter, make_target
from tests.kafka_fixture import kafka_bootstrap as kafka_bootstrap
from tests.postgres_fixture import postgres as postgres
from tests.postgres_fixture import postgres_mlflow_url as postgres_mlflow_url

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a tiny target and of a tiny drafter with another vocabulary."""
    root = tmp_path_factory.mktemp("models")
    return make_target(root / "target"), make_drafter(root / "drafter")


@pytest.fixture(scope="session")
def omnidraft_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models and alignments are cached in tests."""
    return tmp_path_factory.mktemp("home")


class _Heard(logging.Handler):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture(autouse=True)
def _drafting_does_not_fail(request: pytest.FixtureRequest) -> Iterator[None]:
    """A failure of drafting changes no text, so no test would see it: it fails here, unless the test is about it."""
    logger, heard = logging.getLogger("omnidraft.decode.safe_drafting"), _Heard()
    logger.addHandler(heard)
    yield
    logger.removeHandler(heard)
    if request.node.get_closest_marker("drafting_fails") is None:
        assert not heard.records, [str(record.exc_info and record.exc_info[1]) for record in heard.records]
