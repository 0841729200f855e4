"""A drafter of the Llama family whose passes run in native/kernels/, near the speed of reading its weights.

The drafter may compute in any precision, since it cannot change the text.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from omnidraft.models.acceptance_head import AcceptanceHead
from omnidraft.models.kv_session import BatchingDrafter, BranchingSession, ForwardRequest
from omnidraft.models.native import library as native
from omnidraft.models.native.model import NativeKvBackend, NativeLlama, compute_segments


class LlamaDrafter(BatchingDrafter):
    """Implements ports.DraftModel at one set of weights."""

    def __init__(
        self,
        model: PreTrainedModel,
        precision: str,
        kernels: str = "auto",
        *,
        head: AcceptanceHead | None = None,
    ) -> None:
        """See NativeLlama for precisions, library.load for kernels and errors."""
        self._model = NativeLlama(model, precision, native.load(kernels))
        self._head = head
        self.vocab_size = self._model.vocab_size
        self.context_limit = self._model.context_limit
        self.has_head = head is not None

    def open(self) -> "LlamaSession":
        """See ports.DraftModel."""
        return LlamaSession(self._model, self._head)

    def forward(self, batch: Sequence[tuple[NativeKvBackend, ForwardRequest]]) -> list[torch.Tensor]:
        """See kv_session.BatchingDrafter."""
        return compute_segments(self._model, [backend.requested(each) for backend, each in batch])


class LlamaSession(BranchingSession):
    """Implements ports.DraftSession."""

    backend: NativeKvBackend

    def __init__(self, model: NativeLlama, head: AcceptanceHead | None) -> None:
        super().__init__(NativeKvBackend(model, keeps_hidden=head is not None), head)
