"""Tenants' factors with each snapshot: fitted on its weights, then judged on each tenant's held-out requests against
the same weights without them.

Factors that are not better beyond the error have no file, so their tenant drafts as all others do; they go on learning
and are judged again with the next snapshot. A tenant without enough held-out requests has none, since nothing could
show that they are better.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from omnidraft.distill.evaluation.agreement import share
from omnidraft.distill.evaluation.held_out import Hits
from omnidraft.distill.ingest.tenant_shares import OTHERS, TenantGroups
from omnidraft.distill.training.learner import Learner
from omnidraft.distill.training.tenant_factors import serving_factors
from omnidraft.snapshots.manifest import LEAST_TENANT_REQUESTS, TenantFactors
from omnidraft.snapshots.tenant_factors import file_name, tensor_name, to_tensor, weights_digest
from omnidraft.stats import p_value, paired_standard_error
from omnidraft.traces.record import TraceRecord

CONFIDENCE = 0.95
"""Factors serve their tenant if they agree better with its held-out requests than the drafter without them, as surely
as this says for each tenant alone."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SnapshotFactors:
    """The tenants' factors of one snapshot."""

    measured: tuple[TenantFactors, ...] = ()
    parts: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """Name of a file -> its tensors, of the tenants whose factors serve."""

    def facts(self) -> dict[str, Any]:
        """Return the fields of the manifest."""
        return {"tenant_factors": self.measured}


class FactorJudge:
    """Fits and judges the factors of one learner's tenants."""

    def __init__(
        self,
        learner: Learner,
        most_tenants: int = 0,
        groups: TenantGroups | None = None,
        *,
        confidence: float = CONFIDENCE,
    ) -> None:
        """`groups`: only tenants that it names may have factors."""
        self._learner, self._most_tenants, self._groups = learner, most_tenants, groups or TenantGroups()
        self._confidence = confidence

    def refit(self, held_out: Iterable[TraceRecord], hits: Hits, serving: Mapping[str, Tensor]) -> SnapshotFactors:
        """Fit the factors of this snapshot's tenants; drop those of all others.

        Args:
            hits: of the snapshot's drafter on the held-out records.
            serving: the weights of the snapshot.
        """
        if not self._most_tenants:
            return SnapshotFactors()
        records_of = self._chosen(held_out)
        self._learner.factors.drop(lambda tenant, _: tenant not in records_of)
        if not records_of:
            return SnapshotFactors()
        base, parts, measured = weights_digest(serving), {}, []
        step = self._learner.counters.num_steps
        with self._learner.serving(serving):
            for tenant, records in records_of.items():
                fitted = serving_factors(self._learner.factors.fit(tenant, step))
                judged = self._judge(fitted.version, fitted.tensors, tenant, records, hits, base)
                measured.append(judged)
                if judged.file is not None:
                    parts[judged.file] = {tensor_name(0): to_tensor(fitted)}
        logger.info("factors of %d tenants are fitted, those of %d serve", len(measured), len(parts))
        return SnapshotFactors(tuple(measured), parts)

    def _chosen(self, held_out: Iterable[TraceRecord]) -> dict[str, list[TraceRecord]]:
        """Return the held-out records of the tenants with most records to learn from, by name."""
        records_of: defaultdict[str, list[TraceRecord]] = defaultdict(list)
        for record in held_out:
            if self._groups.of(record) != OTHERS:
                records_of[record.tenant].append(record)
        kept = self._learner.factors.num_kept()
        measurable = [
            tenant
            for tenant, records in records_of.items()
            if kept.get(tenant, 0) and len({each.request for each in records}) >= LEAST_TENANT_REQUESTS
        ]
        chosen = sorted(measurable, key=lambda tenant: (-kept[tenant], tenant))[: self._most_tenants]
        return {tenant: records_of[tenant] for tenant in sorted(chosen)}

    def _judge(
        self,
        version: int,
        factors: Mapping[str, Tensor],
        tenant: str,
        records: list[TraceRecord],
        hits: Hits,
        base: str,
    ) -> TenantFactors:
        without = [hits[record.request_id, record.segment] for record in records]
        with self._learner.model.factored(factors):
            own = self._learner.hits(records)
        names = [record.request for record in records]
        error = paired_standard_error(zip(names, without, own, strict=True))
        before, after, num_requests = share(without) or 0.0, share(own) or 0.0, _num_scored(names, own)
        chance = 1.0 if error is None else p_value(after - before, error, num_requests - 1)
        return TenantFactors(
            tenant=tenant,
            version=version,
            base=base,
            rank=self._learner.factors.plan.rank,
            num_requests=num_requests,
            before=before,
            after=after,
            change_error=error,
            file=file_name(tenant) if chance < 1 - self._confidence else None,
        )


def _num_scored(request_ids: Iterable[str], hits_of_records: Iterable[np.ndarray]) -> int:
    """Return the number of requests that have a position."""
    return len({name for name, hits_P in zip(request_ids, hits_of_records, strict=True) if len(hits_P)})
