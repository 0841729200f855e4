"""A tree as rows of one width, each a path from the root to a leaf: what a pass of reproducible mode scores.

A node's keys must stand in sequence order if its bits are to be those of plain decoding, so every row has its own.
Shapes: B rows, S columns (the width), N nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from omnidraft.ports import DraftTree

_PADDING_ID = 0


@dataclass(frozen=True, slots=True)
class ChainLayout:
    """The rows of one pass; rows that the tree does not need hold its root."""

    ids_BS: tuple[tuple[int, ...], ...]
    positions_N: tuple[tuple[int, int], ...]
    """Row and column of each node; one that several rows share is read from the first."""

    def row_of(self, nodes: Sequence[int]) -> int:
        """The row that holds this path, root first."""
        return self.positions_N[nodes[-1]][0]

    def node_logits(self, logits_BSV: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] in node order; no copy when all stand in the first row."""
        rows_N, columns_N = zip(*self.positions_N, strict=True)
        if columns_N == tuple(range(len(columns_N))):
            return logits_BSV[0, : len(columns_N)]
        return logits_BSV[list(rows_N), list(columns_N)]


def lay_out(tree: DraftTree, *, rows: int, width: int) -> ChainLayout:
    """A row for each leaf, in node order. The tree has at most `rows` leaves and paths of at most `width` nodes."""
    ids_BS: list[tuple[int, ...]] = []
    places: dict[int, tuple[int, int]] = {}
    for row, leaf in enumerate(tree.leaves or (0,)):
        path = _path(tree, leaf)
        ids_BS.append(pad([tree.tokens[node] for node in path], width))
        for column, node in enumerate(path):
            places.setdefault(node, (row, column))
    spare = pad(tree.tokens[:1], width)
    ids_BS += [spare] * (rows - len(ids_BS))
    return ChainLayout(tuple(ids_BS), tuple(places[node] for node in range(len(tree))))


def pad(ids: Sequence[int], width: int) -> tuple[int, ...]:
    """As long as `width`; whatever stands behind a node changes no bit of it."""
    return (*ids, *[_PADDING_ID] * (width - len(ids)))


def _path(tree: DraftTree, node: int) -> list[int]:
    """The nodes from the root to this one."""
    path = [node]
    while path[-1]:
        path.append(tree.parents[path[-1]])
    return path[::-1]
