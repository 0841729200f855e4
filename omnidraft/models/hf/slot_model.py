"""A transformers model that computes the rows of several texts in one pass; see kv_session.py.

The rows stand in one line, so that every matrix is read once; attention alone takes the texts one by one, on an
accelerator in groups.
Shapes: R rows of a text, C slots that they read, H hidden size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from omnidraft.errors import ContractError
from omnidraft.models.hf.attention import (
    AttentionMasks,
    Masks,
    PackedKeys,
    context_limit,
    first_context,
    share_key_heads,
    tell_long_texts_apart,
)
from omnidraft.models.hf.kv_slots import KvSlots
from omnidraft.models.hf.padded_session import TextGroup, text_groups
from omnidraft.models.hf.tree_layout import chain_visibility, tree_visibility
from omnidraft.models.kv_session import PassSegment
from omnidraft.snapshots.low_rank import SCALE, A, B, factored_modules

_CAPACITY_STEP = 256
"""Slots are allocated in multiples of it."""


class SlotModel:
    """Implements kv_session.KvModel: passes over one text after the other where attention computes with keys or values
    before it reads them, as that of DeepSeek does."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ModelError where its layers take no masks of trees and texts."""
        self.model = model.eval()
        share_key_heads(model)
        tell_long_texts_apart(model)
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.first_context, self.context_limit = first_context(config), context_limit(config)
        self.num_layers: int = config.num_hidden_layers
        self.attention = AttentionMasks(model)
        self._row_factors = RowFactors(model)
        self._are_shared = True
        tried = [PassSegment(KvSlots(self.num_layers, 1), 0, None, [0], 1) for _ in range(2)]
        try:
            self.forward(tried)
        except ContractError:
            self._are_shared = False
            self.forward(tried)
        self.bytes_of_slot: int = tried[0].backend.num_bytes
        """The memory of the keys and values of one id, which no configuration tells for every model."""

    def open(self, capacity: int = 0, **options: Any) -> KvSlots:
        """See kv_session.KvModel."""
        return KvSlots(self.num_layers, _rounded(capacity), **options)

    def kv_bytes(self, num_ids: int) -> int:
        """Return the memory of the keys and values of a text of so many ids."""
        return _rounded(num_ids) * self.bytes_of_slot

    def pack_factors(self, tensors: Mapping[str, Tensor]) -> "TextFactors":
        """See kv_session.KvModel."""
        return self._row_factors.require_fitting(tensors)

    def forward(self, segments: Sequence[PassSegment]) -> list[Tensor]:
        """See kv_session.KvModel."""
        passes = [segments] if self._are_shared and segments else [[each] for each in segments]
        return [logits_RV for each in passes for logits_RV in self._pass(each)]

    def forward_arrays(self, segments: Sequence[PassSegment]) -> list[np.ndarray]:
        """See kv_session.KvModel."""
        return [logits_RV.numpy(force=True) for logits_RV in self.forward(segments)]

    @torch.inference_mode()
    def _pass(self, segments: Sequence[PassSegment]) -> Sequence[Tensor]:
        slots: list[KvSlots] = [segment.backend for segment in segments]
        positions, masks = zip(*(self._placed(segment) for segment in segments), strict=True)
        sizes, has_hidden = [each.num_logits for each in segments], any(each.keeps_hidden for each in slots)
        ends = list(accumulate(len(each.ids) for each in segments))
        wanted = [row for end, size in zip(ends, sizes, strict=True) for row in range(end - size, end)]
        rows = [slice(end - len(each.ids), end) for end, each in zip(ends, segments, strict=True)]
        device = self.model.device
        with self._row_factors.added([(place, each.factors) for place, each in zip(rows, slots, strict=True)]):
            output = self.model(
                input_ids=torch.tensor([list(chain.from_iterable(each.ids for each in segments))], device=device),
                position_ids=torch.cat(positions)[None],
                attention_mask=_joined(masks),
                past_key_values=slots[0] if len(slots) == 1 else _PackedSlots(slots, rows, device),
                use_cache=True,
                logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=device),
                output_hidden_states=has_hidden,
            )
        if has_hidden:
            hidden = output.hidden_states[-1][0, wanted].float().split(sizes)
            for each, hidden_RH in zip(slots, hidden, strict=True):
                each.hidden_RH = hidden_RH
        logits: Sequence[Tensor] = output.logits[0].float().split(sizes)
        return logits

    def _placed(self, segment: PassSegment) -> tuple[Tensor, Masks]:
        """Return rotary positions [R] and masks [1, 1, R, C] of the rows, and let the pass write into their slots."""
        slots, end, num_rows = segment.backend, segment.end, len(segment.ids)
        if end > slots.capacity:
            slots.grow(_rounded(end))
        slots.set_range(end - num_rows, end)
        positions_S, sees_SC = (
            each.to(self.model.device)
            for each in (
                chain_visibility(segment.length, num_rows, end)
                if segment.parents is None
                else tree_visibility(segment.parents, segment.length)
            )
        )
        positions_R = positions_S[-num_rows:] + slots.rotation_offset
        return positions_R, self.attention.masks(sees_SC, positions_S, segment.length, num_rows)


def _rounded(num_slots: int) -> int:
    return -(-num_slots // _CAPACITY_STEP) * _CAPACITY_STEP


def _joined(masks: Sequence[Masks]) -> Masks:
    """Return one mask over all rows for each kind of layer; columns are padded to the longest text."""
    first = masks[0]
    if isinstance(first, Mapping):
        return {kind: _stacked([each[kind] for each in masks]) for kind in first}  # type: ignore[index]
    return _stacked(masks)  # type: ignore[arg-type]


def _stacked(masks: Sequence[Tensor]) -> Tensor:
    longest = max(mask.shape[-1] for mask in masks)
    return torch.cat([pad(mask, (0, longest - mask.shape[-1])) for mask in masks], dim=2)


class _PackedLayer(CacheLayerMixin):
    """One layer's slots of all texts of a pass."""

    is_sliding = False

    def __init__(
        self, layers: Sequence[CacheLayerMixin], rows: Sequence[slice], groups: Callable[[], Sequence[TextGroup]]
    ) -> None:
        super().__init__()
        self._layers = layers
        self._rows = rows
        self._groups = groups

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: every text's layer initializes itself."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        packed: PackedKeys = key_states.as_subclass(PackedKeys)
        packed.texts = [
            (rows, *layer.update(key_states[:, :, rows], value_states[:, :, rows]))
            for layer, rows in zip(self._layers, self._rows, strict=True)
        ]
        packed.groups = self._groups
        return packed, value_states.as_subclass(PackedKeys)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return max(layer.get_mask_sizes(query_length)[0] for layer in self._layers), 0

    def get_seq_length(self) -> int:
        return max(layer.get_seq_length() for layer in self._layers)

    def get_max_length(self) -> int:
        return max(layer.get_max_length() for layer in self._layers)


class _PackedSlots(Cache):
    """The slots of all texts of a pass."""

    def __init__(self, texts: Sequence[KvSlots], rows: Sequence[slice], device: torch.device) -> None:
        groups = cache(lambda: text_groups(rows, [text.visible for text in texts], device))
        layers = zip(*(text.layers for text in texts), strict=True)
        super().__init__(layers=[_PackedLayer(each, rows, groups) for each in layers])


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
    def added(self, texts: Sequence[tuple[slice, TextFactors | None]]) -> Iterator[None]:
        """Add these factors inside the `with` block, each to these rows of a pass."""
        self._texts = [(rows, factors) for rows, factors in texts if factors is not None]
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
