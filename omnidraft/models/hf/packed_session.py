"""One text of the transformers target in fast mode: passes are as wide as its trees, and several texts share them.

Shapes: N nodes of a tree, V vocabulary.

In a pass the rows of several texts stand in one line, so that every matrix is read once; attention alone takes the
texts one by one, on an accelerator in groups.
Shapes: R rows of a text, C slots that they read, H hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from omnidraft.errors import ContractError
from omnidraft.models.hf.attention import AttentionMasks, Masks, PackedKeys
from omnidraft.models.hf.kv_slots import KvSlots
from omnidraft.models.hf.padded_session import TextGroup, text_groups
from omnidraft.models.hf.tree_layout import chain_visibility, tree_visibility
from omnidraft.ports import DraftTree, TreeLimits


@dataclass(frozen=True, slots=True)
class TextRows:
    """The rows of one text in a pass."""

    slots: KvSlots
    start: int
    """The slot of the first row; the rows read all slots up to their last."""
    ids: Sequence[int]
    positions_R: torch.Tensor
    masks: Masks
    """[1, 1, R, C] for each kind of layer."""
    num_logits: int
    """Number of last rows whose logits are computed."""


@dataclass(frozen=True, slots=True)
class TextOutput:
    """The output of a pass for one text."""

    logits_RV: torch.Tensor
    """float32, of the rows that have logits."""
    hidden_RH: torch.Tensor | None
    """float32, the normed last hidden states of the same rows; None unless they were asked for."""


@torch.inference_mode()
def forward_packed(model: PreTrainedModel, texts: Sequence[TextRows], *, has_hidden: bool = False) -> list[TextOutput]:
    """Compute one pass over the rows of these different texts, at least one; the attention takes PackedKeys."""
    for text in texts:
        text.slots.set_range(text.start, text.start + len(text.ids))
    ends = accumulate(len(text.ids) for text in texts)
    wanted = [row for text, end in zip(texts, ends, strict=True) for row in range(end - text.num_logits, end)]
    device = model.device
    output = model(
        input_ids=torch.tensor([list(chain.from_iterable(text.ids for text in texts))], device=device),
        position_ids=torch.cat([text.positions_R + text.slots.rotation_offset for text in texts])[None].to(device),
        attention_mask=_joined([text.masks for text in texts]),
        past_key_values=texts[0].slots if len(texts) == 1 else _PackedSlots(texts),
        use_cache=True,
        logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=device),
        output_hidden_states=has_hidden,
    )
    sizes = [text.num_logits for text in texts]
    hidden = output.hidden_states[-1][0, wanted].float().split(sizes) if has_hidden else [None] * len(texts)
    return [TextOutput(*each) for each in zip(output.logits[0].float().split(sizes), hidden, strict=True)]


def _joined(masks: Sequence[Masks]) -> Masks:
    """Return one mask over all rows for each kind of layer; columns are padded to the longest text."""
    first = masks[0]
    if isinstance(first, Mapping):
        return {kind: _stacked([each[kind] for each in masks]) for kind in first}  # type: ignore[index]
    return _stacked(masks)  # type: ignore[arg-type]


def _stacked(masks: Sequence[torch.Tensor]) -> torch.Tensor:
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

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: every text's layer initializes itself."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
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

    def __init__(self, texts: Sequence[TextRows]) -> None:
        ends = list(accumulate(len(text.ids) for text in texts))
        rows = [slice(end - len(text.ids), end) for text, end in zip(texts, ends, strict=True)]
        num_slots = [text.start + len(text.ids) for text in texts]
        groups = cache(lambda: text_groups(rows, num_slots, texts[0].positions_R.device))
        layers = zip(*(text.slots.layers for text in texts), strict=True)
        super().__init__(layers=[_PackedLayer(each, rows, groups) for each in layers])


class PackedPasses:
    """The passes of a model over several texts: one after the other where its attention computes with keys or values
    before it reads them, as that of DeepSeek does."""

    def __init__(self, model: PreTrainedModel, attention: AttentionMasks) -> None:
        self._model = model
        num_layers = model.config.get_text_config().num_hidden_layers
        positions_R, sees_RC = (each.to(model.device) for each in chain_visibility(0, 1, 1))
        masks = attention.masks(sees_RC, positions_R, 0)
        tried = [TextRows(KvSlots(num_layers, 1), 0, [0], positions_R, masks, num_logits=1) for _ in range(2)]
        self._are_shared = True
        try:
            self.forward(tried)
        except ContractError:
            self._are_shared = False
            self.forward(tried)
        self.bytes_of_slot = tried[0].slots.num_bytes
        """The memory of the keys and values of one id, which no configuration tells for every model."""

    def forward(self, texts: Sequence[TextRows], *, has_hidden: bool = False) -> list[TextOutput]:
        """Compute the rows of these different texts."""
        passes = [texts] if self._are_shared and texts else [[text] for text in texts]
        return [output for each in passes for output in forward_packed(self._model, each, has_hidden=has_hidden)]


class PackedSession:
    """Implements ports.TargetSession."""

    def __init__(
        self,
        model: PreTrainedModel,
        attention: AttentionMasks,
        limits: TreeLimits,
        slots: KvSlots,
        prompt_ids: Sequence[int],
        *,
        capacity_step: int,
    ) -> None:
        """More slots come with the text, in steps of `capacity_step`, since memory is counted by ids that are there."""
        self._model = model
        self._attention = attention
        self._limits = limits
        self.slots = slots
        self._prompt_ids = tuple(prompt_ids)
        self._capacity_step = capacity_step
        self.num_kept = 0

    @property
    def num_unread(self) -> int:
        return max(len(self._prompt_ids) - self.num_kept, 0)

    def prompt_rows(self, num_ids: int) -> TextRows:
        """Return the rows of so many unread prompt ids; the pass makes them kept."""
        start, ids = self.num_kept, self._prompt_ids[self.num_kept :][:num_ids]
        return self._rows(ids, *chain_visibility(start, len(ids), start + len(ids)), num_logits=0)

    def scored_rows(self, tree: DraftTree) -> TextRows:
        """Return the rows of a tree behind the kept ids."""
        if not tree.fits(self._limits):
            raise ContractError(f"a tree of {len(tree) - 1} drafted nodes does not fit {self._limits} (fast mode)")
        start = self.num_kept
        if tree.is_chain:
            positions_N, sees_NC = chain_visibility(start, len(tree), start + len(tree))
        else:
            positions_N, sees_NC = tree_visibility(tree.parents, start)
        return self._rows(tree.tokens, positions_N, sees_NC, num_logits=len(tree))

    def _rows(
        self, ids: Sequence[int], positions_R: torch.Tensor, sees_RC: torch.Tensor, *, num_logits: int
    ) -> TextRows:
        device, start = self._model.device, self.num_kept
        needed, step = start + len(ids), self._capacity_step
        if needed > self.slots.capacity:
            self.slots = self.slots.enlarged(-(-needed // step) * step)
        positions_R = positions_R.to(device)
        masks = self._attention.masks(sees_RC.to(device), positions_R, start)
        return TextRows(self.slots, start, ids, positions_R, masks, num_logits)

    def copy_keys(self, source_slots: KvSlots, num_ids: int) -> None:
        """Begin with the keys of so many ids of another text."""
        self.slots.copy(source_slots, num_ids)
        self.num_kept = num_ids

    def score(self, tree: DraftTree) -> torch.Tensor:
        if num_unread := self.num_unread:
            forward_packed(self._model, [self.prompt_rows(num_unread)])
            self.num_kept += num_unread
        return forward_packed(self._model, [self.scored_rows(tree)])[0].logits_RV

    def keep(self, nodes: Sequence[int]) -> None:
        self.slots.gather([self.num_kept + node for node in nodes], self.num_kept)
        self.num_kept += len(nodes)

    def close(self) -> None:
        self.slots = KvSlots(0, 0)
