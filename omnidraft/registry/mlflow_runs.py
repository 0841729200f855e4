"""The MLflow run behind each version: its files, parameters and curves.

Files of a run: manifest.json, serving/, resume/ as in the bundle, and reports/.
"""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from omnidraft.errors import SnapshotNotFound
from omnidraft.registry import manifest_export
from omnidraft.registry.mlflow_store import experiment_id, local_folder
from omnidraft.snapshots import bundle, files
from omnidraft.snapshots.manifest import Manifest

if TYPE_CHECKING:
    from mlflow import MlflowClient


class Runs:
    """The runs of one pair's experiment. Raises MLflow's errors; the registry translates them."""

    def __init__(self, client: "MlflowClient", url: str, name: str, artifacts: str | None) -> None:
        self._client = client
        self._url = url
        self._name = name
        self._artifacts = artifacts

    def upload(self, folder: Path, manifest: Manifest) -> tuple[str, str]:
        """A finished run with the snapshot's files, parameters and metrics: its id and where its files are."""
        run = self._client.create_run(
            experiment_id(self._client, self._url, self._name, self._artifacts),
            run_name=manifest.snapshot_id,
            tags=manifest_export.tags(manifest),
        )
        run_id = run.info.run_id
        self._log(run_id, manifest)
        self._put_files(run_id, run.info.artifact_uri, folder, manifest)
        self._client.set_terminated(run_id)
        return run_id, run.info.artifact_uri

    def download(self, run_id: str, part: str, destination: Path) -> None:
        """Put a part's folder into `destination`. Raises SnapshotNotFound when the part was removed."""
        folder = local_folder(self._client.get_run(run_id).info.artifact_uri)
        is_there = (folder / part).is_dir() if folder else bool(self._client.list_artifacts(run_id, part))
        if not is_there:
            raise SnapshotNotFound(f"run {run_id} has no {part} part any more (registry.keep_resume)")
        if folder:
            files.link_folder(folder / part, destination / part)
        else:
            self._client.download_artifacts(run_id, part, str(destination))

    def remove(self, run_id: str, part: str) -> None:
        """Delete a part's files; the run stays."""
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        artifact_uri = self._client.get_run(run_id).info.artifact_uri
        get_artifact_repository(artifact_uri, tracking_uri=self._url).delete_artifacts(part)

    def discard(self, run_id: str) -> None:
        """Delete a run that became no version; files behind a server wait for `mlflow gc`."""
        folder = local_folder(self._client.get_run(run_id).info.artifact_uri)
        self._client.delete_run(run_id)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)

    def log_metrics(self, run_id: str, metrics: Mapping[str, float], step: int) -> None:
        """A point of each curve."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._client.log_batch(run_id, metrics=[Metric(name, value, now_ms, step) for name, value in metrics.items()])

    def _log(self, run_id: str, manifest: Manifest) -> None:
        from mlflow.entities import Param

        self._client.log_batch(
            run_id, params=[Param(name, value) for name, value in manifest_export.params(manifest).items()]
        )
        self.log_metrics(run_id, manifest_export.metrics(manifest), manifest.num_steps)
        self._client.set_tag(run_id, "mlflow.note.content", manifest_export.description(manifest))

    def _put_files(self, run_id: str, artifact_uri: str, source: Path, manifest: Manifest) -> None:
        folder = local_folder(artifact_uri)
        for part in bundle.parts_of(manifest):
            if folder:
                files.make_folder(folder)
                files.link_folder(source / part, folder / part)
                files.sync_tree(folder)
            else:
                self._client.log_artifacts(run_id, str(source / part), part)
        self._client.log_text(run_id, bundle.manifest_text(manifest), bundle.MANIFEST)
