"""A drafter of the Llama family whose passes run in native/kernels.cpp, near the speed of reading its weights.

The drafter may compute in any precision, since it cannot change the text.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from omnidraft.models.acceptance_head import AcceptanceHead
from omnidraft.models.kv_session import BranchingSession, ForwardRequest, ForwardSteps, run_batched
from omnidraft.models.native import library as native
from omnidraft.models.native.model import NativeKvBackend, NativeLlama, compute_segments


class LlamaDrafter:
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

    def prefill_or_extend_all(self, requests: Sequence[tuple[Any, int, Sequence[int]]]) -> list[torch.Tensor]:
        """See ports.DraftModel; the sessions are this model's."""
        return self._run_batched(
            [session for session, *_ in requests],
            [each.prefill_or_extend_steps(keep, ids) for each, keep, ids in requests],
        )

    def branch_all(self, requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]]) -> list[torch.Tensor]:
        """See ports.DraftModel."""
        steps = [session.branch_steps(ids, parents) for session, ids, parents in requests]
        return self._run_batched([session for session, *_ in requests], steps)

    def _run_batched(self, sessions: Sequence["LlamaSession"], steps: Sequence[ForwardSteps]) -> list[torch.Tensor]:
        def compute(batch: Sequence[tuple[int, ForwardRequest]]) -> Sequence[torch.Tensor]:
            return compute_segments(self._model, [sessions[number].backend.requested(each) for number, each in batch])

        return run_batched(steps, compute)


class LlamaSession(BranchingSession):
    """Implements ports.DraftSession."""

    backend: NativeKvBackend

    def __init__(self, model: NativeLlama, head: AcceptanceHead | None) -> None:
        super().__init__(NativeKvBackend(model, keeps_hidden=head is not None), head)
