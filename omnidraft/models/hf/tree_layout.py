"""What the rows of a pass see.

Shapes: S rows, C slots.
"""

from collections.abc import Sequence

import torch

_PADDING_ID = 0


def pad(ids: Sequence[int], width: int) -> tuple[int, ...]:
    """Pad the ids to `width`; ids behind a node change no bit of its logits."""
    return (*ids, *[_PADDING_ID] * (width - len(ids)))


def chain_visibility(start: int, rows: int, visible: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions [S] and visible slots [S, C] when each row continues the one before."""
    positions_S = torch.arange(start, start + rows)
    return positions_S, torch.arange(visible) <= positions_S[:, None]


def tree_visibility(parents: Sequence[int], start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same for a tree behind `start` ids, whose first nodes have a negative parent: a node sees these ids,
    its ancestors and itself."""
    rows = len(parents)
    depths = [0] * rows
    sees_SS = torch.eye(rows, dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            depths[row] = depths[parent] + 1
            sees_SS[row] |= sees_SS[parent]
    prefix = torch.ones(rows, start, dtype=torch.bool)
    return start + torch.tensor(depths), torch.cat([prefix, sees_SS], dim=1)
