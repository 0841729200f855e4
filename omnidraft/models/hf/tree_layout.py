"""Lay a tree out for a pass: as one row whose ids see their ancestors, or, in reproducible mode, as rows of one width,
each a path from the root to a leaf.

There a node's keys must be in sequence order for its bits to equal those of plain decoding, so every row has its own
keys.
Shapes: B rows, S columns (ids of a row), N nodes, C slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from omnidraft.ports import DraftTree

_PADDING_ID = 0


@dataclass(frozen=True, slots=True)
class ChainLayout:
    """The rows of one pass; unused rows hold the root."""

    ids_BS: tuple[tuple[int, ...], ...]
    positions_N: tuple[tuple[int, int], ...]
    """Row and column of each node; a node that several rows share is read from the first."""

    def row_of(self, nodes: Sequence[int]) -> int:
        """Return the row that holds this path, root first."""
        return self.positions_N[nodes[-1]][0]

    def node_logits(self, logits_BSV: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] in node order, without a copy when all nodes are in the first row."""
        rows_N, columns_N = zip(*self.positions_N, strict=True)
        if columns_N == tuple(range(len(columns_N))):
            return logits_BSV[0, : len(columns_N)]
        return logits_BSV[list(rows_N), list(columns_N)]


def lay_out(tree: DraftTree, *, rows: int, width: int) -> ChainLayout:
    """Make a row for each leaf, in node order. A tree has at most `rows` leaves and paths of at most `width` nodes."""
    ids_BS: list[tuple[int, ...]] = []
    positions: dict[int, tuple[int, int]] = {}
    for row, leaf in enumerate(tree.leaves or (0,)):
        path = _path(tree, leaf)
        ids_BS.append(pad([tree.tokens[node] for node in path], width))
        for column, node in enumerate(path):
            positions.setdefault(node, (row, column))
    unused = pad(tree.tokens[:1], width)
    ids_BS += [unused] * (rows - len(ids_BS))
    return ChainLayout(tuple(ids_BS), tuple(positions[node] for node in range(len(tree))))


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


def _path(tree: DraftTree, node: int) -> list[int]:
    """Return the nodes from the root to this one."""
    path = [node]
    while path[-1]:
        path.append(tree.parents[path[-1]])
    return path[::-1]
