"""Learning: the drafter and its acceptance head inside the learner, and why the fleet's memory drops what it held."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch

Precision = Literal["float32", "bfloat16"]
"""The number format of training passes; weights are learned in float32 in either."""


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """Several texts in one pass without padding: first the contexts of all, which get no gradient, then the rest."""

    ids_R: torch.Tensor
    """int64, the drafter's."""
    text_R: torch.Tensor
    """int64; the text of each row. A row attends to rows of its own text only."""
    position_R: torch.Tensor
    """int64; starts at 0 in each text."""
    num_context: int
    """The number of context rows."""


class TrainableDrafter(Protocol):
    """The drafter inside the learner. R rows of a pass, C of them context, N selected rows, H hidden size, V_q
    vocabulary."""

    vocab_size: int
    context_limit: int

    @property
    def precision(self) -> Precision:
        """The format that passes are computed in."""

    def compute_in(self, precision: Precision) -> None:
        """Compute in this format from now on, or, with a warning, in float32 where it does not work."""

    def trained(self) -> Mapping[str, torch.nn.Parameter]:
        """Return the trained parameters by name, float32, in a fixed order."""

    def linear_shapes(self) -> Mapping[str, tuple[int, int]]:
        """Return the shape [N, K] of each linear layer that may have low-rank factors, by its name in a snapshot."""

    def factored(self, factors: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Inside the `with` block, add these low-rank factors (see snapshots/low_rank.py) to the weights, and give
        gradients to the factors alone."""

    def hidden(self, texts: PackedTexts) -> torch.Tensor:
        """Return the last hidden states [R - C, H] of the rows after the context, whose keys and values are
        constants."""

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V_q] of selected rows of the last hidden states, in the precision of the pass."""

    def serving_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a worker adds to the base drafter: all weights in bfloat16, or LoRA factors in
        float32."""


class TrainableHead(Protocol):
    """The acceptance head inside the learner. N guesses, H hidden size of the drafter."""

    def trained(self) -> Mapping[str, torch.nn.Parameter]:
        """Return the trained parameters by their names in a snapshot, which differ from all names of a drafter."""

    def logits(self, hidden_NH: torch.Tensor, log_q_N: torch.Tensor) -> torch.Tensor:
        """Return the logits float32 [N] of the probability that a guess, made from this hidden state with this log q,
        is accepted."""


MemoryDropReason = Literal["expired", "forgotten", "full", "unknown_ids"]
"""Older than the log's retention; of a forgotten tenant; the oldest beyond a limit; with ids that the target lacks."""
UnreadableReason = Literal["forgotten", "unknown_key", "damaged"]
"""The key of a memory's file is destroyed, or is not known here; or the content is not that of a memory."""

MEMORY_DROP_REASONS: tuple[str, ...] = get_args(MemoryDropReason)
UNREADABLE_REASONS: tuple[str, ...] = get_args(UnreadableReason)
