"""What a step of the learner adds to the metrics."""

from omnidraft.distill.learner import StepReport
from omnidraft.ports import Metrics


def count(report: StepReport, metrics: Metrics) -> None:
    """One more step."""
    metrics.add("omnidraft_training_steps_total")
    metrics.add("omnidraft_training_tokens_total", report.num_tokens)
    metrics.observe("omnidraft_training_step_seconds", report.duration_s)
    for name, loss in report.losses.items():
        metrics.set("omnidraft_training_loss", loss, loss=name)
