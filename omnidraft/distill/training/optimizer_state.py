"""Weights and their AdamW state as named tensors, for the resume part of a snapshot."""

from collections.abc import Mapping

import torch
from torch import Tensor

from omnidraft.errors import ConfigError

_MASTER, _MEAN, _SQUARE, _STEPS = "master.", "exp_avg.", "exp_avg_sq.", "num_updates"

Parameters = Mapping[str, torch.nn.Parameter]


def adam_state(parameters: Parameters, optimizer: torch.optim.Optimizer, prefix: str = "") -> dict[str, Tensor]:
    """Return the weights and their AdamW state, names beginning with `prefix`. The tensors are in use, not copies."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        tensors[prefix + _MASTER + name] = parameter.detach()
        if adam := optimizer.state.get(parameter):
            tensors[prefix + _MEAN + name] = adam["exp_avg"]
            tensors[prefix + _SQUARE + name] = adam["exp_avg_sq"]
            tensors[prefix + _STEPS] = adam["step"]
    return tensors


def load_adam_state(
    parameters: Parameters, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], prefix: str = ""
) -> None:
    """Continue from where `adam_state` was taken.

    Raises:
        ConfigError: it belongs to other weights; then nothing changed.
    """
    masters = {
        name.removeprefix(prefix + _MASTER): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix + _MASTER)
    }
    if masters.keys() != parameters.keys():
        raise ConfigError("the snapshot's master weights are not those of this learner; see learner.train and .head")
    copy_into(parameters, masters)
    optimizer.state.clear()
    for name, parameter in parameters.items():
        if prefix + _MEAN + name in tensors:
            optimizer.state[parameter] = {
                "step": tensors[prefix + _STEPS].clone(),
                "exp_avg": tensors[prefix + _MEAN + name].clone(),
                "exp_avg_sq": tensors[prefix + _SQUARE + name].clone(),
            }


@torch.no_grad()
def copy_into(parameters: Parameters, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the parameters of the same names.

    Raises:
        ConfigError: one is missing or of another shape; then nothing changed.
    """
    for name, parameter in parameters.items():
        if name not in tensors or tensors[name].shape != parameter.shape:
            raise ConfigError(f"the snapshot has no weights {name} of shape {tuple(parameter.shape)}")
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
