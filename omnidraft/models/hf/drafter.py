"""The serving drafter: a transformers model with the request's keys in slots, cut back to a common prefix."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from omnidraft.errors import KernelsUnavailable, SnapshotCorrupt, model_errors
from omnidraft.models import precision as precisions
from omnidraft.models.acceptance_head import AcceptanceHead, split_tensors
from omnidraft.models.hf import attention
from omnidraft.models.hf.attention import share_key_heads
from omnidraft.models.hf.kv_slots import KvSlots
from omnidraft.models.hf.packed_session import PackedPasses, TextRows
from omnidraft.models.hf.serving_tensors import apply_serving_tensors
from omnidraft.models.hf.target import load_model
from omnidraft.models.hf.tree_layout import chain_visibility, tree_visibility
from omnidraft.models.kv_session import BatchingDrafter, BranchingSession, ForwardRequest
from omnidraft.models.native import library as native
from omnidraft.models.native.build import VARIANTS
from omnidraft.models.native.drafter import AUTOMATIC, NativeDrafter
from omnidraft.models.native.packed_cache import PackedCache
from omnidraft.models.native.packed_model import PackedModel
from omnidraft.models.native.weights import unsupported_reason
from omnidraft.ports import DraftModel
from omnidraft.snapshots.low_rank import SCALE, A, B, factored_modules

logger = logging.getLogger(__name__)


TextFactors = Mapping[str, Tensor]
"""A snapshot's factors by name, in bfloat16."""


class RowFactors:
    """Adds factors to the linear layers of one model, a text's factors to the rows of that text only."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._texts: list[tuple[slice, TextFactors]] = []
        """The rows of the pass under way that have factors."""
        self._hooked: set[str] = set()

    def require_fitting(self, tensors: Mapping[str, Tensor]) -> TextFactors:
        """Return these factors for texts of the model. Raises SnapshotCorrupt when they do not fit it."""
        modules = dict(self._model.named_modules())
        shapes = {
            name: (module.out_features, module.in_features)
            for name, module in modules.items()
            if hasattr(module, "in_features")
        }
        for name in set(factored_modules(shapes, tensors)) - self._hooked:
            modules[name].register_forward_hook(partial(self._add, name))
            self._hooked.add(name)
        device = next(self._model.parameters()).device
        return {name: tensor.to(device, torch.bfloat16) for name, tensor in tensors.items()}

    @contextmanager
    def added(self, texts: Sequence[tuple[int, TextFactors | None]]) -> Iterator[None]:
        """Add these factors inside the `with` block, each to so many rows of a pass, which are in this order."""
        start = 0
        for num_rows, factors in texts:
            if factors is not None:
                self._texts.append((slice(start, start + num_rows), factors))
            start += num_rows
        try:
            yield
        finally:
            self._texts = []

    def _add(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        own = [(rows, factors) for rows, factors in self._texts if name + A in factors]
        if not own:
            return None
        x_RK, changed = inputs[0].flatten(0, -2), output.clone()
        changed_RN = changed.view(-1, changed.shape[-1])
        for rows, factors in own:
            reduced = x_RK[rows].float() @ factors[name + A].float().T
            changed_RN[rows] += (SCALE * (reduced @ factors[name + B].float().T)).to(output.dtype)
        return changed


_CAPACITY_STEP = 512


class TorchDrafter(BatchingDrafter):
    """Implements ports.DraftModel at one set of weights."""

    def __init__(self, model: PreTrainedModel, head: AcceptanceHead | None = None) -> None:
        self._model = model.eval()
        share_key_heads(model)
        self._head = head
        self.has_head = head is not None
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.context_limit = attention.first_context(config)
        self.num_layers: int = config.num_hidden_layers
        self._attention = attention.AttentionMasks(model)
        self._passes = PackedPasses(model, self._attention)
        self._row_factors = RowFactors(model)

    def open(self) -> "TorchSession":
        """See ports.DraftModel."""
        return TorchSession(_TorchKvBackend(self), self._head)

    def with_factors(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], "TorchSession"]:
        """See kv_session.BatchingDrafter."""
        factors = self._row_factors.require_fitting(tensors)
        return lambda: TorchSession(_TorchKvBackend(self, factors), self._head)

    def forward(self, batch: Sequence[tuple["_TorchKvBackend", ForwardRequest]]) -> list[torch.Tensor]:
        """See kv_session.BatchingDrafter."""
        rows = [backend.rows(request) for backend, request in batch]
        with self._row_factors.added([(len(request.ids), backend.factors) for backend, request in batch]):
            outputs = self._passes.forward(rows, has_hidden=self.has_head)
        for (backend, _), output in zip(batch, outputs, strict=True):
            if output.hidden_RH is not None:
                backend.hidden_RH = output.hidden_RH
        return [output.logits_RV for output in outputs]

    def masks(self, positions_S: torch.Tensor, sees_SC: torch.Tensor, start: int, rows: int) -> attention.Masks:
        """Return the masks of the last `rows` of these S rows, which are in the slots from `start` on."""
        masks = self._attention.masks(sees_SC.to(self._model.device), positions_S.to(self._model.device), start)
        if isinstance(masks, torch.Tensor):
            return masks[:, :, -rows:]
        return {kind: mask[:, :, -rows:] for kind, mask in masks.items()}


class TorchSession(BranchingSession):
    """Implements ports.DraftSession."""

    backend: "_TorchKvBackend"


class _TorchKvBackend:
    """Implements kv_session.KvBackend."""

    def __init__(self, drafter: TorchDrafter, factors: TextFactors | None = None) -> None:
        """`factors`: this text's own; None computes with the shared weights alone."""
        self._drafter = drafter
        self.factors = factors
        self._slots = KvSlots(drafter.num_layers, _CAPACITY_STEP)
        self.hidden_RH = torch.empty(0, dtype=torch.float32)

    def compute(self, request: ForwardRequest) -> torch.Tensor:
        return self._drafter.forward([(self, request)])[0]

    def rows(self, request: ForwardRequest) -> TextRows:
        """Return the rows of this request, with slots allocated for them."""
        start, ids = request.length, request.ids
        if request.parents is None:
            return self._rows(start, ids, *chain_visibility(start, len(ids), start + len(ids)), 1)
        root_and_branches = [0, *(parent + 1 for parent in request.parents)]
        return self._rows(start - 1, ids, *tree_visibility(root_and_branches, start - 1), len(ids))

    def move(self, sources: Sequence[int], start: int) -> None:
        self._slots.gather(sources, start)

    def _rows(
        self, start: int, ids: Sequence[int], positions_S: torch.Tensor, sees_SC: torch.Tensor, num_logits: int
    ) -> TextRows:
        """Return the rows of `ids`, the last of the S rows that begin at slot `start`."""
        end, num_rows = start + len(positions_S), len(ids)
        if end > self._slots.capacity:
            self._slots = self._slots.enlarged(-(-end // _CAPACITY_STEP) * _CAPACITY_STEP)
        masks = self._drafter.masks(positions_S, sees_SC, start, num_rows)
        return TextRows(self._slots, end - num_rows, ids, positions_S[-num_rows:], masks, num_logits)


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
    packed_as = AUTOMATIC if precision == "auto" else precision
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
