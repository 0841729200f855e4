"""Learning: the drafter and its acceptance head, as the learner holds them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """Several texts in one pass without padding: first the beginnings of all, which are only read, then the rest."""

    ids_R: torch.Tensor
    """int64, the drafter's."""
    text_R: torch.Tensor
    """int64; which text a row belongs to. Rows of one text see each other only."""
    position_R: torch.Tensor
    """int64; from 0 in each text."""
    num_context: int
    """Rows of the beginnings."""


class TrainableDrafter(Protocol):
    """The drafter as the learner holds it. R rows of a pass, C of them context, N chosen rows, H hidden size, V_q
    vocabulary."""

    vocab_size: int
    context_limit: int

    def trained(self) -> Mapping[str, torch.nn.Parameter]:
        """The parameters that learn, by name, float32, in a fixed order."""

    def hidden(self, texts: PackedTexts) -> torch.Tensor:
        """Last hidden states [R - C, H] of the rows behind the context, whose keys and values are constants."""

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """float32 [N, V_q] of chosen positions only."""

    def serving_tensors(self) -> dict[str, torch.Tensor]:
        """What a worker needs on top of the base drafter: all weights in bfloat16, or LoRA factors in float32."""


class TrainableHead(Protocol):
    """The acceptance head as the learner holds it. N guesses, H hidden size of the drafter."""

    def trained(self) -> Mapping[str, torch.nn.Parameter]:
        """As TrainableDrafter.trained; these names are those in a snapshot, and none is a drafter's."""

    def logits(self, hidden_NH: torch.Tensor, log_q_N: torch.Tensor) -> torch.Tensor:
        """float32 [N], of the chance that a guess is accepted: behind which hidden state, with which log q."""
