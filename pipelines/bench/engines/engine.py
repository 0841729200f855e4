"""What an engine is: one model in one number format, whose passes are timed and whose logits are compared.

Shapes: N ids, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

MAX_ROWS = 64
"""Maximum number of rows of a pass with logits."""
MAX_TOKENS = 2048
"""Maximum length of a text."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Names an engine."""

    system: str
    format: str
    """Number format of the weights."""
    variant: str
    """A build or a setting of the system."""
    model: str
    """The model's name or folder; llama.cpp and ik_llama.cpp take the GGUF file of that name, or a file."""

    def __str__(self) -> str:
        return f"{self.system} {self.format} {self.variant}"

    def plain_data(self) -> dict[str, Any]:
        """Return the fields of a row."""
        return {name: value for name, value in asdict(self).items() if name != "model"}


class Engine(Protocol):
    """A loaded model and one text."""

    num_weights: int
    """Weights of the matrices that a pass reads: all but the embedding, of which it reads a few rows."""
    weight_bytes: int
    """Memory of these."""
    vocab_size: int

    def score(self, start: int, ids: Sequence[int]) -> torch.Tensor:
        """Compute at most MAX_ROWS ids behind the first `start` ids of the text; return the logits float32 [N, V]."""

    def read(self, ids: Sequence[int]) -> None:
        """Read the ids as the prompt of another text, up to the logits after the last where the system allows it."""


def linear_weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the matrices of a transformers model that a pass reads."""
    return [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]


def row_ids(num: int, vocab_size: int) -> list[int]:
    """Return ids to measure with, which are of no meaning."""
    return [(7 * row + 3) % vocab_size for row in range(num)]


def from_plain_data(data: Mapping[str, str]) -> EngineSpec:
    """Return the spec of these fields."""
    return EngineSpec(**data)
