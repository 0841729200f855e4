"""What a step of the learner adds to the metrics, and what several steps come to."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from omnidraft.distill.training.learner import StepReport
from omnidraft.ports import Metrics


def count(report: StepReport, metrics: Metrics) -> None:
    """One more step."""
    metrics.add("omnidraft_training_steps_total")
    metrics.add("omnidraft_training_tokens_total", report.num_tokens)
    metrics.observe("omnidraft_training_step_seconds", report.duration_s)
    for name, loss in report.losses.items():
        metrics.set("omnidraft_training_loss", loss, loss=name)


def mean_losses(reports: Sequence[StepReport]) -> dict[str, float]:
    """Mean of each loss over the steps that had it and were finite."""
    sums: defaultdict[str, float] = defaultdict(float)
    nums: Counter[str] = Counter()
    for report in reports:
        if report.is_update:
            for name, loss in report.losses.items():
                sums[name] += loss
                nums[name] += 1
    return {name: total / nums[name] for name, total in sums.items()}
