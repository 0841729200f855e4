"""A drafter of the Llama family whose passes are computed by native/llama.cpp, near the time its memory takes to read.

The drafter may compute in any precision, since it cannot change the text.
"""

from pathlib import Path

from transformers import PreTrainedModel

from omnidraft.models.acceptance_head import AcceptanceHead
from omnidraft.models.branches import BranchingSession
from omnidraft.models.native.rows import NativeLlama, NativeRows


class LlamaDrafter:
    """Implements ports.DraftModel at one set of weights."""

    def __init__(
        self,
        model: PreTrainedModel,
        precision: str,
        folder: Path | None = None,
        *,
        head: AcceptanceHead | None = None,
    ) -> None:
        """See NativeLlama for arguments and errors."""
        self._model = NativeLlama(model, precision, folder)
        self._head = head
        self.vocab_size = self._model.vocab_size
        self.context_limit = self._model.context_limit
        self.has_head = head is not None

    def open(self) -> BranchingSession:
        """See ports.DraftModel."""
        return BranchingSession(NativeRows(self._model, keeps_hidden=self.has_head), self._head)
