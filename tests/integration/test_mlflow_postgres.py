"""The registry on an MLflow server over PostgreSQL: many publishers at once, and a database that restarts."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from omnidraft.errors import RegistryError, SnapshotStale
from omnidraft.ports import Registry
from omnidraft.registry.mlflow_registry import MlflowRegistry
from tests.postgres_fixture import Postgres
from tests.snapshot_folders import make_bundle

pytestmark = pytest.mark.long

NUM_PUBLISHERS = 4
BACK_S = 30.0


def open_registry(url: str, target: str) -> MlflowRegistry:
    return MlflowRegistry(url, "org/small", target, artifacts=None, keep_resume=2)


@pytest.mark.timeout(300)  # the servers start within the first test
def test_of_publishers_at_once_with_one_parent_one_wins(postgres_mlflow_url: str, tmp_path: Path) -> None:
    """Compare-and-set holds over several server processes, round after round."""
    parent = None
    for turn in range(3):
        folders = [make_bundle(tmp_path, f"s{turn}-{n}", target="race") for n in range(NUM_PUBLISHERS)]
        registries = [open_registry(postgres_mlflow_url, "race") for _ in folders]
        with ThreadPoolExecutor(NUM_PUBLISHERS) as threads:
            asked = [
                threads.submit(each.publish, folder, parent) for each, folder in zip(registries, folders, strict=True)
            ]
            refusals = [each.exception() for each in asked]
        assert sorted(map(type, refusals), key=str) == sorted(
            [type(None), *[SnapshotStale] * (NUM_PUBLISHERS - 1)], key=str
        )
        (won,) = [each.result() for each in asked if each.exception() is None]
        parent = won.version
        registry = open_registry(postgres_mlflow_url, "race")
        registry.promote(parent)
        assert registry.resolve("champion").manifest.snapshot_id == won.manifest.snapshot_id
        assert len(registry.versions()) == turn + 1


def test_a_database_that_restarts_is_an_error_and_then_all_is_there(
    postgres: Postgres, postgres_mlflow_url: str, tmp_path: Path
) -> None:
    registry = open_registry(postgres_mlflow_url, "restart")
    registry.publish(make_bundle(tmp_path, "s1", target="restart"), None)
    postgres.stop()
    with pytest.raises(RegistryError):
        registry.resolve("1")
    postgres.start()
    answer = wait_for_answer(registry)
    assert answer == "s1"
    registry.promote(registry.publish(make_bundle(tmp_path, "s2", target="restart"), 1).version)
    assert [each.aliases for each in registry.versions()] == [(), ("champion",)]


def wait_for_answer(registry: Registry) -> str:
    deadline = time.monotonic() + BACK_S
    while True:
        try:
            return registry.resolve("1").manifest.snapshot_id
        except RegistryError:
            assert time.monotonic() < deadline
            time.sleep(0.2)
