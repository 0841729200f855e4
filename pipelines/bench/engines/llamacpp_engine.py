"""llama.cpp as an engine, through the bindings that this process finds."""

from collections.abc import Sequence
from pathlib import Path

import torch

from omnidraft.models.llamacpp.context import BatchEntry, Context, LlamaModel
from pipelines.bench.engines.engine import MAX_TOKENS, EngineSpec
from pipelines.bench.engines.gguf_weights import matrix_sizes


class LlamaCppEngine:
    """Implements Engine."""

    def __init__(self, spec: EngineSpec) -> None:
        """Raises ModelError when llama.cpp cannot load the file."""
        gguf = Path(spec.model)
        self._model = LlamaModel(gguf)
        threads = torch.get_num_threads()
        self._context = Context(self._model, MAX_TOKENS, max_rows=MAX_TOKENS // 2, num_sequences=1, threads=threads)
        self.num_weights, self.weight_bytes = matrix_sizes(gguf)
        self.vocab_size = self._model.vocab_size

    def score(self, start: int, ids: Sequence[int]) -> torch.Tensor:
        """See Engine."""
        return self._decode(start, ids, has_logits=True)

    def read(self, ids: Sequence[int]) -> None:
        """See Engine; without any logits."""
        self._decode(0, ids, has_logits=False)

    def _decode(self, start: int, ids: Sequence[int], *, has_logits: bool) -> torch.Tensor:
        self._context.cut(0, start)
        return self._context.decode(
            [BatchEntry(token, start + row, has_logits=has_logits) for row, token in enumerate(ids)]
        )
