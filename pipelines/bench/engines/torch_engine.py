"""The transformers model's own passes, multiplied by torch, as an engine."""

from collections.abc import Sequence
from typing import Any

import torch

from omnidraft.models import precision
from omnidraft.models.catalog import store
from omnidraft.models.hf.target import load_model
from pipelines.bench.engines.engine import EngineSpec, linear_weights


class TorchEngine:
    """Implements Engine."""

    def __init__(self, spec: EngineSpec) -> None:
        """Raises ModelError when torch does not multiply matrices of this format here."""
        model: Any = precision.apply(load_model(store.resolve(spec.model)), spec.format)
        self._model, self._cache = model, None
        weights = linear_weights(model)
        self.num_weights = sum(weight.numel() for weight in weights)
        self.weight_bytes = sum(weight.nbytes for weight in weights)
        self.vocab_size: int = model.config.vocab_size

    @torch.inference_mode()
    def score(self, start: int, ids: Sequence[int]) -> torch.Tensor:
        """See Engine."""
        cache = self._cache if start else None
        output = self._model(input_ids=torch.tensor([list(ids)]), past_key_values=cache, use_cache=True)
        self._cache = output.past_key_values
        logits_NV: torch.Tensor = output.logits[0].float()
        return logits_NV

    @torch.inference_mode()
    def read(self, ids: Sequence[int]) -> None:
        """See Engine."""
        self._model(input_ids=torch.tensor([list(ids)]), use_cache=True, logits_to_keep=1)
