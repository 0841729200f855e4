"""Float32 master weights of a model that computes in bfloat16.

A weight of bfloat16 has 8 bits and forgets an update that is smaller than 1/256 of it; so the optimizer works on
float32, and the model's own weights are rounded copies.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn


class MasterWeights:
    """The trained weights of a model, and the copies that it computes with."""

    def __init__(self, model: nn.Module, name_of: Callable[[str], str]) -> None:
        """Round all weights of the model, and keep those that are trained in float32.

        Args:
            name_of: the name of a trained weight for its name in the model.
        """
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.masters: Mapping[str, nn.Parameter] = {
            name_of(name): nn.Parameter(each.detach().clone()) for name, each in trained.items()
        }
        self._copies = list(trained.values())
        for parameter in model.parameters():  # not the buffers: rotations need float32
            parameter.data = parameter.data.to(torch.bfloat16)
        for copy, master in zip(self._copies, self.masters.values(), strict=True):
            copy.register_post_accumulate_grad_hook(_gradient_goes_to(master))

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the weights as they are now."""
        for copy, master in zip(self._copies, self.masters.values(), strict=True):
            copy.copy_(master)


def _gradient_goes_to(master: nn.Parameter) -> Callable[[torch.Tensor], None]:
    """Return a hook that adds the gradient of one backward pass to the master's, in float32, and frees it."""

    def add(copy: torch.Tensor) -> None:
        assert copy.grad is not None
        if master.grad is None:
            master.grad = copy.grad.float()
        else:
            master.grad.add_(copy.grad)
        copy.grad = None

    return add
