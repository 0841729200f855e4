"""Loads versions of the registry while the calling thread does other work, and keeps their files as long as needed."""

import logging
import shutil
import time
from collections.abc import Callable, Container
from functools import partial
from pathlib import Path

from omnidraft import throttle
from omnidraft.decode.snapshot.slot import LoadedSnapshot
from omnidraft.errors import SnapshotCorrupt, SnapshotNotFound
from omnidraft.ports import Metrics, NoopTracing, SnapshotReader, SnapshotVersion, Tracing
from omnidraft.snapshots import bundle
from omnidraft.snapshots.bundle import WORKER_PARTS
from omnidraft.snapshots.manifest import Manifest, digest
from omnidraft.threads import beside

logger = logging.getLogger(__name__)


def fetch_for_serving(registry: SnapshotReader, version: int, into: Path) -> Path:
    """Return a local snapshot folder with the worker's parts; without the memory where the version lost it
    (`registry.keep_resume`) or it is damaged. Raises SnapshotNotFound, SnapshotCorrupt, RegistryError."""
    try:
        return registry.fetch(version, into, WORKER_PARTS)
    except SnapshotNotFound:
        return registry.fetch(version, into)
    except SnapshotCorrupt as exc:
        folder = registry.fetch(version, into)  # raises it again where more than the memory is damaged
        logger.error("version %d is used without its memory: %s", version, exc)
        return folder


Loader = Callable[[SnapshotVersion, Path], LoadedSnapshot]
"""Loads a verified snapshot folder. Raises an OmnidraftError when it does not fit."""


class SnapshotLoading:
    """Loads one version at a time.

    Args:
        staging: a folder of this process alone.
        meanwhile: called again and again during a load; it must not raise.
    """

    def __init__(
        self,
        registry: SnapshotReader,
        loader: Loader,
        staging: Path,
        meanwhile: Callable[[], None],
        metrics: Metrics,
        *,
        target: str,
        clock: Callable[[], float] = time.monotonic,
        tracing: Tracing | None = None,
    ) -> None:
        self._registry, self._loader, self._staging, self._meanwhile = registry, loader, staging, meanwhile
        self._metrics, self._target = metrics, target
        self._clock, self._tracing = clock, tracing or NoopTracing()
        self._folders: dict[int, Path] = {}
        self._version: int | None = None
        """The version that is being loaded."""

    def load(self, version: int, expected: str | None) -> LoadedSnapshot:
        """Return a version of the registry. Raises what the registry or the loader raises.

        Args:
            expected: the digest of its manifest; None: whatever the registry has.
        """
        started = self._clock()
        snapshot_version = beside(self._meanwhile, partial(self._registry.resolve, str(version)))
        loaded_from = snapshot_version.manifest.traceparent
        span = self._tracing.begin("load snapshot", links=[loaded_from] if loaded_from else [], version=version)
        self._version = version
        try:
            folder = self._folders[version] = beside(self._meanwhile, partial(self._fetch, version))
            if expected is not None:
                _require_expected(snapshot_version.manifest, bundle.read_manifest(folder), expected)
            loaded = beside(self._meanwhile, partial(self._loader, snapshot_version, folder))
        except Exception as exc:
            span.end(model=self._target, error=type(exc).__name__)
            raise
        finally:
            self._version = None
        self._metrics.observe("omnidraft_snapshot_load_seconds", self._clock() - started, target=self._target)
        span.end(model=self._target)
        return loaded

    def _fetch(self, version: int) -> Path:
        with throttle.throttled():
            return fetch_for_serving(self._registry, version, self._staging)

    def remove_files(self, *, but: Container[int | None]) -> None:
        """Remove the files of all versions but these, and but that of the load under way."""
        for version in [each for each in self._folders if each not in but and each != self._version]:
            shutil.rmtree(self._folders.pop(version), ignore_errors=True)


def is_expected(manifest: Manifest | None, expected: str | None) -> bool:
    """Return whether this manifest has the expected digest; None expects any."""
    return expected is None or (manifest is not None and digest(manifest) == expected)


def _require_expected(resolved: Manifest, fetched: Manifest, expected: str) -> None:
    """Raise SnapshotCorrupt unless what was fetched is what was resolved, and what was announced."""
    if resolved != fetched or not is_expected(fetched, expected):
        raise SnapshotCorrupt(
            f"the registry has snapshot {fetched.snapshot_id} under this version, which is not the announced one"
        )
