"""Registries for workers: one that is opened when it is first read, and one that is empty."""

from collections.abc import Callable, Sequence
from pathlib import Path

from omnidraft.errors import SnapshotNotFound
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


class EmptyRegistry(SnapshotReader):
    """Implements ports.SnapshotReader."""

    def resolve(self, name: str) -> SnapshotVersion:
        """See ports.SnapshotReader. Raises SnapshotNotFound."""
        raise SnapshotNotFound(f"there is no version {name!r}: no registry is in use")

    def fetch(self, version: int, into: Path, parts: Sequence[str] = ("serving",)) -> Path:
        """See ports.SnapshotReader. Raises SnapshotNotFound."""
        raise SnapshotNotFound(f"there is no version {version}: no registry is in use")
