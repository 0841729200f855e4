"""The learner's side of the registry: one snapshot folder out, the newest one in.

Order of effects of `publish`: the folder is written beside the others and renamed, then the registry takes it as a
child of the version this process last published or resumed from, then the local folder goes.
"""

import shutil
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from omnidraft.errors import ConfigError, SnapshotNotFound, SnapshotStale
from omnidraft.ports import Registry, SnapshotVersion
from omnidraft.snapshots import bundle
from omnidraft.snapshots.manifest import Manifest

LEARNER = "resume/learner.safetensors"
INTAKE = "resume/intake.safetensors"


@dataclass(frozen=True, slots=True)
class Identity:
    """What all snapshots of one distiller have in common."""

    target: str
    drafter: str
    drafter_hash: str
    alignment: str
    train: str
    """full or lora."""
    code_version: str

    def manifest(self, parent_id: str | None, **facts: Any) -> Manifest:
        """Of a new snapshot.

        Args:
            facts: fields of Manifest that this snapshot has beyond its identity.
        """
        own = {"train": self.train} | facts
        return Manifest(
            snapshot_id=uuid.uuid4().hex,
            parent_id=parent_id,
            target=self.target,
            drafter=self.drafter,
            drafter_hash=self.drafter_hash,
            alignment=self.alignment,
            code_version=self.code_version,
            created_ms=time.time_ns() // 1_000_000,
            **own,
        )


@dataclass(frozen=True, slots=True)
class Restored:
    """The newest snapshot, as far as a learner needs it."""

    version: SnapshotVersion
    serving: Mapping[str, Tensor] | None
    """None: the base drafter as it is."""
    ngrams: Mapping[str, np.ndarray]
    learner: Mapping[str, Tensor] | None
    intake: Mapping[str, Tensor] | None


class Publisher:
    """One distiller's view of the registry. A second distiller of the same pair makes this one stale."""

    def __init__(self, registry: Registry, identity: Identity, folder: Path) -> None:
        """`folder` is where snapshots are staged; it belongs to one distiller, and what is in it is deleted."""
        self._registry, self._identity, self._folder = registry, identity, folder
        self.parent: SnapshotVersion | None = None

    def restore(self) -> Restored | None:
        """The newest snapshot, which becomes the parent of the next; None when there is none.

        Raises:
            ConfigError: it is of another base drafter or vocabulary pair, or learned with another `learner.train`.
            RegistryError: the registry cannot be reached.
        """
        shutil.rmtree(self._folder, ignore_errors=True)  # of a process that was killed
        try:
            newest = self._registry.resolve("latest")
        except SnapshotNotFound:
            return None
        self._require_ours(newest.manifest)
        parts = bundle.parts_of(newest.manifest)
        folder = self._registry.fetch(newest.version, self._folder, parts)
        has_resume = "resume" in parts
        restored = Restored(
            version=newest,
            serving=bundle.serving_tensors(folder),
            ngrams=bundle.ngrams(folder),
            learner=bundle.tensors(folder, LEARNER) if has_resume else None,
            intake=bundle.tensors(folder, INTAKE) if has_resume else None,
        )
        shutil.rmtree(folder, ignore_errors=True)
        self.parent = newest
        return restored

    def stage(self, parts: Mapping[str, bundle.Tensors], **facts: Any) -> Path:
        """A snapshot folder, ready for `publish`.

        Args:
            facts: fields of Manifest that this snapshot has beyond its identity.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        manifest = self._identity.manifest(self.parent.manifest.snapshot_id if self.parent else None, **facts)
        folder = Path(tempfile.mkdtemp(prefix="snapshot-", dir=self._folder)) / "bundle"
        bundle.write(folder, manifest, {name: tensors for name, tensors in parts.items() if tensors})
        return folder

    def publish(self, staged: Path) -> SnapshotVersion:
        """The staged folder becomes the newest version. After RegistryError it may be tried again.

        Raises:
            SnapshotStale: another distiller published since; this one must end.
            RegistryError: refused or cannot be reached.
        """
        known = self.parent.version if self.parent else None
        try:
            published = self._registry.publish(staged, known)
        except SnapshotStale as exc:
            raise SnapshotStale(f"another distiller learns for this pair, so this one ends: {exc}") from exc
        self.parent = published
        shutil.rmtree(staged.parent, ignore_errors=True)
        return published

    def log_curves(self) -> None:
        """A point of each curve of the newest version. Raises RegistryError."""
        if self.parent is None:
            return
        manifest = self.parent.manifest
        curves = {f"loss_{name}": loss for name, loss in manifest.losses.items()}
        curves |= {
            name: value
            for name in ("agreement_before", "agreement_after")
            if (value := getattr(manifest, name)) is not None
        }
        self._registry.log_metrics(self.parent.version, curves, manifest.num_steps)

    def _require_ours(self, manifest: Manifest) -> None:
        ours = self._identity
        for name in ("target", "drafter", "drafter_hash", "alignment"):
            if getattr(manifest, name) != getattr(ours, name):
                raise ConfigError(
                    f"the registry's newest snapshot has {name} {getattr(manifest, name)}, "
                    f"this distiller {getattr(ours, name)}; use another registry"
                )
        if manifest.train not in ("base", ours.train):
            raise ConfigError(f"the newest snapshot was learned with learner.train={manifest.train}, not {ours.train}")
