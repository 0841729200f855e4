"""Texts of fast mode in one llama.cpp context, so that a pass computes the rows of all of them together.

Every text has a block of sequences: the first for its kept ids, one for each further leaf of its tree. A pass reads all
cells, those of other texts too, so the context holds as many as the running texts need: what is not in the pass is
saved elsewhere, least recently used first, when it is in the way. A prefix is shared, not copied.
Shapes: N nodes of a tree, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from omnidraft.errors import ContractError
from omnidraft.models.llamacpp.context import MAX_SEQUENCES, BatchEntry, Context
from omnidraft.models.text_session import TextSession
from omnidraft.ports import DraftTree, TreeLimits

_CELL_STEP = 2048
"""The number of cells grows in steps of this, since all texts move into the larger context."""


class SharedContext:
    """The context of several texts. One pass at a time."""

    def __init__(self, open_context: Callable[[int, int], Context], max_texts: int) -> None:
        """
        Args:
            open_context: (number of cells, number of sequences) -> a context.
            max_texts: the number of texts of one pass, at most MAX_SEQUENCES.
        """
        self._open_context = open_context
        num_blocks = max(max_texts, 2)  # a prefix is shared while both texts are in the context
        self.num_leaves = MAX_SEQUENCES // num_blocks
        self._context: Context | None = None
        self._free_blocks = [number * self.num_leaves for number in range(num_blocks)]
        self._blocks: dict[SharedSession, int] = {}
        """The first sequence of each text in the context, least recently used first."""

    @property
    def context(self) -> Context:
        assert self._context is not None
        return self._context

    def compute(self, rows: Sequence[tuple["SharedSession", Sequence[int], DraftTree | None]]) -> list[torch.Tensor]:
        """Compute the rows of these texts; return the logits of each."""
        sessions = [session for session, *_ in rows]
        self.admit(sessions, sum(each.num_cells for each in sessions))
        entries = [session.entries(ids, tree) for session, ids, tree in rows]
        logits_NV = self.context.decode([entry for each in entries for entry in each])
        return list(logits_NV.split([sum(entry.has_logits for entry in each) for each in entries]))

    def admit(self, sessions: Sequence["SharedSession"], num_needed: int) -> None:
        """Put these texts into the context, where they need so many cells, and save others that are in the way."""
        if self._context is None or num_needed > self._context.num_cells:
            self._enlarge(num_needed)
        absent = [each for each in sessions if each not in self._blocks]
        idle = [each for each in self._blocks if each not in sessions]
        num_free_cells = self.context.num_cells - num_needed
        while idle and (len(self._free_blocks) < len(absent) or sum(each.num_kept for each in idle) > num_free_cells):
            idle.pop(0).leave()
        if len(self._free_blocks) < len(absent):
            raise ContractError(f"a pass over {len(sessions)} texts; {MAX_SEQUENCES // self.num_leaves} fit")
        for session in sessions:
            if session in self._blocks:
                self._blocks[session] = self._blocks.pop(session)
        for session in absent:
            session.enter(self._free_blocks[-1])
            self._blocks[session] = self._free_blocks.pop()

    def remove(self, session: "SharedSession") -> None:
        """Free the cells and the sequences of a text."""
        first = self._blocks.pop(session)
        for sequence in range(first, first + self.num_leaves):
            self.context.cut(sequence, 0)
        self._free_blocks.append(first)

    def _enlarge(self, num_cells: int) -> None:
        """Go on in a larger context, which all texts enter anew."""
        for session in list(self._blocks):
            session.leave()
        if self._context is not None:
            self._context.close()
            self._context = None
        self._context = self._open_context(-(-num_cells // _CELL_STEP) * _CELL_STEP, MAX_SEQUENCES)


class SharedSession(TextSession):
    """Implements ports.TargetSession. Its cells are in the shared context, or saved."""

    def __init__(self, shared: SharedContext, prompt_ids: Sequence[int], limits: TreeLimits) -> None:
        super().__init__(prompt_ids, limits)
        self._shared = shared
        self.compute = shared.compute
        self.first: int = -1
        """The first of its sequences; -1 while it is not in the context."""
        self._saved: np.ndarray | None = None
        self._tree = DraftTree.empty(0)
        """The last scored tree."""
        self._sequences: list[tuple[int, ...]] = []
        """Sequences of its nodes, until some are kept."""

    @property
    def num_cells(self) -> int:
        """The most cells that the next pass needs for this text."""
        return max(len(self._prompt_ids), self.num_kept) + 1 + self.limits.num_nodes

    def enter(self, first: int) -> None:
        """Take the sequences from `first` on, with the cells that were saved; none if these cannot be loaded."""
        if self._saved is not None:
            self._shared.context.load(first, self._saved)
            self._saved = None
        self.first = first

    def leave(self) -> None:
        """Save the cells of the kept ids and give the sequences back."""
        self._drop_tree()
        self._saved = self._shared.context.save(self.first) if self.num_kept else None
        self._release()

    def prompt_rows(self, num_ids: int) -> tuple["SharedSession", Sequence[int], None]:
        return self, self._prompt_ids[self.num_kept :][:num_ids], None

    def tree_rows(self, tree: DraftTree) -> tuple["SharedSession", Sequence[int], DraftTree]:
        return self, tree.tokens, tree

    def entries(self, ids: Sequence[int], tree: DraftTree | None) -> list[BatchEntry]:
        """Return the entries of ids of the prompt, or of a tree, behind the kept ids."""
        self._drop_tree()
        if tree is None:
            return self._unscored(ids)
        self._tree = tree
        self._sequences = [tuple(self.first + leaf for leaf in leaves) for leaves in sequences(tree)]
        for other in self._sequences[0][1:]:
            self._shared.context.share(self.first, other)
        nodes = zip(ids, tree.depths, self._sequences, strict=True)
        return [BatchEntry(token, self.num_kept + depth, members) for token, depth, members in nodes]

    def _take(self, source: Any, num_ids: int) -> int:
        """Share the source's cells."""
        if not isinstance(source, SharedSession):
            return 0
        self._shared.admit([source, self], source.num_kept + self.num_cells)
        if not self._shared.context.is_whole(source.first):
            return 0
        self._shared.context.share(source.first, self.first, 0, num_ids)
        return num_ids

    def keep(self, nodes: Sequence[int]) -> None:
        if self._sequences:
            self._keep_cells(nodes)
        elif nodes:  # other texts needed the room of this one's tree
            self._shared.admit([self], self.num_cells)
            self._shared.context.decode(self._unscored([self._tree.tokens[node] for node in nodes]))
        self.num_kept += len(nodes)

    def _keep_cells(self, nodes: Sequence[int]) -> None:
        context, start = self._shared.context, self.num_kept
        chosen = self._sequences[nodes[-1]][0] if nodes else self.first
        context.cut(chosen, start + len(nodes))
        if chosen != self.first:
            context.cut(self.first, start)
            context.share(chosen, self.first, start)
        for leaf in self._sequences[0][1:]:
            context.cut(leaf, 0)
        self._sequences = []

    def close(self) -> None:
        self._saved = None
        if self.first >= 0:
            self._release()

    def _release(self) -> None:
        self._shared.remove(self)
        self.first, self._sequences = -1, []

    def _drop_tree(self) -> None:
        """Drop what a pass computed behind the kept ids, one that failed in its middle too."""
        if self._sequences:
            self._keep_cells(())
        self._shared.context.cut(self.first, self.num_kept)

    def _unscored(self, ids: Sequence[int]) -> list[BatchEntry]:
        """Return rows of ids that follow the kept ones."""
        return [BatchEntry(token, self.num_kept + row, (self.first,), False) for row, token in enumerate(ids)]


def sequences(tree: DraftTree) -> list[tuple[int, ...]]:
    """Return the sequences of each node; leaf number i ends sequence i."""
    members: list[list[int]] = [[] for _ in range(len(tree))]
    for sequence, leaf in enumerate(tree.leaves or (0,)):
        node = leaf
        while node:
            members[node].append(sequence)
            node = tree.parents[node]
        members[0].append(sequence)
    return [tuple(each) for each in members]
