"""When traffic drifts: which snapshot agrees best with it? The one that serves need not be that any more.

All are measured on the same records, the tenant's newest. What is found is told on the control log; the controller
decides. It is advice: whatever fails on the way is told to people and learning goes on.
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
from omnidraft.distill.evaluation.paired import paired_standard_error
from omnidraft.distill.ingest.recent_records import RecentRecords
from omnidraft.distill.training.learner import Learner
from omnidraft.errors import BusError, SnapshotError
from omnidraft.ports import Announcer, Registry, SnapshotVersion
from omnidraft.snapshots import bundle
from omnidraft.traces.record import TraceRecord

logger = logging.getLogger(__name__)

MOST_SNAPSHOTS = 6
LEAST_RECORDS = 4
_SURELY = 1.645
"""Standard errors that a better one must be better by: 95 % one-sided."""


@dataclass(frozen=True, slots=True)
class _Measured:
    version: int
    hits: Sequence[np.ndarray]
    """Of each record, bool [P]."""

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
        announcer: Announcer,
        base: Callable[[], Mapping[str, Tensor]],
        folder: Path,
    ) -> None:
        """
        Args:
            base: serving tensors of the base drafter, for the snapshots that have none.
            folder: snapshots are fetched there, and removed.
        """
        self._registry, self._learner, self._recent = registry, learner, recent
        self._announcer, self._base, self._folder = announcer, base, folder

    def compare(self, tenant: str) -> None:
        """Tell which snapshot agrees best with this tenant's newest records, if it is surely not the champion."""
        try:
            self._compare(tenant)
        except (BusError, SnapshotError) as exc:
            logger.warning("earlier snapshots were not compared on the traffic of %s: %s", tenant, exc)

    def _compare(self, tenant: str) -> None:
        fence = self._registry.fence()
        versions, records = self._registry.versions(), self._recent.of(tenant)
        champion = next((each for each in versions if "champion" in each.aliases), None)
        if champion is None or len(records) < LEAST_RECORDS:
            logger.info("%d new records of %s: too few to compare snapshots on", len(records), tenant)
            return
        measured = [self._measure(each, records) for each in candidates(versions)]
        for each in measured:
            self._registry.log_metrics(each.version, {"agreement_on_drift": each.agreement}, each.version)
        present = next(each for each in measured if each.version == champion.version)
        best = max(measured, key=lambda each: each.agreement)
        found = ", ".join(f"{each.version}: {each.agreement:.3f}" for each in measured)
        reason = f"agreement on the {len(records)} newest records of {tenant}, by version: {found}"
        logger.info(reason)
        if _is_surely_better(best, present, records):
            self._announcer.publish("best", best.version, tenant=tenant, reason=reason, fence=fence)

    def _measure(self, version: SnapshotVersion, records: Sequence[TraceRecord]) -> _Measured:
        folder = self._registry.fetch(version.version, self._folder)
        try:
            with self._learner.serving(bundle.serving_tensors(folder) or self._base()):
                return _Measured(version.version, self._learner.hits(records))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def candidates(versions: Sequence[SnapshotVersion]) -> list[SnapshotVersion]:
    """Champion, previous, the newest, the first, and those with the highest held-out agreement when they were made."""
    known = {alias: each for each in versions for alias in each.aliases}
    named = [known[alias] for alias in ("champion", "previous") if alias in known]
    by_agreement = sorted(versions, key=lambda each: each.manifest.agreement_after or -inf, reverse=True)
    order = {each.version: each for each in [*named, versions[-1], versions[0], *by_agreement]}
    return list(order.values())[:MOST_SNAPSHOTS]


def _is_surely_better(best: _Measured, present: _Measured, records: Sequence[TraceRecord]) -> bool:
    names = [record.request_id for record in records]
    error = paired_standard_error(zip(names, present.hits, best.hits, strict=True))
    return error is not None and best.agreement - present.agreement > _SURELY * error
