"""Registries from their URLs, and snapshots by the names that people give them: a folder, a version or an alias."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omnidraft import extras
from omnidraft.assembly import signing
from omnidraft.assembly.logs import ELSEWHERE
from omnidraft.config import Settings, masked
from omnidraft.decode.snapshot.loading import fetch_for_serving
from omnidraft.errors import RegistryError
from omnidraft.ports import Registry, SnapshotReader, SnapshotVersion
from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.registry.empty_registry import EmptyRegistry
from omnidraft.registry.mlflow_registry import MlflowRegistry
from omnidraft.registry.mlflow_runs import Experiment
from omnidraft.registry.mlflow_store import check_reachable
from omnidraft.snapshots import bundle
from omnidraft.snapshots.bundle import WORKER_PARTS

logger = logging.getLogger(__name__)

UNPUBLISHED = 0
"""The version number of a snapshot in a folder outside the registry; registries count from 1."""


def registry(settings: Settings) -> Registry:
    """Return the registry of `models.target` and its drafter.

    Raises:
        ExtraMissing: it is MLflow's, and MLflow is not installed.
        RegistryError: nothing answers at its address.
    """
    section, pair = settings.registry, (settings.models.followed_drafter, settings.models.target)
    options: dict[str, Any] = {
        "keep_resume": section.keep_resume,
        "keep_serving": section.keep_serving,
        "signing": signing.snapshot_signing(settings),
    }
    if not section.is_in_mlflow and section.path is not None:
        return DirectoryRegistry(section.path, *pair, **options)
    _require_mlflow(settings)
    check_reachable(section.url)
    return MlflowRegistry(section.url, *pair, artifacts=section.artifacts, **options)


def snapshot_reader(settings: Settings) -> SnapshotReader:
    """Return what a worker reads snapshots from: an empty registry where nobody can have learned, without MLflow and
    its store. Raises as `registry` does."""
    section = settings.registry
    if section.is_in_mlflow and not section.exists and not extras.is_installed("mlflow"):
        logger.info("without MLflow no learned drafter is looked for (pip install 'omnidraft[mlflow]')")
        return EmptyRegistry()
    return registry(settings)


def experiment(settings: Settings, name: str) -> Experiment | None:
    """Return the MLflow experiment for runs that are not versions; None without MLflow. Raises RegistryError."""
    if not settings.registry.is_in_mlflow:
        return None
    _require_mlflow(settings)

    return Experiment(settings.registry.url, name, artifacts=settings.registry.artifacts)


def _require_mlflow(settings: Settings) -> None:
    extras.require("mlflow", f"registry.url = {masked(settings.registry.url)!r} (directory:///path does without)")
    extras.require_driver(settings.registry.url, "registry.url")


def existing_registry(settings: Settings) -> Registry:
    """Return the registry for a command, without creating a local store. Raises RegistryError when there is none."""
    if not settings.registry.exists:
        raise RegistryError(
            f"there is no registry at {masked(settings.registry.url)} yet: a distiller makes it; {ELSEWHERE}"
        )
    return registry(settings)


@contextmanager
def named_folder(settings: Settings, name: str) -> Iterator[tuple[SnapshotVersion, Path]]:
    """Yield the verified snapshot in the folder of this name, else the version or alias of the registry, fetched into a
    temporary folder.

    Raises:
        SnapshotError: there is none of that name, or it lacks the signature of who this process trusts.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        parts = [part for part in WORKER_PARTS if part == "serving" or (folder / part).is_dir()]
        manifest = bundle.verify(folder, parts)
        signing.snapshot_signing(settings).require(manifest)
        yield SnapshotVersion(UNPUBLISHED, manifest, aliases=(), created_ms=manifest.created_ms), folder
        return
    with fetched(existing_registry(settings), name) as (version, folder):
        yield version, folder


@contextmanager
def fetched(snapshots: Registry, name: str) -> Iterator[tuple[SnapshotVersion, Path]]:
    """Yield the version or alias of the registry, fetched into a temporary folder. Raises SnapshotError."""
    version = snapshots.resolve(name)
    with tempfile.TemporaryDirectory(prefix="omnidraft-snapshot-") as staging:
        yield version, fetch_for_serving(snapshots, version.version, Path(staging))


def require_named(settings: Settings, name: str | None) -> None:
    """Raise SnapshotError unless there is a folder, a version or an alias of this name, or none is named: before what
    takes long."""
    if name is not None and not Path(name).expanduser().is_dir():
        existing_registry(settings).resolve(name)
