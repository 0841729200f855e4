"""A training run: its curve of held-out bits per byte, and a checkpoint at every point of it, from which a killed run
goes on."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omnidraft.distill.resume_tensors import from_plain_tensor, plain_tensor
from omnidraft.errors import ConfigError, StorageError
from omnidraft.files import replaced_file
from omnidraft.progress import bar
from omnidraft.transfer.trainer import Trainer

_RUN, _CURVE = "run", "curve"


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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The one checkpoint of a run."""

    file: Path
    run: Mapping[str, Any]
    """Plain data that decides what the run computes: models, texts and settings."""

    def save(self, trainer: Trainer, curve: list[Point]) -> None:
        """Replace the file, all or nothing. Raises StorageError."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        plain = {_RUN: plain_tensor(self.run), _CURVE: plain_tensor([asdict(point) for point in curve])}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with replaced_file(self.file) as file:
                save_file({**trainer.state(), **plain}, file.name)
        except (OSError, SafetensorError) as exc:  # safetensors has its own error for a full disk
            raise StorageError(f"{self.file} cannot be written: {exc}; free space and start again") from exc

    def load(self, trainer: Trainer) -> list[Point]:
        """Bring the trainer to where it was and return the curve so far; without a file it is empty.

        Raises:
            ConfigError: the file is damaged, or of a run of other models, texts or settings.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if not self.file.exists():
            return []
        try:
            tensors = load_file(self.file)
            run, curve = from_plain_tensor(tensors.pop(_RUN)), from_plain_tensor(tensors.pop(_CURVE))
        except (OSError, SafetensorError, KeyError, ValueError) as exc:
            raise ConfigError(f"{self.file} is no checkpoint of a transfer: {exc}; delete it to start again") from exc
        self._require_same(run)
        trainer.load_state(tensors)
        return [Point(**point) for point in curve]

    def _require_same(self, run: Mapping[str, Any]) -> None:
        differing = sorted(name for name in run.keys() | self.run.keys() if run.get(name) != self.run.get(name))
        if differing:
            name = differing[0]
            raise ConfigError(
                f"{self.file} is of another run: {name} was {run.get(name)}, is {self.run.get(name)}; go on with what "
                "it was, or delete the file to start again"
            )


def train(
    trainer: Trainer,
    checkpoint: Checkpoint,
    measure: Callable[[], float],
    *,
    num_steps: int,
    measure_every: int,
    on_point: Callable[[Point], None],
) -> list[Point]:
    """Train to the last step, from the checkpoint on if there is one; return the whole curve, which begins before the
    first step.

    Args:
        measure: returns the bits per byte of the held-out texts.

    Raises:
        ConfigError: the checkpoint is of another run, or a loss is no number.
    """
    points = checkpoint.load(trainer)
    if not points:
        points = [Point(0, 0, measure())]
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
                checkpoint.save(trainer, points)
    return points
