"""A learner's kept records (held-out set, replay buffer, the fleet's memory) lose those that are older than the log's
retention, and those of tenants who were forgotten; so do the factors of these tenants.

An order to forget a tenant concerns the records from before it: a tenant who comes back is learned from again. The
n-gram cache does not know whose n-grams it counted, so it is rebuilt from the records of others that are still there.
The weights stay as they are, unless learning starts again from a snapshot that never saw the tenant.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from omnidraft.distill.ingest.batcher import Batcher
from omnidraft.distill.memory.memory_files import MemoryFiles
from omnidraft.distill.memory.text_memory import Dated
from omnidraft.distill.training.learner import Learner
from omnidraft.ports import FORGOTTEN, Forget, Metrics
from omnidraft.snapshots.manifest import Manifest
from omnidraft.traces.record import TraceRecord
from omnidraft.vocab.ngram_cache import NgramCache

DROPPED = "omnidraft_kept_records_dropped_total"
MAX_NOTED = 4096
"""Orders of which a manifest notes that they were carried out, at 15 bytes each. An older one is carried out once more
whenever a learner starts. They are noted by name, not by time or place in the control log: clocks differ, and a log
that was made anew, or lost its end, has other orders at the same places."""

logger = logging.getLogger(__name__)


class RecordRetention:
    """Decides which records may be kept. One thread."""

    def __init__(self, keep_s: float | None = None, *, now_s: Callable[[], float] = time.time) -> None:
        """`keep_s` is the retention in seconds; None keeps records for ever."""
        self._keep_s, self._now_s = keep_s, now_s
        self._forgotten_ms: dict[str, int] = {}

    def forget(self, tenant: str, until_ms: int) -> None:
        """Keep no record of this tenant from before this time."""
        self._forgotten_ms[tenant] = max(until_ms, self._forgotten_ms.get(tenant, until_ms))

    def is_forgotten(self, record: Dated) -> bool:
        """Return whether its tenant was forgotten after the record was made."""
        return self.is_forgotten_at(record.tenant, record.time_ms)

    def is_forgotten_at(self, tenant: str, time_ms: int) -> bool:
        """Return whether this tenant was forgotten after this time, Unix milliseconds."""
        return time_ms <= self._forgotten_ms.get(tenant, -1)

    def expired_before_ms(self, newest_ms: int) -> float:
        """Return the time, Unix milliseconds, before which records are older than the retention: by that of the newest
        record, so that it depends on the log alone, and by the time of day where a record claims to be from later."""
        return 0 if self._keep_s is None else min(newest_ms, self._now_s() * 1000) - self._keep_s * 1000


class Forgetting:
    """Drops records of one learner, and notes the orders that were carried out."""

    def __init__(
        self,
        retention: RecordRetention,
        batcher: Batcher,
        learner: Learner,
        memory: MemoryFiles,
        metrics: Metrics,
        *,
        new_cache: Callable[[], NgramCache],
        learned_records: Callable[[Mapping[int, int]], Iterable[TraceRecord]] = lambda offsets: (),
    ) -> None:
        """
        Args:
            new_cache: makes an n-gram cache as a new learner has it.
            learned_records: returns the newest records in the log before these offsets; raises BusError.
        """
        self._retention, self._batcher, self._learner, self._metrics = retention, batcher, learner, metrics
        self._new_cache, self._learned_records, self._memory = new_cache, learned_records, memory
        self._done: tuple[str, ...] = ()
        self._noted: dict[str, Forget] = {}
        """The orders that are still to be carried out."""

    def resume(self, manifest: Manifest) -> None:
        """Go on from this snapshot: the orders that it notes are carried out, and those of before are again."""
        self._done = tuple(dict.fromkeys((*manifest.forgets, *self._done)))

    def manifest_fields(self) -> dict[str, Any]:
        """Return fields of the next manifest."""
        return {"forgets": self._done}

    def drop(self, num_forgotten: int = 0) -> None:
        """Drop the records that are older than the retention, those of forgotten tenants, and factors that learned from
        any of these; count so many more that could not be decrypted, as their keys are destroyed."""
        before_ms = self._retention.expired_before_ms(self._batcher.newest_ms)
        self._drop(lambda record: record.time_ms < before_ms, "expired")
        self._drop(self._retention.is_forgotten, "forgotten")
        self._count(num_forgotten, FORGOTTEN)
        if num_dropped := self._learner.factors.drop(self._retention.is_forgotten_at):
            logger.info("the factors of %d tenants are dropped: %s", num_dropped, FORGOTTEN)

    def note(self, orders: Mapping[str, Forget]) -> dict[str, Forget]:
        """Skip and drop the records of these tenants from now on, and return all orders that were noted and not carried
        out yet, by tenant."""
        for tenant, order in orders.items():
            self._retention.forget(tenant, order.until_ms)
        if orders:
            self.drop()
        noted = {**self._noted, **orders}
        self._noted = {tenant: order for tenant, order in noted.items() if order.id not in self._done}
        return self._noted

    def mark_done(self, orders: Mapping[str, Forget]) -> None:
        """Note that these orders were carried out, or that there was nothing to do."""
        done = (each.id for order in orders.values() for each in (order.exact, order) if each is not None)
        self._done = tuple(dict.fromkeys((*self._done, *done)))[-MAX_NOTED:]
        self._noted = {tenant: order for tenant, order in self._noted.items() if order.id not in self._done}

    def is_due_in_weights(self, orders: Mapping[str, Forget]) -> bool:
        """Return whether weights are to forget one of these tenants, and have not yet."""
        return any(order.exact is not None and order.exact.id not in self._done for order in orders.values())

    def is_done_in(self, manifest: Manifest) -> bool:
        """Return whether all orders that this learner carried out were carried out in this snapshot, too."""
        return set(self._done) <= set(manifest.forgets)

    def renew_keys(self, tenants: Iterable[str]) -> None:
        """Write what is kept with other keys from now on: those of these tenants are destroyed."""
        if self._memory.cipher is not None:
            self._memory.cipher.clear_cache()
        for tenant in tenants:
            self._memory.memory.renew(tenant)

    def rebuild_cache(self) -> None:
        """Count the n-gram cache anew, without forgotten tenants. Raises BusError; then it may be repeated."""
        learned = [
            record
            for record in self._learned_records(self._batcher.offsets())
            if not self._retention.is_forgotten(record) and not self._batcher.is_held_out(record)
        ]
        self._learner.rebuild_cache(self._new_cache(), learned)
        logger.warning("the n-gram cache is rebuilt from %d records of tenants who are not forgotten", len(learned))

    def _drop(self, is_dropped: Callable[[Dated], bool], reason: Literal["expired", "forgotten"]) -> None:
        self._memory.memory.drop(is_dropped, reason)
        self._count(self._batcher.drop_held_out(is_dropped) + self._learner.drop_replayed(is_dropped), reason)

    def _count(self, num_records: int, reason: str) -> None:
        if num_records:
            self._metrics.add(DROPPED, num_records, reason=reason)
            logger.info("%d kept records are dropped: %s", num_records, reason)
