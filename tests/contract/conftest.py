"""One MLflow store a session, in which every test has a pair of its own."""

import itertools
from pathlib import Path

import pytest

from tests.contract.registries import MLFLOW_URLS, DirectoryPair, MlflowPair, Pair

_TARGETS = (f"target{number}" for number in itertools.count())


@pytest.fixture(scope="session")
def mlflow_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """On SQLite."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    """A pair in plain folders; where `on_mlflow_too` stands, in MLflow as well."""
    if url := getattr(request, "param", None):
        return MlflowPair(request.getfixturevalue(url), tmp_path, next(_TARGETS))
    return DirectoryPair(tmp_path)


@pytest.fixture(params=MLFLOW_URLS)
def mlflow(request: pytest.FixtureRequest, tmp_path: Path) -> MlflowPair:
    """A pair in MLflow alone."""
    return MlflowPair(request.getfixturevalue(request.param), tmp_path, next(_TARGETS))
