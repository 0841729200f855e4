"""A target of the Llama family whose passes run in native/kernels.cpp.

Its logits after a text depend on that text only, bit for bit: neither on the tree nor on the number of ids of the pass.
So both modes take the same trees at the same cost, which `self_test` verifies here.
Shapes: N nodes of the tree, V vocabulary.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from omnidraft.errors import ConfigError
from omnidraft.models.kv_session import ROOT
from omnidraft.models.native import library as native
from omnidraft.models.native.model import NativeKvBackend, NativeLlama
from omnidraft.models.target_checks import ids_needed, is_deterministic
from omnidraft.ports import DraftTree, Mode, TreeLimits

_MAX_NODES = 63
_TESTED_CHAINS, _TESTED_WIDTH = 2, 4


class LlamaTarget:
    """Implements ports.Target. One pass at a time."""

    def __init__(self, model: PreTrainedModel, *, name: str, precision: str, kernels: str = "auto") -> None:
        """See NativeLlama for precisions, library.load for kernels and errors."""
        self._model = NativeLlama(model, precision, native.load(kernels))
        self.vocab_size = self._model.vocab_size
        self.context_limit = self._model.context_limit
        self.fingerprint = f"{name}-{precision}-{self._model.build}"
        self._is_verified = False

    def limits(self, mode: Mode) -> TreeLimits:
        """See ports.Target."""
        return TreeLimits(_MAX_NODES)

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> "_Session":
        """See ports.Target. Raises ConfigError when reproducible mode does not hold on this machine."""
        needed = ids_needed(prompt_ids, max_new_tokens, self.context_limit)
        if mode == "reproducible" and not self._is_verified:
            self.self_test()
            self._is_verified = True
        session = _Session(self._model, needed)
        session.prefill(prompt_ids[:-1])
        return session

    def self_test(self) -> None:
        """Compare passes over trees with one id at a time, bit by bit.

        Raises:
            ConfigError: some bit differs, so reproducible mode cannot be promised here.
        """
        chains, width = _TESTED_CHAINS, _TESTED_WIDTH
        alone, blocks = (_Session(self._model, 2 * width + chains * width) for _ in range(2))
        if not is_deterministic(alone, blocks, vocab_size=self.vocab_size, chains=chains, width=width):
            raise ConfigError(f"reproducible mode does not hold for {self.fingerprint}: set decode.mode = 'fast'")


class _Session:
    """Implements ports.TargetSession."""

    def __init__(self, model: NativeLlama, capacity: int) -> None:
        self._model = model
        self._backend = NativeKvBackend(model, capacity)
        self._num_kept = 0

    def prefill(self, ids: Sequence[int]) -> None:
        """Compute the keys of these ids."""
        self._backend.fill(0, ids)
        self._num_kept = len(ids)

    def score(self, tree: DraftTree) -> torch.Tensor:
        return self._backend.tree(self._num_kept, [ROOT, *tree.parents[1:]], tree.tokens)

    def keep(self, nodes: Sequence[int]) -> None:
        self._backend.move([self._num_kept + node for node in nodes], self._num_kept)
        self._num_kept += len(nodes)

    def close(self) -> None:
        self._backend = NativeKvBackend(self._model)
