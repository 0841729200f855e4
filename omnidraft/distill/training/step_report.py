"""The report of a training step, its metrics, and the mean losses of several steps."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from omnidraft.ports import Metrics


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


def count(report: StepReport, metrics: Metrics) -> None:
    """Add one step to the metrics."""
    metrics.add("omnidraft_training_steps_total")
    metrics.add("omnidraft_training_tokens_total", report.num_tokens)
    metrics.observe("omnidraft_training_step_seconds", report.duration_s)
    for name, loss in report.losses.items():
        metrics.set("omnidraft_training_loss", loss, loss=name)


def mean_losses(reports: Sequence[StepReport]) -> dict[str, float]:
    """Return the mean of each loss over the steps that had it and were finite."""
    sums: defaultdict[str, float] = defaultdict(float)
    nums: Counter[str] = Counter()
    for report in reports:
        if report.is_update:
            for name, loss in report.losses.items():
                sums[name] += loss
                nums[name] += 1
    return {name: total / nums[name] for name, total in sums.items()}
