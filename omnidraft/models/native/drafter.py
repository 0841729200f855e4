"""A drafter whose passes run in native/kernels/, near the speed of reading its weights.

The drafter may compute in any precision, since it cannot change the text.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from omnidraft.errors import KernelsUnavailable
from omnidraft.models.acceptance_head import AcceptanceHead
from omnidraft.models.kv_session import BatchingDrafter, BranchingSession, ForwardRequest
from omnidraft.models.native import library as native
from omnidraft.models.native.factors import PackedFactors
from omnidraft.models.native.model import NativeKvBackend, NativeModel, compute_segments
from omnidraft.models.native.packed_cache import PackedCache
from omnidraft.models.native.packed_model import PackedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AUTOMATIC = "int8"
"""The precision that `auto` chooses for a drafter on our kernels."""


class NativeDrafter(BatchingDrafter):
    """Implements ports.DraftModel at one set of weights."""

    def __init__(
        self,
        model: "PreTrainedModel | PackedModel",
        precision: str,
        kernels: str = "auto",
        *,
        head: AcceptanceHead | None = None,
    ) -> None:
        """See NativeModel for precisions, library.load for kernels and errors."""
        self._model = NativeModel(model, precision, native.load(kernels))
        self._head = head
        self.vocab_size = self._model.vocab_size
        self.context_limit = self._model.first_context
        self.has_head = head is not None

    def open(self) -> "NativeSession":
        """See ports.DraftModel."""
        return NativeSession(self._model, self._head)

    def with_factors(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], "NativeSession"]:
        """See kv_session.BatchingDrafter."""
        return partial(NativeSession, self._model, self._head, self._model.pack_factors(tensors))

    def forward(self, batch: Sequence[tuple[NativeKvBackend, ForwardRequest]]) -> list[torch.Tensor]:
        """See kv_session.BatchingDrafter."""
        return compute_segments(self._model, [backend.requested(each) for backend, each in batch])


class NativeSession(BranchingSession):
    """Implements ports.DraftSession."""

    backend: NativeKvBackend

    def __init__(self, model: NativeModel, head: AcceptanceHead | None, factors: PackedFactors | None = None) -> None:
        super().__init__(NativeKvBackend(model, keeps_hidden=head is not None, factors=factors), head)


def cached_drafter(folder: Path, precision: str, kernels: str, cache: PackedCache) -> NativeDrafter | None:
    """Return the base drafter of a model folder that is packed; None if it is not, or our kernels do not work here."""
    chosen = AUTOMATIC if precision == "auto" else precision
    weights = None if torch.cuda.is_available() else cache.find(folder, chosen)
    try:
        return None if weights is None else NativeDrafter(weights, chosen, kernels)
    except KernelsUnavailable:
        return None
