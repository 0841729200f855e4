"""Steps for embeddings and head, whose rows learn in two ways: all by a hypernetwork, those that occurred alone too.

Adam scales each gradient to the same size. Ids that do not occur have tiny ones, all of which say "less likely"; taken
as they are they move a hundred thousand rows as far as those that texts teach, away from every text to come.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from omnidraft.distill.resume_tensors import adam_state, load_adam_state
from omnidraft.transfer.hypernetwork import LinearHypernetwork

_ROWS, _MAP = "rows.", "map."


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
        _set_rate(self._shared, map_rate)
        self._shared.step()
        rows_TH.add_(self._hypernetwork(*(weight - old for weight, old in zip(weights, before, strict=True))))
        rows_TH.grad = torch.sparse_coo_tensor(ids[None], grad_TH[ids], rows_TH.shape, check_invariants=True)
        _set_rate(self._alone, rate)
        self._alone.step()
        rows_TH.grad = None

    def state(self, prefix: str) -> dict[str, Tensor]:
        """Return rows, hypernetwork and what Adam knows of both, by names that begin with `prefix`; no copies."""
        return adam_state(self._alone_named(), self._alone, prefix + _ROWS) | adam_state(
            self._shared_named(), self._shared, prefix + _MAP
        )

    def load_state(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        """Continue from where `state` was taken. Raises ConfigError when it belongs to other weights."""
        load_adam_state(self._alone_named(), self._alone, tensors, prefix + _ROWS)
        load_adam_state(self._shared_named(), self._shared, tensors, prefix + _MAP)

    def _alone_named(self) -> dict[str, nn.Parameter]:
        return {"rows": self._rows_TH}

    def _shared_named(self) -> dict[str, nn.Parameter]:
        return dict(self._hypernetwork.named_parameters())


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
