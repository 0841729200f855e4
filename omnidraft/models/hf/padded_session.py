"""One text of the transformers target in reproducible mode: every pass has one shape, whatever is drafted.

Trees are chains. Slots come with the text. Bits depend on their number, which is that of an id's position: a chain
across such a border is computed in two passes.
Shapes: N nodes of a tree, S ids of a pass, C slots, V vocabulary.

Texts of a pass are grouped by their numbers of rows, so that an accelerator computes the attention of a group at once.
Every text of a group is padded to the rows of the longest, fewer than twice its own, and to the slots of the longest.
Padding repeats the first row and the first slot of its text, which is masked like any other, so that nothing is NaN.
Shapes there: R rows of a pass, B texts of a group, S their padded rows, C their padded slots, H heads, D head size.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omnidraft.models.hf.kv_slots import KvSlots
from omnidraft.models.hf.tree_layout import chain_visibility, pad
from omnidraft.models.text_session import ChunkedSession
from omnidraft.ports import DraftTree, TreeLimits

TextKeys = tuple[slice, torch.Tensor, torch.Tensor]
"""The rows of a text in the pass, and its keys and values [1, H, C, D] in all slots up to its last row."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Queries [B, H, S, D], keys and values [B, H, C, D], and mask [B, 1, S, C] -> [B, S, H, D]."""


@dataclass(frozen=True, slots=True)
class TextGroup:
    """Texts that are computed at once; all are indices."""

    texts: Sequence[int]
    rows_BS: torch.Tensor
    """Into the rows of the pass."""
    slots_BC: torch.Tensor
    """Into the slots of these texts, one text's behind the other's."""
    padded_N: torch.Tensor
    """The rows that are no padding, in B * S."""
    rows_N: torch.Tensor
    """The same in the rows of the pass."""


def text_groups(rows: Sequence[slice], num_slots: Sequence[int], device: torch.device) -> list[TextGroup]:
    """Return the groups of the texts with these rows and numbers of slots."""
    by_size: dict[int, list[int]] = defaultdict(list)
    for text, each in enumerate(rows):
        by_size[(each.stop - each.start - 1).bit_length()].append(text)
    return [_group(texts, rows, num_slots, device) for texts in by_size.values()]


def _group(texts: Sequence[int], rows: Sequence[slice], num_slots: Sequence[int], device: torch.device) -> TextGroup:
    counts, first_slots = [rows[text].stop - rows[text].start for text in texts], [0]
    for text in texts:
        first_slots.append(first_slots[-1] + num_slots[text])
    rows_BS = _padded([rows[text].start for text in texts], counts)
    slots_BC = _padded(first_slots[:-1], [num_slots[text] for text in texts])
    is_row_BS = torch.arange(rows_BS.shape[1]) < torch.tensor(counts)[:, None]
    padded_N = is_row_BS.flatten().nonzero().squeeze(1)
    return TextGroup(
        texts, rows_BS.to(device), slots_BC.to(device), padded_N.to(device), rows_BS.flatten()[padded_N].to(device)
    )


def _padded(starts: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    """Return `start`, `start + 1`, ... in each line, as many as `count` says, and then `start` again."""
    offsets = torch.arange(max(counts)).expand(len(counts), -1)
    offsets = torch.where(offsets < torch.tensor(counts)[:, None], offsets, 0)
    return torch.tensor(starts)[:, None] + offsets


def attend_in_groups(
    attend: Attend, query: torch.Tensor, mask: torch.Tensor, texts: Sequence[TextKeys], groups: Sequence[TextGroup]
) -> torch.Tensor:
    """Return the mixed values [1, R, H, D] of all texts' rows.

    Args:
        query: [1, H, R, D].
        mask: [1, 1, R, C], C of each row counted from the first slot of its own text.
    """
    mixed = query.new_empty(1, query.shape[2], query.shape[1], texts[0][2].shape[-1])
    for group in groups:
        _, keys, values = zip(*(texts[text] for text in group.texts), strict=True)
        keys_BHCD, values_BHCD = (
            torch.cat(each, dim=2)[0, :, group.slots_BC].transpose(0, 1) for each in (keys, values)
        )
        mask_BSC = mask[0, 0, group.rows_BS][:, :, : group.slots_BC.shape[1]]
        output = attend(query[0, :, group.rows_BS].transpose(0, 1), keys_BHCD, values_BHCD, mask_BSC[:, None])
        mixed[0, group.rows_N] = output.flatten(0, 1)[group.padded_N]
    return mixed


Compute = Callable[[KvSlots, Sequence[int], torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Slots, ids [S], positions [S], visible slots [S, C] and the number of logits -> logits [num_logits, V]."""


@dataclass(frozen=True)
class PassShape:
    """The shape of all passes of a target in reproducible mode; texts depend on it."""

    width: int = 6
    """Ids of a pass over a tree, which is a chain: one emitted token and `width - 1` drafted ones."""
    prefill_rows: int = 48
    """Ids of a padded pass over a prompt."""
    capacity_step: int = 256
    """KV capacities begin with a multiple of this and double with the text; higher means fewer self-tests and more
    masked computation."""


class PaddedSession(ChunkedSession):
    """Implements ports.TargetSession."""

    def __init__(
        self,
        compute: Compute,
        shape: PassShape,
        backend: KvSlots,
        prompt_ids: Sequence[int],
        limits: TreeLimits,
        require: Callable[[int], None],
    ) -> None:
        """Begin with these slots. `require` raises where bits would depend on drafts with so many."""
        super().__init__(prompt_ids, limits)
        self._chunk = shape.prefill_rows
        self._compute = compute
        self._shape = shape
        self.backend = backend
        self._later: KvSlots | None = None
        """The slots of a tree that reaches into the next capacity."""
        self._require = require

    def _read(self, ids: Sequence[int]) -> None:
        self._grow(self._num_read)
        self._pass(self.backend, self._num_read, pad(ids, self._chunk), num_logits=0)

    def _take(self, source: Any, num_ids: int) -> int:
        if source.backend.rotation_offset != self.backend.rotation_offset:
            return 0
        self._grow(num_ids)
        self.backend.copy(source.backend, num_ids)
        return num_ids

    def _score(self, tree: DraftTree) -> torch.Tensor:
        width, start = self._shape.width, self.num_kept
        self._grow(start)
        # all logits are computed, because the head's matrix product has one width too
        logits_SV = self._pass(self.backend, start, pad(tree.tokens, width), num_logits=width)
        num_here = self._end - start
        self._later = None
        if len(tree) > num_here:
            self._later = self._enlarged()
            later_SV = self._pass(self._later, self._end, pad(tree.tokens[num_here:], width), num_logits=width)
            logits_SV = torch.cat([logits_SV[:num_here], later_SV])
        return logits_SV[: len(tree)].float()

    def keep(self, nodes: Sequence[int]) -> None:
        if self._later is not None and self.num_kept + len(nodes) > self._end:
            self.backend = self._later
        self._later = None
        self.num_kept += len(nodes)

    @property
    def _end(self) -> int:
        """The position from which on a pass does not fit into the slots."""
        return self.backend.capacity - max(self._shape.width, self._shape.prefill_rows) + 1

    def _grow(self, start: int) -> None:
        """Take as many slots as ids at this position are computed with."""
        while start >= self._end:
            self.backend = self._enlarged()

    def _enlarged(self) -> KvSlots:
        self._require(2 * self.backend.capacity)
        return self.backend.enlarged(2 * self.backend.capacity)

    def close(self) -> None:
        self.backend = KvSlots(0, 0)

    def _pass(self, slots: KvSlots, start: int, ids_S: Sequence[int], *, num_logits: int) -> torch.Tensor:
        """Return the logits [num_logits, V] of ids that begin at slot `start`."""
        positions_S, sees_SC = chain_visibility(start, len(ids_S), slots.capacity)
        slots.set_range(start, slots.capacity)
        return self._compute(slots, ids_S, positions_S, sees_SC, num_logits)
