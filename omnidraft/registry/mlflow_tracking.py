"""Experiments that are no versions: one MLflow run each, with parameters, curves and files."""

import time
from collections.abc import Mapping
from pathlib import Path

from omnidraft.registry.mlflow_store import experiment_id, open_client, translated


class Experiment:
    """The runs of one name. Everything raises RegistryError when the store refuses or cannot be reached."""

    def __init__(self, url: str, name: str, *, artifacts: str | None) -> None:
        self._url = url
        self._client = open_client(url)
        with translated(url, "opening an experiment"):
            self._id = experiment_id(self._client, url, name, artifacts)

    def start(self, name: str, params: Mapping[str, str]) -> str:
        """A new run; its id."""
        from mlflow.entities import Param

        with translated(self._url, "starting a run"):
            run_id: str = self._client.create_run(self._id, run_name=name).info.run_id
            self._client.log_batch(run_id, params=[Param(key, value) for key, value in params.items()])
            return run_id

    def log(self, run_id: str, metrics: Mapping[str, float], step: int) -> None:
        """A point of each curve."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        with translated(self._url, "logging a curve"):
            self._client.log_batch(run_id, [Metric(name, value, now_ms, step) for name, value in metrics.items()])

    def log_file(self, run_id: str, path: Path) -> None:
        """A picture or report that belongs to this run."""
        with translated(self._url, "logging a file"):
            self._client.log_artifact(run_id, str(path))

    def end(self, run_id: str, *, has_failed: bool = False) -> None:
        """Nothing more will be logged."""
        with translated(self._url, "ending a run"):
            self._client.set_terminated(run_id, "FAILED" if has_failed else "FINISHED")
