"""Steps for embeddings and head, whose rows learn in two ways: all by a hypernetwork, those that occurred alone too.

Adam scales each gradient to the same size. Ids that do not occur have tiny ones, all of which say "less likely"; taken
as they are they move a hundred thousand rows as far as those that texts teach, away from every text to come.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from omnidraft.distill.resume_tensors import adam_state, load_adam_state
from omnidraft.transfer.hypernetwork import LinearHypernetwork


class RowOptimizer:
    """Belongs to one matrix of rows. In a step: its gradient, then `step`."""

    def __init__(self, rows_TH: nn.Parameter, hypernetwork: LinearHypernetwork) -> None:
        self._rows_TH, self._hypernetwork = rows_TH, hypernetwork
        self._alone = torch.optim.SparseAdam([rows_TH])
        self._alone.state[rows_TH] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(rows_TH),
            "exp_avg_sq": torch.zeros_like(rows_TH),
        }
        self._shared = torch.optim.Adam(hypernetwork.parameters())

    @torch.no_grad()
    def step(self, ids: Tensor, rate: float, map_rate: float) -> None:
        """Learn from the gradient of the rows, which is used up.

        Args:
            ids: the ids that occurred, each once.
        """
        rows_TH, weights = self._rows_TH, list(self._hypernetwork.parameters())
        grad_TH, rows_TH.grad = rows_TH.grad, None
        assert grad_TH is not None
        before = [weight.clone() for weight in weights]
        self._hypernetwork.backward(grad_TH)
        set_rate(self._shared, map_rate)
        self._shared.step()
        rows_TH.add_(self._hypernetwork(*(weight - old for weight, old in zip(weights, before, strict=True))))
        rows_TH.grad = torch.sparse_coo_tensor(ids[None], grad_TH[ids], rows_TH.shape, check_invariants=True)
        set_rate(self._alone, rate)
        self._alone.step()
        rows_TH.grad = None

    def state(self, prefix: str) -> dict[str, Tensor]:
        """Return rows, hypernetwork and what Adam knows of both, by names that begin with `prefix`; no copies."""
        parts = [adam_state(named, optimizer, prefix + name) for name, named, optimizer in self._parts()]
        return parts[0] | parts[1]

    def load_state(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        """Continue from where `state` was taken. Raises ConfigError when it belongs to other weights."""
        for name, named, optimizer in self._parts():
            load_adam_state(named, optimizer, tensors, prefix + name)

    def _parts(self) -> list[tuple[str, dict[str, nn.Parameter], torch.optim.Optimizer]]:
        shared = dict(self._hypernetwork.named_parameters())
        return [("rows.", {"rows": self._rows_TH}, self._alone), ("map.", shared, self._shared)]


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all weights."""
    for group in optimizer.param_groups:
        group["lr"] = rate
