"""The weights of a model that learns: float32 for the optimizer, and the same or bfloat16 for its passes.

A weight of bfloat16 has 8 bits and forgets an update that is smaller than 1/256 of it. So the optimizer always works on
float32, and in bfloat16 the model computes with rounded copies, whose gradients are added up in float32.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from omnidraft.ports import Precision

_PART = 1 << 18
"""Numbers that are converted at a time where formats are added: torch is three times as slow at adding mixed ones."""


class TrainedWeights:
    """All weights of a model, and the float32 ones of those that it learns."""

    def __init__(self, model: nn.Module, name_of: Callable[[str], str]) -> None:
        """
        Args:
            model: in float32; weights that require no gradient are not learned.
            name_of: the name under which a weight is learned, for its name in the model.
        """
        self._model = model
        self.precision: Precision = "float32"
        """The format that the model computes in."""
        self._copies: dict[str, nn.Parameter] = {}
        self._unrounded: dict[int, nn.Parameter] = {}
        """Frozen weights as they were, by the id of what is in their place."""
        self.masters: Mapping[str, nn.Parameter] = {
            name_of(name): each for name, each in model.named_parameters() if each.requires_grad
        }

    def compute_in(self, precision: Precision) -> None:
        """Let the model compute in this format from now on. The learned weights and their values stay."""
        if precision == self.precision:
            return
        self.precision = precision
        if precision == "float32":
            masters = {id(copy): self.masters[name] for name, copy in self._copies.items()}
            known = {**masters, **self._unrounded}
            self._replace(lambda old: known[id(old)] if id(old) in known else _frozen(old, torch.float32))
            self._copies, self._unrounded = {}, {}
            return
        self._copies = {name: _copy_of(master) for name, master in self.masters.items()}
        copies = {id(master): self._copies[name] for name, master in self.masters.items()}
        self._replace(lambda old: copies[id(old)] if old.requires_grad else self._rounded(old))

    def _rounded(self, old: nn.Parameter) -> nn.Parameter:
        """Return a frozen weight in bfloat16; the old one is kept where that loses bits."""
        new = _frozen(old, torch.bfloat16)
        if not torch.equal(new.to(old.dtype), old):
            self._unrounded[id(new)] = old
        return new

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the learned weights as they are now; call it before a pass."""
        for name, copy in self._copies.items():
            copy.copy_(self.masters[name])

    def _replace(self, new: Callable[[nn.Parameter], nn.Parameter]) -> None:
        """Put another parameter in the place of each; shared ones stay shared."""
        places = [(module, name, old) for module in self._model.modules() for name, old in module._parameters.items()]
        made = {id(old): new(old) for old in {id(old): old for _, _, old in places if old is not None}.values()}
        for module, name, old in places:
            if old is not None:
                setattr(module, name, made[id(old)])


def _frozen(old: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(old.detach().to(dtype), requires_grad=False)


def _copy_of(master: nn.Parameter) -> nn.Parameter:
    """Return a rounded copy whose gradient is added to the master's after each backward pass, and freed."""

    kept = torch.empty_like(master)  # a fresh gradient in each step costs more page faults than arithmetic

    def add(copy: Tensor) -> None:
        assert copy.grad is not None
        if master.grad is None:
            master.grad = kept.copy_(copy.grad)
        else:
            for part, new in zip(master.grad.view(-1).split(_PART), copy.grad.view(-1).split(_PART), strict=True):
                part.add_(new.float())
        copy.grad = None

    copy = nn.Parameter(master.detach().to(torch.bfloat16))
    copy.register_post_accumulate_grad_hook(add)
    return copy
