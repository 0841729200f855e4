"""Fixtures that every test may use: a Kafka broker, MLflow on PostgreSQL, tiny models, a home for caches."""

import os
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
