"""Comparison of snapshots on drifted traffic: the one that serves need not agree best any more.

All are measured on the same records, the tenant's newest, which only the champion may have learned; a snapshot's
offsets tell, not its time. The result is put on the control log; the controller decides. It is advice: a failure
on the way is logged, and learning goes on.
Source: docs/algorithms.md, sections 9 and 11.
"""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np
from torch import Tensor

from omnidraft.distill.evaluation.agreement import share
from omnidraft.distill.ingest.topic_scan import RecentRecords
from omnidraft.distill.training.learner import Learner
from omnidraft.errors import BusError, ConfigError, SnapshotCorrupt, SnapshotError, SnapshotNotFound
from omnidraft.ports import Best, ControlWriter, Offsets, Registry, SnapshotVersion
from omnidraft.snapshots import bundle
from omnidraft.snapshots.manifest import Manifest
from omnidraft.stats import paired_standard_error
from omnidraft.traces.record import TraceRecord

logger = logging.getLogger(__name__)

MOST_SNAPSHOTS = 6
LEAST_RECORDS = 4
_SURELY = 1.645
"""Standard errors that a better snapshot must be better by: 95 % one-sided."""


@dataclass(frozen=True, slots=True)
class _Measurement:
    """A snapshot's hits on the records."""

    version: int
    hits: Sequence[np.ndarray]
    """Whether each position of each record agrees, bool [P]."""

    @property
    def agreement(self) -> float:
        return share(self.hits) or 0.0


class SnapshotComparison:
    """Compares the snapshots of one pair. Belongs to the learner's thread."""

    def __init__(
        self,
        registry: Registry,
        learner: Learner,
        recent: RecentRecords,
        control: ControlWriter,
        base: Callable[[], Mapping[str, Tensor]],
        folder: Path,
    ) -> None:
        """Use the learner's drafter, which gets its own weights back after each comparison.

        Args:
            base: weights of the base drafter, for the snapshots that have none.
            folder: snapshots are fetched there, and removed.
        """
        self._registry, self._learner, self._recent = registry, learner, recent
        self._control, self._base, self._folder = control, base, folder

    def compare(self, tenant: str) -> None:
        """Tell the control log which snapshot agrees best with this tenant's newest records, if it surely beats the
        champion."""
        try:
            self._compare(tenant)
        except (BusError, SnapshotError) as exc:
            logger.warning("earlier snapshots were not compared on the traffic of %s: %s", tenant, exc)

    def _compare(self, tenant: str) -> None:
        versions, newest = self._registry.versions(), self._recent.of(tenant)
        records = [record for _, _, record in newest]
        champion = next((each for each in versions if "champion" in each.aliases), None)
        if champion is None or len(records) < LEAST_RECORDS:
            logger.info("%d new records of %s: too few to compare snapshots on", len(records), tenant)
            return
        promotion = champion.judgement.promotion if champion.judgement is not None else None
        firsts = {partition: offset for partition, offset, _ in reversed(newest)}
        measured = [self._measure(each, records) for each in candidates(versions, firsts)]
        measurements = [each for each in measured if each is not None]
        serving = next((each for each in measurements if each.version == champion.version), None)
        if serving is None:
            return  # there is nothing that another one could be better than
        best = max(measurements, key=lambda each: each.agreement)
        by_version = ", ".join(f"{each.version}: {each.agreement:.3f}" for each in measurements)
        reason = f"agreement on the {len(records)} newest records of {tenant}, by version: {by_version}"
        logger.info(reason)
        if _is_surely_better(best, serving, records):
            self._control.put(("best", tenant), Best(version=best.version, promotion=promotion), reason)

    def _measure(self, version: SnapshotVersion, records: Sequence[TraceRecord]) -> _Measurement | None:
        """Return None for a snapshot that is damaged or gone, or does not fit the drafter, as its rank is another."""
        try:
            return _Measurement(version.version, self._hits(version.version, records))
        except (ConfigError, SnapshotCorrupt, SnapshotNotFound) as exc:
            logger.warning("snapshot %d is not compared: %s", version.version, exc)
            return None

    def _hits(self, version: int, records: Sequence[TraceRecord]) -> Sequence[np.ndarray]:
        folder = self._registry.fetch(version, self._folder)
        try:
            with self._learner.serving(bundle.serving_tensors(folder) or self._base()):
                return self._learner.hits(records)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def candidates(versions: Sequence[SnapshotVersion], firsts: Offsets) -> list[SnapshotVersion]:
    """Return the champion and, of the versions that learned nothing from these offsets on and still have weights,
    previous, the newest, the first, and those with the highest held-out agreement."""
    log_id = versions[-1].manifest.log_id
    versions = [
        each
        for each in versions
        if "champion" in each.aliases or (each.is_servable and not _may_have_learned(each.manifest, firsts, log_id))
    ]
    by_alias = {alias: each for each in versions for alias in each.aliases}
    named = [by_alias[alias] for alias in ("champion", "previous") if alias in by_alias]
    by_agreement = sorted(versions, key=lambda each: each.manifest.agreement_after or -inf, reverse=True)
    order = {each.version: each for each in [*named, versions[-1], versions[0], *by_agreement]}
    return list(order.values())[:MOST_SNAPSHOTS]


def _may_have_learned(manifest: Manifest, firsts: Offsets, log_id: str | None) -> bool:
    """Return whether a snapshot may have learned from these offsets of the log `log_id` on."""
    if None not in (manifest.log_id, log_id) and manifest.log_id != log_id:
        return False
    return any(manifest.offsets.get(partition, 0) > first for partition, first in firsts.items())


def _is_surely_better(best: _Measurement, champion: _Measurement, records: Sequence[TraceRecord]) -> bool:
    requests = [record.request for record in records]
    error = paired_standard_error(zip(requests, champion.hits, best.hits, strict=True))
    return error is not None and best.agreement - champion.agreement > _SURELY * error
