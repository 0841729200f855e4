"""Rows of embeddings and head from the old rows that spell them, by a linear map that learns: a small hypernetwork.

A text teaches the rows of its own ids, and most ids of a large vocabulary occur in no text of a short training. But
what the rows that do occur have to learn is much alike, so a map that all rows share learns it for the others too, and
for the rows of a third tokenizer, of which it has seen nothing.
Shapes: D old ids, T new ids, H hidden size, F = 3 ways to choose old ids, L numbers of old ids, K = F x D + L.
Source: docs/algorithms.md, section 14. Those of https://arxiv.org/abs/2405.07883 are transformers over the same old
ids, trained on many tokenizers at once.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from omnidraft.errors import ConfigError
from omnidraft.vocab.alignment import PackedLists

MOST_PIECES = 4
"""Ids that are spelled by so many old ones, or by more, share what is added for their number."""
_WAYS = 3


class LinearHypernetwork(nn.Module):
    """Adds A mean(old rows) + B first old row + C last old row + d(number of old rows) to each new row; 0 at first."""

    def __init__(self, old_DH: Tensor, pieces: PackedLists) -> None:
        """
        Args:
            old_DH: the rows of the model before, float32. They do not learn.
            pieces: the old ids that spell each new one; a new one that nothing old spells gets its d alone.
        """
        super().__init__()
        num_old, size = old_DH.shape
        self.maps_FHH = nn.Parameter(torch.zeros(_WAYS, size, size))
        self.numbers_LH = nn.Parameter(torch.zeros(MOST_PIECES + 1, size))
        self._old_DH = old_DH.detach()
        self._mix_TK = _mix(pieces, num_old)
        self._mix_KT = self._mix_TK.T.coalesce()

    def forward(self, maps_FHH: Tensor, numbers_LH: Tensor) -> Tensor:
        """Return what these weights add to the rows, [T, H]. It is linear in them."""
        return self._mix_TK @ torch.cat([*(self._old_DH @ map_HH for map_HH in maps_FHH), numbers_LH])

    def added(self) -> Tensor:
        """Return what it adds to the rows now, [T, H]."""
        return self(*self.parameters()).detach()

    def backward(self, grad_TH: Tensor) -> None:
        """Set the gradients of the weights to those that follow from the rows'."""
        *grads_FDH, grad_LH = (self._mix_KT @ grad_TH).split([len(self._old_DH)] * _WAYS + [len(self.numbers_LH)])
        self.maps_FHH.grad = torch.stack([self._old_DH.T @ grad_DH for grad_DH in grads_FDH])
        self.numbers_LH.grad = grad_LH


def save_hypernetworks(networks: Sequence[LinearHypernetwork], file: Path) -> None:
    """Write the weights of a model's hypernetworks, embeddings first. Raises OSError, SafetensorError."""
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(nn.ModuleList(networks).state_dict(), file)


def load_hypernetworks(networks: Sequence[LinearHypernetwork], file: Path) -> None:
    """Give hypernetworks, of any pieces, the weights that were saved.

    Raises:
        ConfigError: there is no such file, or it is of a model of another size.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        nn.ModuleList(networks).load_state_dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError) as exc:  # torch raises the last for names and shapes
        reason = " ".join(str(exc).split())
        raise ConfigError(f"{file} has no hypernetwork of this model: {reason}") from exc


def _mix(pieces: PackedLists, num_old: int) -> Tensor:
    """Return how much of each mapped old row, and of each number's row, is in each new one; sparse."""
    lengths_T = pieces.lengths
    owners, filled = np.repeat(np.arange(len(pieces)), lengths_T), np.flatnonzero(lengths_T)
    firsts, lasts = pieces.firsts(default=0)[filled], pieces.ids[pieces.offsets[filled + 1] - 1]
    columns = [
        pieces.ids,
        num_old + firsts,
        2 * num_old + lasts,
        _WAYS * num_old + lengths_T.clip(max=MOST_PIECES),
    ]
    rows = [owners, filled, filled, np.arange(len(pieces))]
    amounts = [1 / lengths_T[owners], *(np.ones(len(each)) for each in rows[1:])]
    at = torch.from_numpy(np.stack([np.concatenate(rows), np.concatenate(columns)]))
    amount = torch.from_numpy(np.concatenate(amounts)).float()
    shape = (len(pieces), _WAYS * num_old + MOST_PIECES + 1)
    return torch.sparse_coo_tensor(at, amount, shape, check_invariants=True).coalesce()
