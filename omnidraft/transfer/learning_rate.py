"""The learning rate that fits a model by itself.

AdamW moves a number by about its rate in each step, however large the numbers around it are, so a rate that fits
SmolLM2-135M, whose matrices are about .19, ruins Qwen2.5-Coder-0.5B, whose matrices are about .016. One rate for all
weights of a model keeps the multiples for its embeddings and their map what they are.
Source: relative step sizes of Adafactor, https://arxiv.org/abs/1804.04235, section 8.
"""

from collections.abc import Mapping
from statistics import median

from torch import Tensor

from omnidraft.transfer.settings import TrainingSettings

RELATIVE = 1.6e-3
"""The share of a typical matrix's root mean square that it is moved by in a step: 3e-4 for SmolLM2-135M, 6e-5 for
Gemma 3 270M, 2.5e-5 for Qwen2.5-Coder-0.5B. SmolLM2 was ruined by 5e-3; Gemma learned with 2.5e-3, too."""
OF_FACTORS = 1e-4
"""The rate of LoRA factors, half of which begin at zero."""


def highest_rate(matrices: Mapping[str, Tensor], settings: TrainingSettings) -> float:
    """Return the highest learning rate of a run that trains these weights, which have not learned yet, and the rows of
    the tokens."""
    if settings.learning_rate is not None:
        return settings.learning_rate
    sizes = [each.detach().float().square().mean().sqrt().item() for each in matrices.values() if each.ndim > 1]
    return OF_FACTORS if settings.train == "lora" or not sizes else RELATIVE * median(sizes)
