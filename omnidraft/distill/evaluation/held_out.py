"""Agreement of a snapshot and of its parent on the same held-out records, each record measured once per snapshot.

The parent's hits are remembered from when it was published; only records held out since are measured again with the
parent's weights, which stay in memory as they are served (bfloat16, or LoRA factors). Both sides are measured with
serving weights, the ones that workers get. A pinned file is measured likewise, apart from what the log brought.
Source: docs/algorithms.md, section 11.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from omnidraft.distill.evaluation import speedup_model
from omnidraft.distill.evaluation.agreement import block_efficiency, share
from omnidraft.distill.evaluation.pinned import PinnedRecords
from omnidraft.distill.evaluation.tenant_agreement import ScoredRecord, by_tenant
from omnidraft.distill.ingest.tenant_shares import TenantGroups
from omnidraft.distill.training.learner import Learner
from omnidraft.snapshots.manifest import PinnedAgreement, TenantAgreement
from omnidraft.stats import paired_standard_error
from omnidraft.traces.record import TraceRecord

Key = tuple[str, int]
Hits = Mapping[Key, np.ndarray]
"""Whether each position [P] of a record agrees, bool."""

DEPTHS = (1, 2, 3, 4, 6, 8)
"""Chain lengths, of which the predicted speed-up takes the best."""


@dataclass(frozen=True, slots=True)
class HeldOutMeasurement:
    """Agreement before and after, None without positions; the speed-up that it predicts; the hits behind `after`."""

    before: float | None
    after: float | None
    speedup_before: float | None
    """Over plain decoding, predicted with the times in the records; None when these have none."""
    speedup_after: float | None
    change_error: float | None
    """Standard error of after - before; None when too few requests were held out."""
    tenants: tuple[TenantAgreement, ...]
    pinned: PinnedAgreement | None
    hits: Hits

    def facts(self) -> dict[str, Any]:
        """Return the fields of the manifest."""
        return {
            "agreement_before": self.before,
            "agreement_after": self.after,
            "agreement_change_error": self.change_error,
            "tenants": self.tenants,
            "pinned": self.pinned,
            "speedup_before": self.speedup_before,
            "speedup_after": self.speedup_after,
        }


class HeldOut:
    """Compares each snapshot with its parent."""

    def __init__(
        self, learner: Learner, *, groups: TenantGroups | None = None, pinned: PinnedRecords | None = None
    ) -> None:
        self._learner, self._pinned = learner, pinned
        self._groups = groups or TenantGroups()
        self._parent_serving: Mapping[str, Tensor] = {}
        self._parent_hits: Hits = {}
        self._parent_pinned: float | None = None

    def set_parent(self, serving: Mapping[str, Tensor], measured: HeldOutMeasurement | None = None) -> None:
        """Set the snapshot that the next one is compared with, and its measurement if it is known."""
        self._parent_serving, self._parent_hits = serving, measured.hits if measured else {}
        self._parent_pinned = measured.pinned.after if measured and measured.pinned else None

    def measure(self, records: Iterable[TraceRecord], serving: Mapping[str, Tensor]) -> HeldOutMeasurement:
        """Compare the parent with these serving tensors; the learner's own weights stay as they are."""
        by_key = {(record.request_id, record.segment): record for record in records}
        missing = {key: record for key, record in by_key.items() if key not in self._parent_hits}
        before = {**self._parent_hits, **self._hits(missing, self._parent_serving)}
        after = self._hits(by_key, serving)
        error = paired_standard_error((each.request, before[key], after[key]) for key, each in by_key.items())
        parent_hits = [before[key] for key in by_key]
        costs = speedup_model.fit(by_key.values())
        return HeldOutMeasurement(
            before=share(parent_hits),
            after=share(after.values()),
            speedup_before=_speedup(parent_hits, costs),
            speedup_after=_speedup(after.values(), costs),
            change_error=error,
            tenants=by_tenant(
                [
                    ScoredRecord(self._groups.of(record), record.request, before[key], after[key])
                    for key, record in by_key.items()
                ]
            ),
            pinned=self._measure_pinned(serving),
            hits=after,
        )

    def _measure_pinned(self, serving: Mapping[str, Tensor]) -> PinnedAgreement | None:
        if self._pinned is None:
            return None
        before = self._parent_pinned
        if before is None:
            before = self._agreement(self._pinned, self._parent_serving)
        after = self._agreement(self._pinned, serving)
        return PinnedAgreement(
            sha256=self._pinned.sha256, num_records=len(self._pinned.records), before=before, after=after
        )

    def _agreement(self, pinned: PinnedRecords, serving: Mapping[str, Tensor]) -> float:
        with self._learner.serving(serving):
            return self._learner.agreement(pinned.records) or 0.0

    def _hits(self, by_key: Mapping[Key, TraceRecord], serving: Mapping[str, Tensor]) -> dict[Key, np.ndarray]:
        if not by_key:
            return {}
        with self._learner.serving(serving):
            return dict(zip(by_key, self._learner.hits(list(by_key.values())), strict=True))


def _speedup(hits: Collection[np.ndarray], costs: speedup_model.SpeedupModel | None) -> float | None:
    if costs is None:
        return None
    tokens_per_pass = {depth: block_efficiency(hits, depth) for depth in DEPTHS}
    known = {depth: tokens for depth, tokens in tokens_per_pass.items() if tokens is not None}
    return costs.speedup(known) if known else None
