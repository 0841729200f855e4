"""The registries of one pair that contract tests open, again and again."""

from pathlib import Path
from typing import Any

import pytest

from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.registry.manifest_export import MANIFEST_TAG, pair_name
from omnidraft.registry.mlflow_registry import MlflowRegistry
from omnidraft.registry.mlflow_store import open_client
from tests.snapshot_folders import make_bundle, version_folder

DRAFTER = "org/small"
MLFLOW_URLS = ["mlflow_url", pytest.param("postgres_mlflow_url", marks=pytest.mark.long)]
"""Fixtures of MLflow's stores."""
on_mlflow_too = pytest.mark.parametrize("store", [None, *MLFLOW_URLS], indirect=True, ids=str)


class DirectoryPair:
    """A pair in plain folders."""

    def __init__(self, folder: Path, target: str = "big") -> None:
        self.folder, self.target = folder, target

    def open(self, *, keep_resume: int = 2, **options: Any) -> DirectoryRegistry:
        return DirectoryRegistry(self.folder / "registry", DRAFTER, self.target, keep_resume=keep_resume, **options)

    def bundle(self, snapshot_id: str, **fields: Any) -> Path:
        """A folder to publish."""
        return make_bundle(self.folder / "bundles", snapshot_id, target=self.target, **fields)

    def version_folder(self, version: int) -> Path:
        return version_folder(self.folder / "registry", version)

    def write_manifest(self, version: int, text: str) -> None:
        """As somebody does who can write in the store."""
        (self.version_folder(version) / "snapshot/manifest.json").write_text(text)


class MlflowPair:
    """A pair in an MLflow store that others share."""

    def __init__(self, url: str, folder: Path, target: str, artifacts: str | None = None) -> None:
        self.url, self.folder, self.target, self.artifacts = url, folder, target, artifacts
        self.client, self.name = open_client(url), pair_name(DRAFTER, target)

    def open(self, *, keep_resume: int = 2, **options: Any) -> MlflowRegistry:
        options = {"artifacts": self.artifacts, "keep_resume": keep_resume, **options}
        return MlflowRegistry(self.url, DRAFTER, self.target, **options)

    def bundle(self, snapshot_id: str, **fields: Any) -> Path:
        """A folder to publish."""
        return make_bundle(self.folder / "bundles", snapshot_id, target=self.target, **fields)

    def write_manifest(self, version: int, text: str) -> None:
        """As somebody does who can write in the store."""
        self.client.set_model_version_tag(self.name, str(version), MANIFEST_TAG, text)


Pair = DirectoryPair | MlflowPair
