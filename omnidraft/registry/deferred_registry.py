"""A registry that is opened by its first reader: importing MLflow takes seconds, too long for a worker's start."""

from collections.abc import Callable, Sequence
from pathlib import Path

from omnidraft.ports import Registry, SnapshotReader, SnapshotVersion


class DeferredRegistry(SnapshotReader):
    """Implements ports.SnapshotReader. One thread at a time; an opening that failed is tried again by the next call."""

    def __init__(self, open_registry: Callable[[], Registry]) -> None:
        self._open_registry = open_registry
        self._registry: Registry | None = None

    def resolve(self, name: str) -> SnapshotVersion:
        """See ports.SnapshotReader. Raises RegistryError when the registry cannot be opened."""
        return self._opened().resolve(name)

    def fetch(self, version: int, into: Path, parts: Sequence[str] = ("serving",)) -> Path:
        """See ports.SnapshotReader. Raises RegistryError when the registry cannot be opened."""
        return self._opened().fetch(version, into, parts)

    def _opened(self) -> Registry:
        if self._registry is None:
            self._registry = self._open_registry()
        return self._registry
