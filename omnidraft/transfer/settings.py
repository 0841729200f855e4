"""The settings of a transfer's training, and the learning rate that fits a model by itself.

AdamW moves a number by about its rate in each step, however large the numbers around it are, so a rate that fits
SmolLM2-135M, whose matrices are about .19, ruins Qwen2.5-Coder-0.5B, whose matrices are about .016. One rate for all
weights of a model keeps the multiples for its embeddings and their map what they are.
Source: relative step sizes of Adafactor, https://arxiv.org/abs/1804.04235, section 8.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from torch import Tensor

from omnidraft.distill.examples.chunks import AlmSettings

RELATIVE = 1.6e-3
"""The share of a typical matrix's root mean square that it is moved by in a step: 3e-4 for SmolLM2-135M, 6e-5 for
Gemma 3 270M, 2.5e-5 for Qwen2.5-Coder-0.5B. SmolLM2 was ruined by 5e-3; Gemma learned with 2.5e-3, too."""
OF_FACTORS = 1e-4
"""The rate of LoRA factors, half of which begin at zero."""
EMBEDDING_RATE = 3.0
"""The learning rate of embeddings and head as a multiple of the others': a row learns only where its id occurs."""
GRAD_CLIP = 1.0


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """Settings of training the model after. A run that resumes needs the same."""

    num_steps: int
    texts_per_step: int = 4
    learning_rate: float | None = None
    """The highest; it rises over `warmup_steps` and falls to 0 at the last step, both linearly. None: `highest_rate`
    finds it."""
    warmup_steps: int = 5
    losses: tuple[tuple[str, float], ...] = (("alm", 1.0), ("nll", 1.0))
    """Names and weights of those that need no trace: likelihood matching, and the text's own likelihood."""
    hidden_weight: float = 1.0
    """The weight of the hidden states' loss in norms of the other losses' gradient."""
    train: Literal["full", "lora"] = "full"
    max_tokens: int = 256
    """The most ids of a text in either tokenizer; the rest of a longer text is left out."""
    seed: int = 0
    alm: AlmSettings = field(default_factory=AlmSettings)

    def rate_share(self, step: int) -> float:
        """Return the share of the highest learning rate that this step has, which counts from 0."""
        rising = (step + 1) / max(self.warmup_steps, 1)
        falling = (self.num_steps - step) / max(self.num_steps - self.warmup_steps, 1)
        return min(rising, falling, 1.0)

    def highest_rate(self, matrices: Mapping[str, Tensor]) -> float:
        """Return the highest learning rate of a run that trains these weights, which have not learned yet, and the rows
        of the tokens."""
        if self.learning_rate is not None:
            return self.learning_rate
        sizes = [each.detach().float().square().mean().sqrt().item() for each in matrices.values() if each.ndim > 1]
        return OF_FACTORS if self.train == "lora" or not sizes else RELATIVE * median(sizes)
