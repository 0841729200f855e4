"""What all snapshots of one distiller have in common."""

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omnidraft.snapshots.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Identity:
    """The manifest fields that all snapshots of one distiller have in common."""

    target: str
    drafter: str
    drafter_hash: str
    alignment: str
    train: str
    """full or lora."""
    code_version: str
    settings: Mapping[str, str] = field(default_factory=dict)
    """The learner's settings by name."""

    def manifest(self, parent_id: str | None, **fields: Any) -> Manifest:
        """Return the manifest of a new snapshot; one of the base drafter has no settings, as nothing was learned.

        Args:
            fields: fields of Manifest that this snapshot has beyond its identity.
        """
        own = {"train": self.train} | fields
        own.setdefault("settings", {} if own["train"] == "base" else self.settings)
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
