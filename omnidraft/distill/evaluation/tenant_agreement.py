"""Held-out agreement by tenant: what the promotion gate judges, so that no tenant's gain pays for another's loss.

Tenants with fewer than LEAST_TENANT_REQUESTS held-out requests are one group, and so are those beyond the MOST_TENANTS
with most: few requests show nothing, and a manifest is bounded however many names there are.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omnidraft.distill.evaluation.agreement import share
from omnidraft.distill.ingest.record_disposition import hash_64
from omnidraft.distill.ingest.tenant_shares import OTHERS
from omnidraft.snapshots.manifest import LEAST_TENANT_REQUESTS, TenantAgreement
from omnidraft.stats import paired_standard_error

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
