"""The replay buffer: earlier records that are learned again beside new ones, against forgetting.

A task is a tenant's traffic. All tasks have equal shares of the drawn records and, once the buffer is full, of the
buffer: a random record of the largest task is evicted, so that old ones become fewer and never all go at once.
Source: experience replay with a reservoir, https://arxiv.org/abs/1811.11682; balance over tasks,
https://arxiv.org/abs/1902.10486.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest

import numpy as np
from torch import Tensor

from omnidraft.distill.ingest.record_disposition import hash_64
from omnidraft.distill.resume_tensors import records_from_tensors, records_to_tensors
from omnidraft.traces.record import TraceRecord

REPLAY_CAPACITY = 512
"""Records that a learner keeps for replay, an interleaved head and tenants' factors; about 25 kB each, in memory and in
the resume part of every snapshot."""
_RECORD = "replay."


class ReplayBuffer:
    """A buffer of records by tenant. A draw depends on the records added, the seed and the step, on nothing else."""

    def __init__(self, *, capacity: int, per_step: int, seed: int, for_head: int = 0, for_tenants: int = 0) -> None:
        """Start with an empty buffer.

        Args:
            capacity: records, about 25 kB each.
            per_step: records drawn at most beside new ones; 0 draws none.
            for_head: records drawn at most for the acceptance head alone.
            for_tenants: records drawn at most for the factors of a tenant. With nothing to draw, nothing is stored.
        """
        self._for_tenants = for_tenants
        self._capacity, self._per_step, self._for_head, self._seed = capacity, per_step, for_head, seed
        self._is_drawn = bool(per_step or for_head or for_tenants)
        self._records_of: dict[str, list[TraceRecord]] = {}

    def draw(self, step: int) -> list[TraceRecord]:
        """Return distinct records, tenants in turn, to be learned beside new ones."""
        return self._sample(np.random.default_rng((self._seed, step, 0)), self._per_step)

    def draw_for_head(self, step: int) -> list[TraceRecord]:
        """Return the same for the acceptance head, after this step's records were added."""
        return self._sample(np.random.default_rng((self._seed, step, 2)), self._for_head)

    def draw_of(self, tenant: str, step: int, number: int) -> list[TraceRecord]:
        """Return distinct records of one tenant for its factors; `number` is that of the draw in this step."""
        records = self._records_of.get(tenant, [])
        random = np.random.default_rng((self._seed, step, 3, number, hash_64(tenant)))
        return [records[index] for index in random.permutation(len(records))[: self._for_tenants]]

    def records(self) -> list[TraceRecord]:
        """Return all records, those of a tenant in the order in which they were added."""
        return [record for records in self._records_of.values() for record in records]

    def num_records(self) -> dict[str, int]:
        """Return the number of records of each tenant."""
        return {tenant: len(records) for tenant, records in self._records_of.items()}

    def _sample(self, random: np.random.Generator, num: int) -> list[TraceRecord]:
        tenants = [self._records_of[tenant] for tenant in sorted(self._records_of)]
        mixed = [[records[index] for index in random.permutation(len(records))] for records in tenants]
        rounds = zip_longest(*(mixed[index] for index in random.permutation(len(mixed))))
        return [record for each in rounds for record in each if record is not None][:num]

    def add(self, records: Iterable[TraceRecord], step: int) -> None:
        """Add the records learned in this step."""
        if not self._is_drawn:
            return
        random = np.random.default_rng((self._seed, step, 1))
        for record in records:
            self._records_of.setdefault(record.tenant, []).append(record)
            while sum(map(len, self._records_of.values())) > self._capacity:
                self._evict(random)

    def _evict(self, random: np.random.Generator) -> None:
        tenant = max(sorted(self._records_of), key=lambda tenant: len(self._records_of[tenant]))
        records = self._records_of[tenant]
        del records[random.integers(len(records))]
        if not records:
            del self._records_of[tenant]

    def drop(self, is_dropped: Callable[[TraceRecord], bool]) -> int:
        """Drop records, and return their number."""
        kept = {
            tenant: [record for record in records if not is_dropped(record)]
            for tenant, records in self._records_of.items()
        }
        num_before = sum(map(len, self._records_of.values()))
        self._records_of = {tenant: records for tenant, records in kept.items() if records}
        return num_before - sum(map(len, self._records_of.values()))

    def state(self) -> dict[str, Tensor]:
        """Return the records as tensors of a snapshot."""
        return records_to_tensors(_RECORD, self.records())

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from where `state` was taken; with nothing to draw, with nothing. Raises WireError when a record
        cannot be read."""
        self._records_of = {}
        if not self._is_drawn:
            return
        for record in records_from_tensors(_RECORD, tensors):
            self._records_of.setdefault(record.tenant, []).append(record)
