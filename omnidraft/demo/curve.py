"""The learning curve: each snapshot judged, as workers serve it, on the same recorded answers that it never learned."""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omnidraft import assembly, config
from omnidraft.demo.answers import recorded
from omnidraft.distill.evaluation.agreement import block_efficiency, share
from omnidraft.ports import Registry, SnapshotVersion
from omnidraft.stats import paired_standard_error

CHAIN = 8
"""The length of the chains for which tokens per pass are predicted."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One snapshot, with its n-gram cache, on the held-out answers."""

    version: int
    num_tokens: int
    """Target tokens learned."""
    num_positions: int
    agreement: float
    gain: float
    """Over the first point, on the same positions."""
    gain_error: float
    """The standard error of the gain, each answer taken as one draw."""
    predicted_tokens_per_pass: float
    """With chains of CHAIN first candidates."""

    def plain_data(self) -> dict[str, Any]:
        """Return the point as JSON data."""
        return asdict(self)


class LearningCurve:
    """Measures snapshots of one registry; the drafter is in memory once more while it does."""

    def __init__(self, settings: config.Settings, registry: Registry, folder: Path) -> None:
        """
        Args:
            folder: snapshots are fetched there, and removed.
        """
        self.points: list[CurvePoint] = []
        self._settings, self._registry, self._folder = settings, registry, folder
        self._tokenizers = assembly.vocabularies(settings)
        self._held_out, _ = recorded(0)

    def add(self, version: SnapshotVersion) -> None:
        """Measure a version as the next point. Raises RegistryError, SnapshotNotFound, SnapshotCorrupt."""
        folder = self._registry.fetch(version.version, self._folder)
        try:
            learner = assembly.learner_from_snapshot(self._settings, self._tokenizers, version.manifest, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        hits = learner.hits(self._held_out, with_cache=True)
        if not self.points:
            self._first_hits = hits
        before, after = share(self._first_hits) or 0.0, share(hits) or 0.0
        requests = [record.request_id for record in self._held_out]
        self.points.append(
            CurvePoint(
                version=version.version,
                num_tokens=version.manifest.num_tokens,
                num_positions=sum(map(len, hits)),
                agreement=after,
                gain=after - before,
                gain_error=paired_standard_error(zip(requests, self._first_hits, hits, strict=True)) or 0.0,
                predicted_tokens_per_pass=block_efficiency(hits, CHAIN) or 1.0,
            )
        )
