"""A drafter whose passes run in native/kernels/, near the speed of reading its weights.

The drafter may compute in any precision, since it cannot change the text.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from omnidraft.errors import KernelsUnavailable
from omnidraft.models.acceptance_head import AcceptanceHead
from omnidraft.models.kv_session import KvDrafter
from omnidraft.models.native import library as native
from omnidraft.models.native.model import NativeModel
from omnidraft.models.native.packed_cache import PackedCache
from omnidraft.models.native.packed_model import PackedModel
from omnidraft.ports import RankedTokens
from omnidraft.vocab.alignment import Alignment

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AUTOMATIC, AUTOMATIC_LEARNED = "int4", "int8"
"""The precisions that `auto` chooses on our kernels, for a base drafter and for one that learned. In 4 bits the first
loses hardly any agreement, and the second most of what it learned, which takes few weights to another level."""


class NativeDrafter(KvDrafter):
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
        self._library = native.load(kernels)
        super().__init__(NativeModel(model, precision, self._library), head)
        self._ranking = native.RankingStruct()
        names = ("ids", "q", "targets", "firsts", "target_q")
        self._ranked = [np.ctypeslib.as_array(getattr(self._ranking, name)) for name in names]

    def rank(self, logits_D: np.ndarray, alignment: Alignment) -> RankedTokens:
        """Implement ports.RankTokens, for contiguous logits; the result is valid until the next call."""
        ranking, first_D = self._ranking, alignment.first_D
        logits, first = (each.__array_interface__["data"][0] for each in (logits_D, first_D))
        self._library.omnidraft_rank(logits, len(logits_D), first, len(first_D), alignment.num_target, ranking)
        ids, q, targets, firsts, target_q = self._ranked
        num, num_targets = ranking.num_ids, ranking.num_targets
        return RankedTokens(
            ranking.max_logit, ids[:num], q[:num], targets[:num_targets], firsts[:num_targets], target_q[:num_targets]
        )


def cached_drafter(folder: Path, precision: str, kernels: str, cache: PackedCache) -> NativeDrafter | None:
    """Return the base drafter of a model folder that is packed; None if it is not, or our kernels do not work here."""
    chosen = AUTOMATIC if precision == "auto" else precision
    weights = None if torch.cuda.is_available() else cache.find(folder, chosen)
    try:
        return None if weights is None else NativeDrafter(weights, chosen, kernels)
    except KernelsUnavailable:
        return None
