"""The serving drafter: a transformers model with the request's keys in slots, cut back to a common prefix."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from omnidraft.errors import KernelsUnavailable, SnapshotCorrupt
from omnidraft.models import precision as precisions
from omnidraft.models.acceptance_head import AcceptanceHead, split_tensors
from omnidraft.models.hf import attention
from omnidraft.models.hf.kv_slots import KvSlots
from omnidraft.models.hf.target import load_model
from omnidraft.models.hf.trainable_drafter import apply_serving_tensors
from omnidraft.models.hf.tree_layout import chain_visibility, tree_visibility
from omnidraft.models.kv_session import BranchingSession, ForwardRequest
from omnidraft.models.native.build import VARIANTS
from omnidraft.models.native.drafter import LlamaDrafter
from omnidraft.models.native.weights import is_supported
from omnidraft.ports import DraftModel, DraftSession

_CAPACITY_STEP = 512

logger = logging.getLogger(__name__)


class TorchDrafter:
    """Implements ports.DraftModel at one set of weights."""

    def __init__(self, model: PreTrainedModel, head: AcceptanceHead | None = None) -> None:
        self._model = model.eval()
        self._head = head
        self.has_head = head is not None
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.context_limit: int = config.max_position_embeddings
        self.num_layers: int = config.num_hidden_layers
        self._attention = attention.AttentionMasks(model)

    def open(self) -> BranchingSession:
        """See ports.DraftModel."""
        return BranchingSession(_TorchKvBackend(self), self._head)

    def advance_all(self, requests: Sequence[tuple[DraftSession, int, Sequence[int]]]) -> list[torch.Tensor]:
        """See ports.DraftModel. Requests run one by one: a pass over several texts would need keys in one layout."""
        return [session.advance(keep, ids) for session, keep, ids in requests]

    def branch_all(self, requests: Sequence[tuple[DraftSession, Sequence[int], Sequence[int]]]) -> list[torch.Tensor]:
        """See ports.DraftModel."""
        return [session.branch(ids, parents) for session, ids, parents in requests]

    @torch.inference_mode()
    def forward(
        self,
        slots: KvSlots,
        ids: Sequence[int],
        positions_S: torch.Tensor,
        masks: attention.Masks,
        num_logits: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits float32 of the last rows, and their hidden states if there is a head that reads them.
        The range of `slots` is set; the rows are the last of `positions_S`."""
        device = self._model.device
        output = self._model(
            input_ids=torch.tensor([list(ids)], device=device),
            position_ids=positions_S[None, -len(ids) :],
            attention_mask=masks,
            past_key_values=slots,
            use_cache=True,
            logits_to_keep=num_logits,
            output_hidden_states=self.has_head,
        )
        hidden_RH = output.hidden_states[-1][0, -num_logits:].float() if self.has_head else None
        return output.logits[0, -num_logits:].float(), hidden_RH

    def masks(self, positions_S: torch.Tensor, sees_SC: torch.Tensor, start: int, rows: int) -> attention.Masks:
        """Return the masks of the last `rows` of these S rows, which are in the slots from `start` on."""
        masks = self._attention.masks(sees_SC, positions_S, start)
        if isinstance(masks, torch.Tensor):
            return masks[:, :, -rows:]
        return {kind: mask[:, :, -rows:] for kind, mask in masks.items()}

    @property
    def device(self) -> torch.device:
        return self._model.device


class _TorchKvBackend:
    """Implements kv_session.KvBackend."""

    def __init__(self, drafter: TorchDrafter) -> None:
        self._drafter = drafter
        self._slots = KvSlots(drafter.num_layers, _CAPACITY_STEP)
        self.hidden_RH = torch.empty(0)

    def compute(self, request: ForwardRequest) -> torch.Tensor:
        start, ids = request.length, request.ids
        if request.parents is None:
            positions_S, sees_SC = chain_visibility(start, len(ids), start + len(ids))
            return self._pass(start, ids, positions_S, sees_SC, 1)
        root_and_branches = [0, *(parent + 1 for parent in request.parents)]
        positions_S, sees_SC = tree_visibility(root_and_branches, start - 1)
        return self._pass(start - 1, ids, positions_S, sees_SC, len(ids))

    def move(self, sources: Sequence[int], start: int) -> None:
        self._slots.gather(sources, start)

    def _pass(
        self, start: int, ids: Sequence[int], positions_S: torch.Tensor, sees_SC: torch.Tensor, num_logits: int
    ) -> torch.Tensor:
        """Compute the rows of `ids`, the last of the S rows that begin at slot `start`."""
        end, device = start + len(positions_S), self._drafter.device
        if end > self._slots.capacity:
            self._slots = self._slots.enlarged(-(-end // _CAPACITY_STEP) * _CAPACITY_STEP)
        positions_S, sees_SC = positions_S.to(device), sees_SC.to(device)
        masks = self._drafter.masks(positions_S, sees_SC, start, len(ids))
        self._slots.set_range(end - len(ids), end)
        logits_RV, hidden_RH = self._drafter.forward(self._slots, ids, positions_S, masks, num_logits)
        if hidden_RH is not None:
            self.hidden_RH = hidden_RH
        return logits_RV


def load_drafter(
    folder: Path,
    precision: str,
    tensors: dict[str, torch.Tensor] | None,
    train: Literal["full", "lora"],
    kernels: str = "auto",
) -> DraftModel:
    """Load the base drafter, apply a snapshot's tensors (None: no change), and convert it to serving precision.

    Raises:
        ModelError: the folder holds no model, or the precision cannot be computed here.
        SnapshotCorrupt: the tensors do not fit the model.
    """
    model, head = load_model(folder), None
    if tensors is not None:
        if train == "lora":
            model.float()  # type: ignore[no-untyped-call]  # merged weights would be rounded
        weights, head = split_tensors(tensors)
        _require_fitting(head, model)
        apply_serving_tensors(model, weights, train=train)
    if is_supported(model):
        try:
            return LlamaDrafter(model, "int8" if precision == "auto" else precision, kernels, head=head)
        except KernelsUnavailable as exc:
            if kernels in VARIANTS:
                raise
            logger.warning("drafting through transformers, which is slower: %s", exc)
    chosen = precisions.automatic(kernels) if precision == "auto" else precision
    changed = precisions.apply(model, chosen, kernels)
    return TorchDrafter(changed, head)  # type: ignore[arg-type]


def _require_fitting(head: AcceptanceHead | None, model: PreTrainedModel) -> None:
    hidden_size = model.config.get_text_config().hidden_size
    if head is not None and head.hidden_size != hidden_size:
        raise SnapshotCorrupt(f"the acceptance head reads {head.hidden_size} numbers, the drafter gives {hidden_size}")
