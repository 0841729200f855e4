"""Tenants' shares of what is learned and held out, so that one that sends most does not decide alone.

A tenant that sent more than TENANT_SHARE of the last WINDOW records, by more than chance explains, has at
most that share of a step; its excess records are counted as `over_share`. So tenants that send alike lose few. A step
that would leave out more than WINDOW records takes them after all, so that no flood keeps learning from going on. All
of it depends on the order of the records alone, and the window is part of a snapshot, so a run that resumes makes the
same batches.
The held-out set keeps the newest records of each tenant: when it is full, the tenant with most loses its oldest.
Where requests name their own tenant, one sender may pretend to be many: `learner.tenants` names those that are known,
and all others share one place. Tenants with fewer than LEAST_TENANT_REQUESTS held-out records share one, too.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable
from math import sqrt

from omnidraft.distill.ingest.record_disposition import hash_63
from omnidraft.snapshots.manifest import LEAST_TENANT_REQUESTS
from omnidraft.traces.record import TraceRecord

TENANT_SHARE = 0.5
"""The share of a step's records that a tenant may have that sends more than this share; further records of it are not
learned, and counted as `over_share`. Half of a step learns from everybody else, however much one tenant sends."""
WINDOW = 256
"""Records by which senders are compared; and the most that a step leaves out."""
OTHERS = ""
"""The group of all tenants that `learner.tenants` does not name."""


class TenantGroups:
    """The groups that have shares: each tenant is one, or, with known tenants, each of them and all others together."""

    def __init__(self, known: Collection[str] = ()) -> None:
        self._known = frozenset(known)

    def of(self, record: TraceRecord) -> str:
        """Return the group of the record's tenant."""
        return record.tenant if not self._known or record.tenant in self._known else OTHERS


class StepShares:
    """The shares of the batches of one learner."""

    def __init__(self, groups: TenantGroups, *, share: float, records_per_step: int) -> None:
        """`share`: of a step's records that one group may have while others are there; 1 sets no limit."""
        self._groups, self._share, self._records_per_step = groups, share, records_per_step
        self._most = max(1, int(share * records_per_step + 1e-9))
        self.recent: deque[int] = deque(maxlen=WINDOW)
        """Hashes of the groups of the newest records that were learned or left out."""

    def begin(self) -> "StepShare":
        """Return the share of a batch that begins; it has no effect before `commit`."""
        return StepShare(self._groups, self._share, self._most, self._records_per_step, self.recent.copy())

    def commit(self, share: "StepShare") -> None:
        """Go on after this batch."""
        self.recent = share.recent

    def restore(self, recent: Iterable[int]) -> None:
        """Go on with this window."""
        self.recent = deque(recent, maxlen=WINDOW)


class StepShare:
    """The share of one batch while it is filled."""

    def __init__(
        self, groups: TenantGroups, share: float, most: int, records_per_step: int, recent: deque[int]
    ) -> None:
        self.recent = recent
        self.num_over = 0
        """Records left out so far."""
        self._num_recent = Counter(recent)
        self._groups, self._share, self._most, self._records_per_step = groups, share, most, records_per_step
        self._taken = Counter[int]()

    def admits(self, record: TraceRecord) -> bool:
        """Return whether this record is learned in this batch; else it is left out and counted."""
        group = hash_63(self._groups.of(record))
        self._remember(group)
        most = max(self._most, -(-self._records_per_step // len(self._num_recent)))
        is_admitted = self._taken[group] < most or not self._sends_most(group) or self.num_over >= WINDOW
        self._taken[group] += is_admitted
        self.num_over += not is_admitted
        return is_admitted

    def _sends_most(self, group: int) -> bool:
        """Return whether the group sent more than its share of the window, by two standard deviations at one half."""
        num = len(self.recent)
        return self._num_recent[group] > self._share * num + sqrt(num)

    def _remember(self, group: int) -> None:
        if len(self.recent) == WINDOW:
            oldest = self.recent.popleft()
            self._num_recent[oldest] -= 1
            if not self._num_recent[oldest]:
                del self._num_recent[oldest]
        self.recent.append(group)
        self._num_recent[group] += 1


def keep_newest_of_each(records: deque[TraceRecord], capacity: int, groups: TenantGroups) -> None:
    """Remove records until `capacity` are left: each time the oldest of the group with most, small groups as one."""
    while len(records) > capacity:
        names = [groups.of(record) for record in records]
        counts = Counter(names)
        places = [name if counts[name] >= LEAST_TENANT_REQUESTS else None for name in names]
        sizes = Counter(places)
        largest = max(sizes.values())
        del records[next(index for index, place in enumerate(places) if sizes[place] == largest)]
