"""The learning rate of each weight of the drafter.

AdamW moves a number by about its rate in each step, however large the numbers around it are: 1e-4 is a step of 1/2,000
for SmolLM2-135M, whose weights are about .2, and of 1/200 for Qwen2.5-Coder-0.5B, whose weights are about .02 and which
forgets by it what it knew. So `auto` is a share of each weight's root mean square, before anything was learned.
LoRA factors, half of which begin at zero, have one rate.
Source: relative step sizes of Adafactor, https://arxiv.org/abs/1804.04235, section 8.
"""

from collections.abc import Mapping
from typing import Any

import torch

from omnidraft.config import LearnerSettings

RELATIVE = 5e-4
"""The share of a weight's root mean square that `auto` moves it by in a step."""
LEAST_SIZE = 1e-3
"""The root mean square of smaller weights, as zeros that are to learn too; Adafactor's."""
OF_FACTORS = 1e-4
"""What `auto` is for LoRA factors."""


def parameter_groups(trained: Mapping[str, torch.nn.Parameter], settings: LearnerSettings) -> list[dict[str, Any]]:
    """Return these weights of the base drafter as groups of an optimizer, each with its `lr`."""
    if settings.learning_rate == "auto" and settings.train == "full":
        return [{"params": [weight], "lr": RELATIVE * max(_size(weight), LEAST_SIZE)} for weight in trained.values()]
    rate = OF_FACTORS if settings.learning_rate == "auto" else settings.learning_rate
    return [{"params": list(trained.values()), "lr": rate}]


def _size(weight: torch.Tensor) -> float:
    return weight.detach().square().mean().sqrt().item()
