"""One text in reproducible mode: a llama.cpp context of its own, and passes of one number of rows.

llama.cpp's matrix kernels compute four rows differently than one, so every pass has the same number of rows, a multiple
of four, and prompts are read in chunks of one size from position 0.
Shapes: N nodes of a chain, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch

from omnidraft.errors import ContractError
from omnidraft.models.llamacpp.context import BatchEntry, Context
from omnidraft.ports import DraftTree, TreeLimits

PREFILL_ROWS = 128
"""Prompt ids that are read together."""


class PaddedLlamaCppSession:
    """Implements ports.TargetSession. Trees are chains."""

    def __init__(
        self, open_context: Callable[[int], Context], limits: TreeLimits, prompt_ids: Sequence[int], num_rows: int
    ) -> None:
        """
        Args:
            open_context: returns a context for a text of so many ids and the rows of a pass; more come with the text.
            num_rows: the rows of every pass over a tree.
        """
        self._open_context = open_context
        self._context = open_context(len(prompt_ids) + 1)
        self._limits = limits
        self._num_rows = num_rows
        self._prompt_ids = tuple(prompt_ids)
        self._num_prefilled = 0
        """The end of the last whole chunk, which is computed as soon as its first id is read."""
        self.num_kept = 0

    @property
    def num_unread(self) -> int:
        return max(len(self._prompt_ids) - self.num_kept, 0)

    def read(self, num_ids: int) -> None:
        """Count so many unread prompt ids as kept; compute the chunks that hold them."""
        end = self.num_kept + num_ids
        while self._num_prefilled < end:
            start = self._num_prefilled
            chunk = self._prompt_ids[start : start + PREFILL_ROWS]
            self._context.decode([BatchEntry(token, start + row, (0,), False) for row, token in enumerate(chunk)])
            self._num_prefilled += len(chunk)
        self.num_kept = end  # an error leaves them unread

    def copy_keys(self, source: "PaddedLlamaCppSession", num_ids: int) -> int:
        """Begin with the whole chunks that the source has read of these first ids; return the number of ids."""
        num_same = min(num_ids, source._num_prefilled, self.num_unread) // PREFILL_ROWS * PREFILL_ROWS
        is_small_enough = source._context.length(0) <= self._context.num_cells  # it is copied whole, then cut
        if num_same and is_small_enough and source._context.is_whole(0):
            self._context.load(0, source._context.save(0))
            self.rewind(num_same)
            self._num_prefilled = num_same
        return self.num_kept

    def extend(self, token: int) -> torch.Tensor:
        """Score one id by itself, keep it and return its logits [V]."""
        logits_NV = self.score(DraftTree.empty(token))
        self.keep((0,))
        return logits_NV[0]

    def rewind(self, num_kept: int) -> None:
        """Go back to the first `num_kept` ids."""
        self._context.cut(0, num_kept)
        self.num_kept = num_kept

    def score(self, tree: DraftTree) -> torch.Tensor:
        if not tree.fits(self._limits):
            raise ContractError(f"a tree of {len(tree) - 1} drafted nodes does not fit {self._limits}")
        if self.num_unread:
            self.read(self.num_unread)
        self._context.cut(0, self.num_kept)
        if self.num_kept + self._num_rows > self._context.num_cells:
            self._enlarge()
        padded = (*tree.tokens, *[0] * (self._num_rows - len(tree)))
        entries = [BatchEntry(token, self.num_kept + row) for row, token in enumerate(padded)]
        return self._context.decode(entries)[: len(tree)]

    def _enlarge(self) -> None:
        """Go on in a larger context."""
        larger = self._open_context(self.num_kept + 1)
        larger.load(0, self._context.save(0))
        self._context.close()
        self._context = larger

    def keep(self, nodes: Sequence[int]) -> None:
        self.rewind(self.num_kept + len(nodes))

    def close(self) -> None:
        self._context.close()
