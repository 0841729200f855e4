"""Agreement of a snapshot and of its parent on the same held-out records, each record measured once per snapshot.

The parent's hits are remembered from when it was published; only records held out since are measured again with the
parent's weights, which stay in memory as they are served (bfloat16, or LoRA factors). Both sides are measured with
serving weights, the ones that workers get. A pinned file is measured likewise, apart from what the log brought.
Source: docs/algorithms.md, section 11.

Agreement is also counted by tenant, which the promotion gate judges, so that no tenant's gain pays for another's loss.
Tenants with fewer than LEAST_TENANT_REQUESTS held-out requests are one group, and so are those beyond the MOST_TENANTS
with most: few requests show nothing, and a manifest is bounded however many names there are.
"""

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from omnidraft.distill.evaluation import speedup_model
from omnidraft.distill.evaluation.agreement import block_efficiency, share
from omnidraft.distill.ingest.record_disposition import hash_64
from omnidraft.distill.ingest.tenant_shares import OTHERS, TenantGroups
from omnidraft.distill.training.learner import Learner
from omnidraft.errors import ConfigError, RequestError, WireError
from omnidraft.snapshots.manifest import LEAST_TENANT_REQUESTS, PinnedAgreement, TenantAgreement
from omnidraft.stats import paired_standard_error
from omnidraft.traces import archive
from omnidraft.traces.record import TraceRecord

MOST_RECORDS = 256
"""Each is measured for every snapshot and takes about 25 kB of memory."""


@dataclass(frozen=True, slots=True)
class PinnedRecords:
    """The records of one file."""

    sha256: str
    records: tuple[TraceRecord, ...]


def read_pinned(path: Path, alignment: str) -> PinnedRecords:
    """Read a trace archive, as `omnidraft traces export` writes it.

    Raises:
        ConfigError: there is none, it is broken, too large or empty, or a record is of another vocabulary pair.
    """
    try:
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        records = tuple(islice(archive.read(path), MOST_RECORDS + 1))
    except (OSError, RequestError, WireError) as exc:
        raise ConfigError(f"learner.pinned_held_out: {path} cannot be read: {exc}") from exc
    if not 0 < len(records) <= MOST_RECORDS:
        number = "no record" if not records else f"more than {MOST_RECORDS} records"
        raise ConfigError(f"learner.pinned_held_out: {path} has {number}; export 1 to {MOST_RECORDS}")
    if strange := next((each.alignment for each in records if each.alignment != alignment), None):
        raise ConfigError(
            f"learner.pinned_held_out: {path} has a record of the vocabulary pair {strange}, this learner's is "
            f"{alignment}; export records of this target and drafter"
        )
    return PinnedRecords(sha256, records)


MOST_TENANTS = 32
MAX_NAME_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class ScoredRecord:
    """One held-out record of a group of tenants."""

    group: str
    request: str
    before_P: np.ndarray
    """Whether each position agrees with the parent, bool."""
    after_P: np.ndarray


def by_tenant(scored: Sequence[ScoredRecord]) -> tuple[TenantAgreement, ...]:
    """Return the agreement of each group, those with most requests first and the small ones together at the end."""
    records_of: defaultdict[str, list[ScoredRecord]] = defaultdict(list)
    for record in scored:
        if len(record.after_P):
            records_of[record.group].append(record)
    by_size = sorted(records_of, key=lambda group: (-_num_requests(records_of[group]), group))
    named = [group for group in by_size if group != OTHERS][:MOST_TENANTS]
    apart = [group for group in named if _num_requests(records_of[group]) >= LEAST_TENANT_REQUESTS]
    rest = [record for group in by_size if group not in apart for record in records_of[group]]
    groups = [(_bounded(group), records_of[group]) for group in apart]
    return tuple(_agreement(name, records) for name, records in [*groups, (None, rest)] if records)


def _agreement(name: str | None, records: Sequence[ScoredRecord]) -> TenantAgreement:
    return TenantAgreement(
        tenant=name,
        num_requests=_num_requests(records),
        before=share(record.before_P for record in records) or 0.0,
        after=share(record.after_P for record in records) or 0.0,
        change_error=paired_standard_error((each.request, each.before_P, each.after_P) for each in records),
    )


def _num_requests(records: Sequence[ScoredRecord]) -> int:
    return len({record.request for record in records})


def _bounded(name: str) -> str:
    """Return the name, or the beginning and a hash of one that no request could have had."""
    return name if len(name) <= MAX_NAME_CHARACTERS else f"{name[:64]}...{hash_64(name):016x}"


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
