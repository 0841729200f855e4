"""MLflow runs: those behind the registry's versions, and those of experiments that are no versions.

One run more has the curves over all versions.
Files of a version's run: manifest.json, serving/, memory/ and resume/ as in the bundle.
"""

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omnidraft import files
from omnidraft.errors import RegistryError
from omnidraft.registry import manifest_export, staging
from omnidraft.registry.mlflow_store import (
    experiment_id,
    local_folder,
    open_client,
    translate_artifact_errors,
    translate_errors,
    undo_on_failure,
)
from omnidraft.snapshots import bundle
from omnidraft.snapshots.manifest import Manifest

if TYPE_CHECKING:
    from mlflow import MlflowClient


ABANDONED_MS = 24 * 3_600_000
"""A publisher whose run is older and not finished died; an upload takes minutes."""
CURVES = "all versions"
"""The name of the run with a point for each version of the pair."""


class Runs:
    """The runs behind one pair's versions. Raises MLflow's errors, which the registry translates, and RegistryError for
    those of an artifact store's own library."""

    def __init__(self, client: "MlflowClient", url: str, name: str, artifacts: str | None) -> None:
        self._client = client
        self._url = url
        self._name = name
        self._artifacts = artifacts

    def upload(self, folder: Path, manifest: Manifest) -> tuple[str, str]:
        """Make a run with the snapshot's files, parameters and metrics; return its id and artifact URI. A run that
        cannot be made whole is discarded."""
        run = self._client.create_run(
            experiment_id(self._client, self._url, self._name, self._artifacts),
            run_name=manifest.snapshot_id,
            tags=manifest_export.tags(manifest),
        )
        run_id = run.info.run_id
        with undo_on_failure(partial(self.discard, run_id)):
            self._log(run_id, manifest)
            with translate_artifact_errors(self._url):
                self._put_files(run_id, run.info.artifact_uri, folder, manifest)
        return run_id, run.info.artifact_uri

    def finish(self, run_id: str) -> None:
        """Mark a run as finished, since its version is ready."""
        self._client.set_terminated(run_id)

    def abandoned(self) -> list[str]:
        """Return the runs that were started ABANDONED_MS ago, or earlier, and never finished."""
        experiment = experiment_id(self._client, self._url, self._name, self._artifacts)
        earliest_ms = int(time.time() * 1000) - ABANDONED_MS
        old = f"attributes.status = 'RUNNING' and attributes.start_time < {earliest_ms}"
        return [run.info.run_id for run in self._client.search_runs([experiment], filter_string=old)]

    def download(self, version: int, run_id: str, part: str, destination: Path) -> None:
        """Put the folder of a version's part into `destination`. Raises SnapshotNotFound when the part was removed."""
        folder = local_folder(self._client.get_run(run_id).info.artifact_uri)
        with translate_artifact_errors(self._url):
            is_present = (folder / part).is_dir() if folder else bool(self._client.list_artifacts(run_id, part))
            if not is_present:
                raise staging.missing_part(version, part)
            if folder:
                files.link_folder(folder / part, destination / part)
            else:
                self._client.download_artifacts(run_id, part, str(destination))

    def remove(self, run_id: str, part: str | None = None) -> None:
        """Delete the files of a part, or all; look whether they are gone, as MLflow ignores that S3 refuses some."""
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        with translate_artifact_errors(self._url):
            store = get_artifact_repository(self._client.get_run(run_id).info.artifact_uri, tracking_uri=self._url)
            store.delete_artifacts(part)
            if store.list_artifacts(part):
                raise RegistryError(f"the artifact store of run {run_id} keeps files; may this process delete there?")

    def discard(self, run_id: str) -> None:
        """Delete a run that became no version, its files first: while any of them stay, the run can be found."""
        self.remove(run_id)
        self._client.delete_run(run_id)

    def log_point(self, metrics: Mapping[str, float], version: int) -> None:
        """Add this version to the curves of the pair, which are those of one run: its steps are versions."""
        experiment = experiment_id(self._client, self._url, self._name, self._artifacts)
        found = self._client.search_runs([experiment], f"attributes.run_name = '{CURVES}'", max_results=1)
        run = found[0] if found else self._client.create_run(experiment, run_name=CURVES)
        _log_metrics(self._client, run.info.run_id, metrics, version)
        self._client.set_terminated(run.info.run_id)  # else it is taken for one that a publisher left

    def _log(self, run_id: str, manifest: Manifest) -> None:
        from mlflow.entities import Param

        self._client.log_batch(
            run_id, params=[Param(name, value) for name, value in manifest_export.params(manifest).items()]
        )
        _log_metrics(self._client, run_id, manifest_export.metrics(manifest), manifest.num_steps)

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


class Experiment:
    """The runs of one MLflow experiment. Methods raise RegistryError when the store refuses or cannot be reached."""

    def __init__(self, url: str, name: str, *, artifacts: str | None) -> None:
        self._url = url
        self._client = open_client(url)
        with translate_errors(url, "opening an experiment"):
            self._id = experiment_id(self._client, url, name, artifacts)

    def start(self, name: str, params: Mapping[str, str]) -> str:
        """Start a run and return its id."""
        from mlflow.entities import Param

        with translate_errors(self._url, "starting a run"):
            run_id: str = self._client.create_run(self._id, run_name=name).info.run_id
            self._client.log_batch(run_id, params=[Param(key, value) for key, value in params.items()])
            return run_id

    def log(self, run_id: str, metrics: Mapping[str, float], step: int) -> None:
        """Log one point of each curve."""
        with translate_errors(self._url, "logging a curve"):
            _log_metrics(self._client, run_id, metrics, step)

    def end(self, run_id: str, *, has_failed: bool = False) -> None:
        """Mark the run as finished or failed."""
        with translate_errors(self._url, "ending a run"):
            self._client.set_terminated(run_id, "FAILED" if has_failed else "FINISHED")


def _log_metrics(client: "MlflowClient", run_id: str, metrics: Mapping[str, float], step: int) -> None:
    from mlflow.entities import Metric

    now_ms = int(time.time() * 1000)
    client.log_batch(run_id, metrics=[Metric(name, value, now_ms, step) for name, value in metrics.items()])
