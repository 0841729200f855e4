"""Agreement of a snapshot and of its parent on the same held-out records, each record measured once per snapshot.

The parent's hits are remembered from when it was published; only records held out since are measured again with the
parent's weights, which stay in memory as they are served (bfloat16, or LoRA factors). Both sides are measured with
serving weights, the ones that workers get.
Source: docs/algorithms.md, section 11.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import sqrt

import numpy as np
from torch import Tensor

from omnidraft.distill.evaluation import speedup_model
from omnidraft.distill.evaluation.agreement import block_efficiency, share
from omnidraft.distill.training.learner import Learner
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
    hits: Hits

    def facts(self) -> dict[str, float | None]:
        """Return the fields of the manifest."""
        return {
            "agreement_before": self.before,
            "agreement_after": self.after,
            "agreement_change_error": self.change_error,
            "speedup_before": self.speedup_before,
            "speedup_after": self.speedup_after,
        }


class HeldOut:
    """Compares each snapshot with its parent."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._parent_serving: Mapping[str, Tensor] = {}
        self._parent_hits: Hits = {}

    def set_parent(self, serving: Mapping[str, Tensor], hits: Hits) -> None:
        """Set the snapshot that the next one is compared with, and its hits as far as they are known."""
        self._parent_serving, self._parent_hits = serving, hits

    def measure(self, records: Iterable[TraceRecord], serving: Mapping[str, Tensor]) -> HeldOutMeasurement:
        """Compare the parent with these serving tensors; the learner's own weights stay as they are."""
        by_key = {(record.request_id, record.segment): record for record in records}
        missing = {key: record for key, record in by_key.items() if key not in self._parent_hits}
        before = {**self._parent_hits, **self._hits(missing, self._parent_serving)}
        after = self._hits(by_key, serving)
        error = paired_standard_error((key[0], before[key], after[key]) for key in by_key)
        parent_hits = [before[key] for key in by_key]
        costs = speedup_model.fit(by_key.values())
        return HeldOutMeasurement(
            before=share(parent_hits),
            after=share(after.values()),
            speedup_before=_speedup(parent_hits, costs),
            speedup_after=_speedup(after.values(), costs),
            change_error=error,
            hits=after,
        )

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


def paired_standard_error(pairs: Iterable[tuple[str, np.ndarray, np.ndarray]]) -> float | None:
    """Return the standard error of the change in agreement, positions of one request taken as one draw.

    The linearised error of a ratio of sums over clusters; Cochran, Sampling Techniques (1977), section 9A.

    Args:
        pairs: request id, and whether each position [P] agrees before and after, bool, for every record.

    Returns:
        None with fewer than two requests that have a position.
    """
    sums: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for request_id, before_P, after_P in pairs:
        sums[request_id][0] += int(after_P.sum()) - int(before_P.sum())
        sums[request_id][1] += len(after_P)
    clusters = [(gain, scored) for gain, scored in sums.values() if scored]
    if len(clusters) < 2:
        return None
    scored = sum(number for _, number in clusters)
    change = sum(gain for gain, _ in clusters) / scored
    residual = sum((gain - change * number) ** 2 for gain, number in clusters)
    return sqrt(len(clusters) / (len(clusters) - 1) * residual) / scored
