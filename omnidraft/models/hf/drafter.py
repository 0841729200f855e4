"""The serving drafter as a transformers model, and how drafters are loaded."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from omnidraft.errors import KernelsUnavailable, SnapshotCorrupt, model_errors
from omnidraft.models import precision as precisions
from omnidraft.models.acceptance_head import AcceptanceHead, split_tensors
from omnidraft.models.hf.serving_tensors import apply_serving_tensors
from omnidraft.models.hf.slot_model import SlotModel
from omnidraft.models.hf.target import load_model
from omnidraft.models.kv_session import KvDrafter
from omnidraft.models.native import library as native
from omnidraft.models.native.build import VARIANTS
from omnidraft.models.native.drafter import AUTOMATIC, AUTOMATIC_LEARNED, NativeDrafter
from omnidraft.models.native.packed_cache import PackedCache
from omnidraft.models.native.packed_model import PackedModel
from omnidraft.models.native.weights import unsupported_reason
from omnidraft.ports import DraftModel

logger = logging.getLogger(__name__)


class TorchDrafter(KvDrafter):
    """Implements ports.DraftModel at one set of weights."""

    def __init__(self, model: PreTrainedModel, head: AcceptanceHead | None = None) -> None:
        super().__init__(SlotModel(model), head)


def load_drafter(
    folder: Path,
    precision: str,
    tensors: dict[str, torch.Tensor] | None,
    train: Literal["full", "lora"],
    kernels: str = "auto",
    cache: PackedCache | None = None,
) -> DraftModel:
    """Load the base drafter, apply a snapshot's tensors (None: no change), and convert it to serving precision.

    Args:
        cache: keeps the packed weights of the unchanged drafter for the next start; see native.drafter.cached_drafter.
            None keeps nothing.

    Raises:
        ModelError: the folder holds no model, or the precision cannot be computed here.
        SnapshotCorrupt: the tensors do not fit the model.
    """
    automatic = AUTOMATIC if tensors is None else AUTOMATIC_LEARNED
    packed_as = automatic if precision == "auto" else precision
    state = cache.state(folder, packed_as) if cache else None
    model, head = load_learned(folder, tensors, train)
    if unsupported_reason(model) is None:
        try:
            packed: PreTrainedModel | PackedModel = model
            if cache is not None and tensors is None:
                packed = cache.packed(folder, state, model, packed_as, native.load(kernels))
            return NativeDrafter(packed, packed_as, kernels, head=head)
        except KernelsUnavailable as exc:
            if kernels in VARIANTS:
                raise
            logger.warning("drafting through transformers, which is slower: %s", exc)
    chosen = precisions.automatic(kernels) if precision == "auto" else precision
    with model_errors(f"the model in {folder} cannot be computed in {chosen}"):
        changed = precisions.apply(model, chosen, kernels)
        return TorchDrafter(changed, head)  # type: ignore[arg-type]


def load_learned(
    folder: Path, tensors: Mapping[str, torch.Tensor] | None, train: Literal["full", "lora"]
) -> tuple[PreTrainedModel, AcceptanceHead | None]:
    """Load the base drafter with a snapshot's tensors in it (None: no change), and the snapshot's head if it has one.

    Raises:
        ModelError: the folder holds no model.
        SnapshotCorrupt: the tensors do not fit the model.
    """
    model = load_model(folder)
    if tensors is None:
        return model, None
    if train == "lora":
        model.float()  # type: ignore[no-untyped-call]  # merged weights would be rounded
    weights, head = split_tensors(tensors)
    _require_fitting(head, model)
    apply_serving_tensors(model, weights, train=train)
    return model, head


def _require_fitting(head: AcceptanceHead | None, model: PreTrainedModel) -> None:
    hidden_size = model.config.get_text_config().hidden_size
    if head is not None and head.hidden_size != hidden_size:
        raise SnapshotCorrupt(f"the acceptance head reads {head.hidden_size} numbers, the drafter gives {hidden_size}")
