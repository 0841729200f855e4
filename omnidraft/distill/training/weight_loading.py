"""Loading a snapshot's weights into a drafter and its acceptance head: into both, or neither if one does not fit."""

from collections.abc import Mapping

import torch
from torch import Tensor

from omnidraft.distill.resume_tensors import Parameters, copy_into, load_adam_state
from omnidraft.distill.training.head import HeadTrainer


def load_serving_tensors(drafter: Parameters, head: HeadTrainer | None, tensors: Mapping[str, Tensor]) -> None:
    """Take serving tensors as master weights. Raises ConfigError when they do not fit; then nothing changed."""
    if head:
        head.check_serving(tensors)
    copy_into(drafter, tensors)
    if head:
        head.start_from(tensors)


def load_training_state(
    drafter: Parameters, optimizer: torch.optim.Optimizer, head: HeadTrainer | None, tensors: Mapping[str, Tensor]
) -> None:
    """Take master weights and optimizers. Raises ConfigError when they do not fit; then nothing changed."""
    if head:
        head.check_state(tensors)
    load_adam_state(drafter, optimizer, tensors)
    if head:
        head.load_state(tensors)
