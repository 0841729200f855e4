"""Texts of a pass grouped by their numbers of rows, so that an accelerator computes the attention of a group at once.

Every text of a group is padded to the rows of the longest, fewer than twice its own, and to the slots of the longest.
Padding repeats the first row and the first slot of its text, which is masked like any other, so that nothing is NaN.
Shapes: R rows of a pass, B texts of a group, S their padded rows, C their padded slots, H heads, D head size.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

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
