"""A training run: its curve of held-out bits per byte, and a checkpoint at every point of it."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

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
