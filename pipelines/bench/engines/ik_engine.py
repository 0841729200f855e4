"""ik_llama.cpp as an engine, through the bindings that this process finds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omnidraft.errors import ContractError, ModelError
from pipelines.bench.engines.engine import MAX_TOKENS, EngineSpec
from pipelines.bench.engines.gguf_weights import matrix_sizes

REPACKED = "repacked"
"""The variant that interleaves the rows of matrices when it loads them, with its own kernels for them."""


class IkEngine:
    """Implements Engine."""

    def __init__(self, spec: EngineSpec) -> None:
        """Raises ModelError when it cannot load the file."""
        from ik_llama_cpp import _ctypes_api as api

        self._api: Any = api
        api.llama_backend_init()
        settings = api.llama_model_default_params()
        settings.repack_tensors = spec.variant == REPACKED
        settings.use_mmap = not settings.repack_tensors
        model = api.llama_model_load_from_file(spec.model.encode(), settings)
        if not model:
            raise ModelError(f"ik_llama.cpp cannot load {spec.model}")
        self._context = api.llama_init_from_model(model, self._context_settings())
        self._batch = api.llama_batch_init(MAX_TOKENS, 0, 1)
        self.vocab_size: int = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self.num_weights, self.weight_bytes = matrix_sizes(Path(spec.model))

    def _context_settings(self) -> Any:
        settings = self._api.llama_context_default_params()
        settings.n_ctx = settings.n_batch = MAX_TOKENS
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        return settings

    def score(self, start: int, ids: Sequence[int]) -> torch.Tensor:
        """See Engine."""
        self._decode(start, ids, has_logits=True)
        first = self._api.llama_get_logits_ith(self._context, 0)
        return torch.from_numpy(np.ctypeslib.as_array(first, (len(ids), self.vocab_size)).copy())

    def read(self, ids: Sequence[int]) -> None:
        """See Engine; in passes of its own size."""
        self._decode(0, ids, has_logits=False)

    def _decode(self, start: int, ids: Sequence[int], *, has_logits: bool) -> None:
        if start == 0:
            self._api.llama_kv_cache_clear(self._context)
        batch = self._batch
        batch.n_tokens = len(ids)
        for row, token in enumerate(ids):
            batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, start + row, 1
            batch.seq_id[row][0], batch.logits[row] = 0, has_logits or row == len(ids) - 1
        if failure := self._api.llama_decode(self._context, batch):
            raise ContractError(f"ik_llama.cpp refused a pass over {len(ids)} tokens: llama_decode gave {failure}")
