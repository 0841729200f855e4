"""A target whose passes run in native/kernels/.

Its logits after a text depend on that text only, bit for bit: neither on the tree nor on the number of ids of the pass.
So both modes take the same trees at the same cost, which `self_test` verifies here.
Shapes: N nodes of the tree, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from omnidraft.models import precision as precisions
from omnidraft.models.kv_session import KvSession
from omnidraft.models.native import library as native
from omnidraft.models.native.model import MAX_ROWS, NativeModel
from omnidraft.models.native.packed_cache import PackedCache
from omnidraft.models.native.packed_model import PackedModel
from omnidraft.models.text_target import TextTarget
from omnidraft.ports import Mode, TreeLimits, ids_needed, rotation_offset

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MAX_NODES = 63
_TESTED_SLOTS = 16


class NativeTarget(TextTarget):
    """Implements ports.Target. One pass at a time."""

    max_rows = MAX_ROWS
    _tested_chains, _tested_width = 2, 4

    def __init__(
        self, model: "PreTrainedModel | PackedModel", *, name: str, precision: str, kernels: str = "auto"
    ) -> None:
        """See NativeModel for precisions, library.load for kernels and errors."""
        self._model = own = NativeModel(model, precision, native.load(kernels))
        fingerprint = f"{name}-{precision}-{own.bits}"
        super().__init__(own.vocab_size, own.context_limit, fingerprint, first_context=own.first_context)

    def limits(self, mode: Mode) -> TreeLimits:
        """See ports.Target."""
        return TreeLimits(_MAX_NODES)

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> KvSession:
        """See ports.Target."""
        offset = rotation_offset(self, ids_needed(prompt_ids, max_new_tokens, self.context_limit))
        if mode == "reproducible":
            self.require_self_test(_TESTED_SLOTS)
        return KvSession(self._model, prompt_ids[:-1], self.limits(mode), len(prompt_ids), offset)

    def kv_bytes(self, num_ids: int, mode: Mode) -> int:
        """See ports.Target."""
        return self._model.kv_bytes(num_ids)

    def _tested_session(self, num_slots: int) -> KvSession:
        return KvSession(self._model, (), TreeLimits(_MAX_NODES), num_slots)


def cached_target(folder: Path, *, name: str, precision: str, kernels: str, cache: PackedCache) -> NativeTarget | None:
    """Return the target of a model folder that is packed, None if it is not.

    Raises:
        ModelError: nothing can compute it here.
    """
    chosen = precisions.automatic(kernels) if precision == "auto" else precision
    if chosen not in native.PACKED or torch.cuda.is_available():
        return None
    weights = cache.find(folder, chosen)
    return None if weights is None else NativeTarget(weights, name=name, precision=chosen, kernels=kernels)
