"""The settings of a transfer's training."""

from dataclasses import dataclass, field
from typing import Literal

from omnidraft.config import AlmSettings
from omnidraft.errors import ConfigError

LOSSES = ("alm", "nll")
"""The losses that need no trace: likelihood matching, and the text's own likelihood."""


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """Settings of training the model after. A run that resumes needs the same."""

    num_steps: int
    texts_per_step: int = 4
    learning_rate: float | None = None
    """The highest; it rises over `warmup_steps` and falls to 0 at the last step, both linearly. None: see
    trainer.highest_rate."""
    embedding_rate: float = 3.0
    """The learning rate of embeddings and head as a multiple of the others': a row learns only where its id occurs."""
    hypernetwork_rate: float = 1.0
    """The learning rate of the map that all rows share, as a multiple of the others'; 0 leaves it out."""
    warmup_steps: int = 5
    loss: str = "alm + nll"
    """A weighted sum of LOSSES."""
    hidden_weight: float = 1.0
    """The weight of the hidden states' loss in norms of the other losses' gradient; 0 leaves it out."""
    train: Literal["full", "lora"] = "full"
    max_tokens: int = 256
    """The most ids of a text in either tokenizer; the rest of a longer text is left out."""
    grad_clip: float = 1.0
    seed: int = 0
    alm: AlmSettings = field(default_factory=AlmSettings)

    def terms(self) -> tuple[tuple[str, float], ...]:
        """Return (loss, weight) of the sum. Raises ConfigError for a loss that needs a trace, or is none."""
        from omnidraft.distill.training.losses import parse

        terms = parse(self.loss)
        for name, _ in terms:
            if name not in LOSSES:
                raise ConfigError(f"loss {name!r} needs a trace; a transfer has {', '.join(LOSSES)}")
        return terms

    def rate_share(self, step: int) -> float:
        """Return the share of the highest learning rate that this step has, which counts from 0."""
        rising = (step + 1) / max(self.warmup_steps, 1)
        falling = (self.num_steps - step) / max(self.num_steps - self.warmup_steps, 1)
        return min(rising, falling, 1.0)
