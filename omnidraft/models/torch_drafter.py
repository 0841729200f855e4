"""The drafter while it serves: a transformers model with the request's keys in slots, cut back to a common prefix."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from omnidraft.models import attention
from omnidraft.models import precision as precisions
from omnidraft.models.kv_slots import KvSlots
from omnidraft.models.llama_drafter import LlamaDrafter, is_supported
from omnidraft.models.trainable_drafter import apply_serving_tensors
from omnidraft.models.transformers_target import load_model
from omnidraft.ports import DraftModel

_CAPACITY_STEP = 512


class TorchDrafter:
    """Implements ports.DraftModel at one set of weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model.eval()
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.context_limit: int = config.max_position_embeddings
        self.num_layers: int = config.num_hidden_layers
        self._attention = attention.Attention(model)

    def open(self) -> "_Session":
        """See ports.DraftModel."""
        return _Session(self)

    @torch.inference_mode()
    def forward(self, slots: KvSlots, ids: Sequence[int], start: int) -> torch.Tensor:
        """Logits float32 [V] after the last id; the keys of `ids` go to the slots from `start` on."""
        end, device = start + len(ids), self._model.device
        positions_S, sees_SC = (each.to(device) for each in attention.chain(start, len(ids), end))
        slots.place(start, end)
        output = self._model(
            input_ids=torch.tensor([list(ids)], device=device),
            position_ids=positions_S[None],
            attention_mask=self._attention.masks(sees_SC, positions_S, start),
            past_key_values=slots,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[0, -1].float()


class _Session:
    """Implements ports.DraftSession."""

    def __init__(self, drafter: TorchDrafter) -> None:
        self._drafter = drafter
        self._slots = KvSlots(drafter.num_layers, _CAPACITY_STEP)

    def advance(self, keep: int, ids: Sequence[int]) -> torch.Tensor:
        needed = keep + len(ids)
        if needed > self._slots.capacity:
            self._slots = self._slots.grown(-(-needed // _CAPACITY_STEP) * _CAPACITY_STEP)
        return self._drafter.forward(self._slots, ids, keep)


def load_drafter(
    folder: Path, precision: str, tensors: dict[str, torch.Tensor] | None, train: Literal["full", "lora"]
) -> DraftModel:
    """The base drafter with a snapshot's tensors on top (None: as it is), then in serving precision.

    Raises:
        ModelError: the folder is no model. SnapshotCorrupt: the tensors do not fit it.
    """
    precision = precisions.automatic() if precision == "auto" else precision
    model = load_model(folder, "float32")
    if tensors is not None:
        apply_serving_tensors(model, tensors, train=train)
    if is_supported(model):
        return LlamaDrafter(model, precision)  # type: ignore[arg-type]
    return TorchDrafter(precisions.apply(model, precision))  # type: ignore[arg-type]
