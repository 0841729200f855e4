"""The learner's side of the registry: it publishes states as versions, and restores them.

Order of effects of `publish`: the folder is written beside the others and renamed, then the registry takes it as a
child of the version this process last published or started from, then the local folder is deleted.
"""

import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omnidraft.distill.identity import Identity
from omnidraft.distill.memory.memory_files import MemoryFiles
from omnidraft.distill.resume_encryption import decrypt_records, encrypt_records
from omnidraft.errors import ConfigError, SnapshotCorrupt, SnapshotNotFound, SnapshotStale, StorageError
from omnidraft.ports import Registry, Rewind, SnapshotVersion
from omnidraft.snapshots import bundle
from omnidraft.snapshots.manifest import Manifest
from omnidraft.snapshots.tenant_factors import FOLDER

logger = logging.getLogger(__name__)

Retry = Callable[[Callable[[], Any]], Any]
"""Calls a function until it succeeds, and returns what that returns."""
LEARNER = "resume/learner.safetensors"
BATCHER = "resume/intake.safetensors"
_ADVICE = "put one back from a backup, or publish a folder: `omnidraft snapshots publish FOLDER`"


@dataclass(frozen=True, slots=True)
class Restored:
    """The parts of a snapshot that a learner needs to go on from it."""

    version: SnapshotVersion
    serving: Mapping[str, Tensor] | None
    """None: the base drafter as it is."""
    ngrams: Mapping[str, np.ndarray]
    learner: Mapping[str, Tensor] | None
    batcher: Mapping[str, Tensor] | None
    num_forgotten: int = 0
    """Records that were left out, as their keys are destroyed."""


class Publisher:
    """The registry as one distiller uses it. A second distiller of the same pair makes this one stale."""

    def __init__(
        self,
        registry: Registry,
        identity: Identity,
        folder: Path,
        memory: MemoryFiles,
    ) -> None:
        """
        Args:
            folder: where snapshots are staged; it belongs to this distiller alone, and its files are deleted.
            memory: the fleet's memory, whose files every snapshot gets; it goes on with those of the restored one. Its
                cipher encrypts the records in the resume part, too.
        """
        self.registry, self._identity, self._folder, self._memory = registry, identity, folder, memory
        self.parent: SnapshotVersion | None = None
        self.settled_rewind: Rewind | None = None
        """The newest order to go back, if it needs nothing more."""
        self._continues: str | None = None
        self._newest: int | None = None
        """The newest version that this publisher knows; the parent's, unless the newest one is damaged."""

    def restore(self, version: int | None = None) -> Restored | None:
        """Return this snapshot, or the newest that is whole; None when there is no snapshot. The fleet's memory is that
        of the snapshot from now on.

        Raises:
            ConfigError: it is of another base drafter or vocabulary pair, or learned with another `learner.train`.
                Its records are encrypted with keys that are not known.
            SnapshotCorrupt: it is not whole, or none is.
            SnapshotNotFound: there is no such version, or its optimizer is gone.
            RegistryError, KeyStoreError: the registry or the key store cannot be reached.
        """
        shutil.rmtree(self._folder, ignore_errors=True)  # of a process that was killed
        if version is not None:
            return self._restored(self.registry.resolve(str(version)), is_newest=True)
        versions = self.registry.versions()
        if not versions:
            self._require_empty()
            return None
        self._newest = versions[-1].version
        for each in reversed(versions):
            try:
                return self._restored(each, is_newest=each is versions[-1])
            except (SnapshotCorrupt, SnapshotNotFound) as exc:
                number = each.version
                logger.error("snapshot %d is damaged, so learning goes on from the one before: %s", number, exc)
        raise SnapshotCorrupt(f"each of the {len(versions)} snapshots of this pair is damaged; {_ADVICE}")

    def _require_empty(self) -> None:
        """Raise SnapshotCorrupt when there are snapshots after all, none of which has a readable manifest."""
        for alias in ("champion", "challenger"):
            try:
                with suppress(SnapshotNotFound):
                    self.registry.resolve(alias)
            except SnapshotCorrupt as exc:
                raise SnapshotCorrupt(f"no snapshot of this pair can be read: {exc}; {_ADVICE}") from exc

    def version_before(self, order: Rewind) -> Restored | None:
        """Return the version that the order names if the next snapshot would descend from the one that it leaves; else
        None, as after going back, or when the version cannot be read or does not fit this learner. Raises
        RegistryError."""
        by_id = {version.manifest.snapshot_id: version for version in self.registry.versions()}
        try:
            chosen, at = self.registry.resolve(str(order.version) if order.is_ordered else "champion"), self.parent
            while at is not None and at.manifest.snapshot_id != order.id:
                is_end = at.manifest.parent_id is None or at.version == chosen.version
                at = None if is_end else by_id.pop(at.manifest.parent_id or "", None)
            if at is None or at.version == chosen.version:
                return None
            return self._restored(chosen, is_newest=False, takes_memory=False)
        except (SnapshotCorrupt, SnapshotNotFound, ConfigError) as exc:
            logger.error("learning does not go back to version %d: %s", order.version, exc)
            return None

    def go_on_from(self, parent: SnapshotVersion, *, continues: SnapshotVersion | None = None) -> None:
        """Make this the parent of the next snapshot, which continues the offsets of another one, if given."""
        self._continues = continues.manifest.snapshot_id if continues else None
        self.parent = parent

    def _restored(self, version: SnapshotVersion, *, is_newest: bool, takes_memory: bool = True) -> Restored:
        """Return the parts of this snapshot; any but the newest may lack its resume part (registry.keep_resume). Raises
        SnapshotCorrupt, SnapshotNotFound: it cannot be read."""
        self._require_ours(version.manifest)
        is_base = version.manifest.train == "base"  # known without its files
        parts = bundle.parts_of(version.manifest, version.removed_parts if is_base else ())
        try:
            folder = self.registry.fetch(version.version, self._folder, parts)
        except SnapshotNotFound:
            if is_newest:
                raise
            logger.warning("snapshot %d has no optimizer any more, which begins anew", version.version)
            parts = ("serving",)
            folder = self.registry.fetch(version.version, self._folder, parts)
        has_resume = "resume" in parts
        try:
            if takes_memory:
                self._memory.restore(folder)
            learner, batcher = (
                decrypt_records(bundle.tensors(folder, name), self._memory.cipher) if has_resume else None
                for name in (LEARNER, BATCHER)
            )
            return Restored(
                version=version,
                serving=bundle.serving_tensors(folder),
                ngrams=bundle.ngrams(folder),
                learner=learner and learner[0],
                batcher=batcher and batcher[0],
                num_forgotten=sum(part[1] for part in (learner, batcher) if part),
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(
        self, parts: Mapping[str, bundle.Tensors], fields: Mapping[str, Any], retry: Retry = lambda action: action()
    ) -> SnapshotVersion:
        """Publish this state as the newest version.

        Args:
            fields: fields of Manifest that this snapshot has beyond its identity.
            retry: calls a function until it succeeds.

        Raises:
            SnapshotStale: another distiller published since; this one must end.
            KeyStoreError, RegistryError: the key store or the registry refuses or does not answer.
            StorageError: the disk has no space for it; nothing of it stays.
        """
        staged = retry(lambda: self._stage(parts, fields))
        published = retry(lambda: self._take(staged))
        self.parent, self._newest, self._continues = published, published.version, None
        shutil.rmtree(staged.parent, ignore_errors=True)
        return published

    def _take(self, staged: Path) -> SnapshotVersion:
        """Have the registry take a staged folder. Raises SnapshotStale, RegistryError."""
        try:
            return self.registry.publish(staged, self._newest)
        except SnapshotStale as exc:
            newest = next(reversed(self.registry.versions(1)), None)
            if newest is not None and newest.version >= (self._newest or 0):
                raise SnapshotStale(f"another distiller learns for this pair, so this one ends: {exc}") from exc
        return self.registry.publish(self._after_deletion(staged, newest), self._newest)

    def _after_deletion(self, staged: Path, newest: SnapshotVersion | None) -> Path:
        """Let a staged folder follow the newest version that is left, as those since then were deleted: its offsets and
        counts continue that one's."""
        logger.warning(
            "snapshot %s is deleted in the registry; learning goes on from what it learned, and publishes after %s",
            self._newest,
            newest.version if newest else "none",
        )
        self._newest = newest.version if newest else None
        continues = {"continues_id": newest.manifest.snapshot_id if newest else None}
        bundle.write_manifest(staged, bundle.read_manifest(staged).model_copy(update=continues))
        return staged

    def _stage(self, parts: Mapping[str, bundle.Tensors], fields: Mapping[str, Any]) -> Path:
        """Write a snapshot folder and return its path. Raises StorageError, KeyStoreError."""
        content: dict[str, Path | bundle.Tensors] = {name: self._encrypted(name, parts[name]) for name in parts}
        content |= self._memory.stage()
        parent_id = self.parent.manifest.snapshot_id if self.parent else None
        manifest = self._identity.manifest(parent_id, continues_id=self._continues, **fields)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix="snapshot-", dir=self._folder))
        except OSError as exc:
            raise StorageError(f"no snapshot can be staged in {self._folder}: {exc}; free space there") from exc
        try:
            whole = {name: each for name, each in content.items() if each or name.startswith(FOLDER)}
            bundle.write(folder / "bundle", manifest, whole)
        except StorageError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder / "bundle"

    def _encrypted(self, name: str, tensors: bundle.Tensors) -> bundle.Tensors:
        """Return the tensors of a file with their records and tenants' factors encrypted, if it may have some."""
        cipher = self._memory.cipher
        if cipher is None or not (name in (LEARNER, BATCHER) or name.startswith(FOLDER)):
            return tensors
        return encrypt_records({key: torch.as_tensor(value) for key, value in tensors.items()}, cipher)

    def _require_ours(self, manifest: Manifest) -> None:
        ours = self._identity
        for name in ("target", "drafter", "drafter_hash", "alignment"):
            if getattr(manifest, name) != getattr(ours, name):
                raise ConfigError(
                    f"snapshot {manifest.snapshot_id} has {name} {getattr(manifest, name)}, "
                    f"this distiller {getattr(ours, name)}; use another registry"
                )
        if manifest.train not in ("base", ours.train):
            name = f"snapshot {manifest.snapshot_id}"
            raise ConfigError(f"{name} was learned with learner.train={manifest.train}, not {ours.train}")
