"""A training run: its curve of held-out bits per byte, and a checkpoint at every point of it."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omnidraft.progress import bar
from omnidraft.transfer.checkpoint import Checkpoint
from omnidraft.transfer.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the curve."""

    step: int
    num_tokens: int
    """New ids that were learned from so far."""
    bits_per_byte: float
    """Of the held-out texts."""
    learning_rate: float = 0.0
    """Of the last step."""
    losses: dict[str, float] | None = None
    """Of the last step; None before the first."""
    seconds: float = 0.0
    """Seconds in steps so far, measuring left out."""


def resume(trainer: Trainer, checkpoint: Checkpoint) -> list[Point]:
    """Load the checkpoint, if there is one, into the trainer; return the curve so far. Raises ConfigError."""
    if (saved := checkpoint.load()) is None:
        return []
    tensors, curve = saved
    trainer.load_state(tensors)
    return [Point(**point) for point in curve]


def train(
    trainer: Trainer,
    curve: list[Point],
    checkpoint: Checkpoint,
    measure: Callable[[], float],
    *,
    num_steps: int,
    measure_every: int,
    on_point: Callable[[Point], None],
) -> list[Point]:
    """Train to the last step; return the whole curve, which begins before the first step.

    Args:
        curve: its points so far; the trainer stands at the last one.
        measure: returns the bits per byte of the held-out texts.
    """
    points = curve or [Point(0, 0, measure())]
    if not curve:
        on_point(points[0])
    num_tokens, seconds = points[-1].num_tokens, points[-1].seconds
    with bar("training", num_steps) as advance:
        advance(trainer.num_steps)
        while trainer.num_steps < num_steps:
            started_s = time.monotonic()
            result = trainer.step()
            seconds, num_tokens = seconds + time.monotonic() - started_s, num_tokens + result.num_tokens
            advance()
            if trainer.num_steps % measure_every == 0 or trainer.num_steps == num_steps:
                rate, losses = result.learning_rate, result.losses
                points.append(Point(trainer.num_steps, num_tokens, measure(), rate, losses, seconds))
                on_point(points[-1])
                checkpoint.save(trainer.state(), [asdict(point) for point in points])
    return points


JSON_FILE, PICTURE_FILE = "transfer.json", "transfer.png"


def write_report(report: Mapping[str, Any], folder: Path) -> None:
    """Write both files into a folder."""
    (folder / JSON_FILE).write_text(json.dumps(report, indent=2) + "\n")
    _draw(report, folder / PICTURE_FILE)


def _draw(report: Mapping[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curve, before = report["curve"], report["bits_per_byte"]["original"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.6))
    steps = [point["step"] for point in curve]
    left.plot(steps, [point["bits_per_byte"] for point in curve], marker="o", label="with the new tokenizer")
    left.axhline(before, color="black", linewidth=1, linestyle="--", label="the original model")
    left.set(xlabel="steps", ylabel="bits per byte, held-out texts")
    left.legend()
    learned = [point for point in curve if point["losses"]]
    for name in learned[0]["losses"] if learned else ():
        right.plot([point["step"] for point in learned], [point["losses"][name] for point in learned], label=name)
    right.set(xlabel="steps", ylabel="mean loss", yscale="log" if learned else "linear")
    rates = right.twinx()
    rates.plot(steps, [point["learning_rate"] for point in curve], color="grey", linestyle=":", label="learning rate")
    rates.set_ylabel("learning rate")
    if learned:
        right.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
