"""Agreement of a snapshot and of its parent on the same held-out records, each record measured once per snapshot.

Counts add up over records, so those of the parent are kept from when it was published; only records held out since
are measured again with the parent's weights, which are kept in memory as they are served (bfloat16, or LoRA factors).
Both sides are measured with serving weights: what is compared is what workers get.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from omnidraft.distill.agreement import Agreed, share
from omnidraft.distill.learner import Learner
from omnidraft.distill.paired import change_error
from omnidraft.traces.record import TraceRecord

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Measured:
    """Agreement before and after, None without a position to score; and the counts behind `after`."""

    before: float | None
    after: float | None
    change_error: float | None
    """Standard error of after - before; None when too few requests were held out."""
    counts: Mapping[Key, Agreed]


class HeldOut:
    """Compares each snapshot with its parent."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._parent_serving: Mapping[str, Tensor] = {}
        self._parent_counts: Mapping[Key, Agreed] = {}

    def parent_is(self, serving: Mapping[str, Tensor], counts: Mapping[Key, Agreed]) -> None:
        """The snapshot that the next one is compared with, and what is known of it."""
        self._parent_serving, self._parent_counts = serving, counts

    def measure(self, records: Iterable[TraceRecord], serving: Mapping[str, Tensor]) -> Measured:
        """The parent against these serving tensors; the learner's own weights stay as they are."""
        by_key = {(record.request_id, record.segment): record for record in records}
        missing = {key: record for key, record in by_key.items() if key not in self._parent_counts}
        before = {**self._parent_counts, **self._counts(missing, self._parent_serving)}
        after = self._counts(by_key, serving)
        error = change_error((key[0], before[key], after[key]) for key in by_key)
        return Measured(share([before[key] for key in by_key]), share(list(after.values())), error, after)

    def _counts(self, by_key: Mapping[Key, TraceRecord], serving: Mapping[str, Tensor]) -> dict[Key, Agreed]:
        if not by_key:
            return {}
        with self._learner.serving(serving):
            return dict(zip(by_key, self._learner.agreed(list(by_key.values())), strict=True))
