"""One text of the transformers target in fast mode: passes are as wide as its trees, and several texts share them.

Shapes: N nodes of a tree, V vocabulary.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from omnidraft.errors import ContractError
from omnidraft.models.hf.attention import AttentionMasks
from omnidraft.models.hf.kv_slots import KvSlots
from omnidraft.models.hf.packed_pass import TextRows, forward_packed
from omnidraft.models.hf.tree_layout import chain_visibility, tree_visibility
from omnidraft.ports import DraftTree, TreeLimits


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
