"""The report of a training step, its metrics and its span, and the mean losses of several steps."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from omnidraft.distill.ingest.batch import Batch
from omnidraft.ports import Metrics, Span, Tracing
from omnidraft.snapshots.manifest import Manifest


@dataclass(frozen=True, slots=True)
class StepReport:
    """The outcome of one training step."""

    losses: Mapping[str, float]
    """Mean per position of each loss that had positions, unweighted."""
    grad_norm: float
    """Before clipping; 0 when there was nothing to learn."""
    num_records: int
    num_replayed: int
    """Records learned again, not among `num_records`."""
    num_tokens: int
    """Emitted target tokens of the records."""
    is_update: bool
    """False when the weights stayed as they were: nothing to learn, or a number that was not finite."""
    skipped: Mapping[str, int]
    """Records and tokens that were not learned from, by reason."""
    duration_s: float


@dataclass(slots=True)
class Counters:
    """Totals since the base drafter."""

    num_steps: int = 0
    num_records: int = 0
    num_tokens: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest) -> "Counters":
        """Return the totals of a snapshot."""
        return cls(manifest.num_steps, manifest.num_records, manifest.num_tokens, dict(manifest.counts))

    def manifest_fields(self) -> dict[str, Any]:
        """Return the fields of a manifest."""
        numbers = {"num_records": self.num_records, "num_tokens": self.num_tokens, "num_steps": self.num_steps}
        return {**numbers, "counts": self.skipped}


def count(report: StepReport, metrics: Metrics) -> None:
    """Add one step to the metrics."""
    metrics.add("omnidraft_training_steps_total")
    metrics.add("omnidraft_training_tokens_total", report.num_tokens)
    metrics.observe("omnidraft_training_step_seconds", report.duration_s)
    for name, loss in report.losses.items():
        metrics.set("omnidraft_training_loss", loss, loss=name)


def mean_losses(reports: Sequence[StepReport]) -> dict[str, float]:
    """Return the mean of each loss over the steps that had it, finite, and learned from it or another."""
    sums: defaultdict[str, float] = defaultdict(float)
    nums: Counter[str] = Counter()
    for report in reports:
        if report.is_update:
            for name, loss in report.losses.items():
                if isfinite(loss):  # that of a head may be where the drafter's is not
                    sums[name] += loss
                    nums[name] += 1
    return {name: total / nums[name] for name, total in sums.items()}


class LearningSpans:
    """The spans of one distiller: a step links the records it learned from, a snapshot the steps it was made of."""

    def __init__(self, tracing: Tracing, target: str) -> None:
        self._tracing, self._target = tracing, target
        self._steps: list[str] = []  # since the newest snapshot

    def step(self, batch: Batch, number: int) -> Span:
        """Begin the span of a step."""
        links = dict.fromkeys(record.traceparent for record in batch.records if record.traceparent)
        span = self._tracing.begin(
            "learning step", links=list(links), model=self._target, number=number, records=len(batch.records)
        )
        if span.context:
            self._steps.append(span.context)
        return span

    def snapshot(self) -> Span:
        """Begin the span of a snapshot, which links all steps since the last one."""
        steps, self._steps = self._steps, []
        return self._tracing.begin("snapshot", links=steps, model=self._target, steps=len(steps))
