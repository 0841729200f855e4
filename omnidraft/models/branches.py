"""A drafter's session over any store of keys: which rows to compute, and which keys of branches to take over.

Shapes: R new rows, V vocabulary, H hidden size.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from omnidraft.models.acceptance_head import AcceptanceHead
from omnidraft.ports import Odds

ROOT = -1
"""Parent of a branch that stands directly behind the text."""


class Rows(Protocol):
    """Keys and values of one text; the row of id number n goes to slot n."""

    hidden_RH: torch.Tensor
    """float32, the normed last hidden states behind the logits of the last call; read by sessions with a head only."""

    def chain(self, start: int, ids: Sequence[int]) -> torch.Tensor:
        """Logits float32 [V] after the last of the ids, which follow the first `start` ids of the text."""

    def tree(self, length: int, parents: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
        """Logits float32 [R, V] of the last R nodes of a tree of `parents` behind the text's first `length` ids;
        node n lies in slot `length + n`, and the nodes before these R are there."""

    def move(self, sources: Sequence[int], start: int) -> None:
        """Keys of these slots, ascending, go to `start`, `start + 1`, ... , which is never to a later slot."""


class BranchingSession:
    """Implements ports.DraftSession."""

    def __init__(self, rows: Rows, head: AcceptanceHead | None = None) -> None:
        self._rows = rows
        self._head = head
        self._length = 0
        self._asked_RH: Sequence[torch.Tensor] = ()
        self._forget()

    def advance(self, keep: int, ids: Sequence[int]) -> torch.Tensor:
        """See ports.DraftSession."""
        path = self._follow(ids) if keep == self._length else []
        self._rows.move([keep + node for node in path], keep)
        rest = ids[len(path) :]
        logits_V = self._rows.chain(keep + len(path), rest) if rest else self._logits[path[-1]]
        self._asked_RH = self._new_hidden() if rest else self._hidden[path[-1] : path[-1] + 1]
        self._length = keep + len(ids)
        self._forget()
        return logits_V

    def branch(self, ids: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
        """See ports.DraftSession."""
        logits_RV = self._rows.tree(self._length, [*self._parents, *parents], ids)
        self._parents += parents
        self._ids += ids
        self._logits += logits_RV
        self._asked_RH = self._new_hidden()
        self._hidden += self._asked_RH
        return logits_RV

    def odds(self) -> Sequence[Odds] | None:
        """See ports.DraftSession."""
        return None if self._head is None else self._head.odds(torch.stack(list(self._asked_RH)))

    def _new_hidden(self) -> Sequence[torch.Tensor]:
        return () if self._head is None else list(self._rows.hidden_RH)

    def _forget(self) -> None:
        self._parents: list[int] = []
        self._ids: list[int] = []
        self._logits: list[torch.Tensor] = []
        self._hidden: list[torch.Tensor] = []

    def _follow(self, ids: Sequence[int]) -> list[int]:
        """The branches that these ids run along, one after the other, as far as they go."""
        path: list[int] = []
        for token in ids:
            siblings = zip(self._parents, self._ids, strict=True)
            parent = path[-1] if path else ROOT
            node = next((node for node, each in enumerate(siblings) if each == (parent, token)), None)
            if node is None:
                break
            path.append(node)
        return path
