"""Records learned before, learned again beside new ones, so that a drafter that follows today's task keeps yesterday's.

A task is a tenant's traffic. All tasks have equal shares of what is drawn and, once the buffer is full, of the buffer:
the largest gives way, and of it any record, so that old ones become fewer and never all go at once.
Source: experience replay with a reservoir, https://arxiv.org/abs/1811.11682; balance over tasks,
https://arxiv.org/abs/1902.10486.
"""

from collections.abc import Iterable, Mapping
from itertools import zip_longest

import numpy as np
from torch import Tensor

from omnidraft.distill.ingest.record_tensors import from_tensors, to_tensors
from omnidraft.traces.record import TraceRecord

_RECORD = "replay."


class ReplayBuffer:
    """A buffer of records by tenant. What is drawn depends on what was kept, the seed and the step, on nothing else."""

    def __init__(self, *, capacity: int, per_step: int, seed: int, for_head: int = 0) -> None:
        """
        Args:
            capacity: records, about 25 kB each.
            per_step: records drawn at most beside new ones; 0 draws none.
            for_head: records drawn at most for the acceptance head alone. Where nothing is drawn, nothing is kept.
        """
        self._capacity, self._per_step, self._for_head, self._seed = capacity, per_step, for_head, seed
        self._of_tenant: dict[str, list[TraceRecord]] = {}

    def draw(self, step: int) -> list[TraceRecord]:
        """Different records, tenants in turn, to be learned beside new ones."""
        return self._drawn(np.random.default_rng((self._seed, step, 0)), self._per_step)

    def draw_for_head(self, step: int) -> list[TraceRecord]:
        """The same for the acceptance head, after this step's records were kept."""
        return self._drawn(np.random.default_rng((self._seed, step, 2)), self._for_head)

    def _drawn(self, random: np.random.Generator, num: int) -> list[TraceRecord]:
        tenants = [self._of_tenant[tenant] for tenant in sorted(self._of_tenant)]
        mixed = [[records[place] for place in random.permutation(len(records))] for records in tenants]
        rounds = zip_longest(*(mixed[place] for place in random.permutation(len(mixed))))
        return [record for each in rounds for record in each if record is not None][:num]

    def keep(self, records: Iterable[TraceRecord], step: int) -> None:
        """These were learned in this step."""
        if not self._per_step and not self._for_head:
            return
        random = np.random.default_rng((self._seed, step, 1))
        for record in records:
            self._of_tenant.setdefault(record.tenant, []).append(record)
            if sum(map(len, self._of_tenant.values())) > self._capacity:
                self._give_way(random)

    def _give_way(self, random: np.random.Generator) -> None:
        tenant = max(sorted(self._of_tenant), key=lambda tenant: len(self._of_tenant[tenant]))
        records = self._of_tenant[tenant]
        del records[random.integers(len(records))]
        if not records:
            del self._of_tenant[tenant]

    def state(self) -> dict[str, Tensor]:
        """For a snapshot that a learner goes on from."""
        return to_tensors(_RECORD, (record for tenant in self._of_tenant.values() for record in tenant))

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on where `state` was taken. Raises WireError when a record cannot be read."""
        self._of_tenant = {}
        for record in from_tensors(_RECORD, tensors):
            self._of_tenant.setdefault(record.tenant, []).append(record)
