"""Our own kernels as an engine."""

from collections.abc import Sequence

import torch

from omnidraft.errors import ModelError
from omnidraft.models.catalog import store
from omnidraft.models.hf.target import load_model
from omnidraft.models.kv_session import ForwardRequest
from omnidraft.models.native import library
from omnidraft.models.native.model import NativeKvBackend, NativeLlama
from omnidraft.models.native.weights import LlamaParts, is_supported
from pipelines.bench.engines.engine import MAX_TOKENS, EngineSpec, linear_weights

_MATRICES = {"qkv", "out", "gate_up", "down", "head"}
"""The parts that every pass reads whole."""


class NativeEngine:
    """Implements Engine."""

    def __init__(self, spec: EngineSpec) -> None:
        """Raises ModelError when the model is none of ours, or this build does not work here."""
        kernels = library.load(spec.variant)
        model = load_model(store.resolve(spec.model))
        if not is_supported(model):
            raise ModelError(f"our kernels do not compute {spec.model}")
        native = NativeLlama(model, spec.format, kernels)
        self._backend = NativeKvBackend(native, MAX_TOKENS)
        self.num_weights = sum(weight.numel() for weight in linear_weights(model))
        parts = LlamaParts(model, spec.format, kernels).parts
        self.weight_bytes = sum(part.num_bytes for part in parts if part.name.split(".")[-1] in _MATRICES)
        self.vocab_size = native.vocab_size

    def score(self, start: int, ids: Sequence[int]) -> torch.Tensor:
        """See Engine."""
        return self._backend.compute(ForwardRequest(start, range(-1, len(ids) - 1), ids))

    def read(self, ids: Sequence[int]) -> None:
        """See Engine."""
        self._backend.compute(ForwardRequest(0, None, ids))
