"""Sessions over any store of keys: a drafter's decides which rows to compute and which keys of branches to reuse.

Shapes: R new rows, V vocabulary, H hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from omnidraft.models.acceptance_head import AcceptanceHead
from omnidraft.models.text_session import TextSession
from omnidraft.ports import AcceptanceFn, DraftTree, TreeLimits

ROOT = -1
"""Parent of a branch that directly follows the text."""


@dataclass(frozen=True, slots=True)
class PassSegment:
    """The rows of one text in a pass: the last `ids` of a tree behind its first `length` ids."""

    backend: Any
    length: int
    """Number of ids of the text before the tree, whose keys are stored."""
    parents: Sequence[int] | None
    """Parents of all nodes of the tree; node n is in slot `length + n`, and the keys of the nodes before `ids` are
    stored. None: the ids are a chain."""
    ids: Sequence[int]
    num_logits: int
    """Number of last ids whose logits are computed."""

    @property
    def num_before(self) -> int:
        """The number of nodes before the ids."""
        return 0 if self.parents is None else len(self.parents) - len(self.ids)

    @property
    def end(self) -> int:
        """The slot behind the last one."""
        return self.length + len(self.ids if self.parents is None else self.parents)

    def split(self, num_rows: int) -> "tuple[PassSegment, PassSegment]":
        """Return the first rows, and those that can be computed after them."""
        ids, rest = self.ids[:num_rows], self.ids[num_rows:]
        num_logits = max(self.num_logits - len(rest), 0)
        parents = None if self.parents is None else self.parents[: self.num_before + num_rows]
        length = self.length + num_rows if parents is None else self.length
        return (
            replace(self, parents=parents, ids=ids, num_logits=num_logits),
            replace(self, length=length, ids=rest, num_logits=self.num_logits - num_logits),
        )


class KvBackend(Protocol):
    """Keys and values of one text; id number n uses slot n."""

    rotation_offset: int
    hidden_RH: torch.Tensor
    """float32, the normed last hidden states behind the logits of the last pass; read by sessions with a head only."""

    def move(self, sources: Sequence[int], start: int) -> None:
        """Move the keys of these ascending slots to `start`, `start + 1`, ..., which is never a later slot."""

    def copy(self, source: Any, num_ids: int) -> None:
        """Copy the keys of the first ids of another text."""


class KvModel(Protocol):
    """A decoder at one set of weights, for many texts."""

    vocab_size: int
    first_context: int
    context_limit: int

    def open(
        self, capacity: int = 0, *, keeps_hidden: bool = False, factors: Any = None, rotation_offset: int = 0
    ) -> KvBackend:
        """Return the empty store of a text.

        Args:
            capacity: initial number of slots; more come with the text, since memory is counted by ids that are there.
            keeps_hidden: False leaves `hidden_RH` empty.
            factors: the text's own, of `pack_factors`; None computes with the shared weights alone.
            rotation_offset: see ports.rotation_offset.
        """

    def pack_factors(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Return low-rank factors for texts of this model. Raises SnapshotCorrupt when they do not fit it."""

    def forward(self, segments: Sequence[PassSegment]) -> list[torch.Tensor]:
        """Compute the rows of different texts in as few passes as possible; return the logits float32 [R, V] of
        each."""

    def forward_arrays(self, segments: Sequence[PassSegment]) -> list[np.ndarray]:
        """Do the same; return the logits in the processor's memory."""


class KvSession(TextSession):
    """Implements ports.TargetSession."""

    def __init__(
        self, model: KvModel, prompt_ids: Sequence[int], limits: TreeLimits, capacity: int, rotation_offset: int = 0
    ) -> None:
        """Begin with `capacity` slots."""
        super().__init__(prompt_ids, limits)
        self._model = model
        self.compute = model.forward
        self.backend = model.open(capacity, rotation_offset=rotation_offset)

    def prompt_rows(self, num_ids: int) -> PassSegment:
        return PassSegment(self.backend, self.num_kept, None, self._prompt_ids[self.num_kept :][:num_ids], 0)

    def tree_rows(self, tree: DraftTree) -> PassSegment:
        return PassSegment(self.backend, self.num_kept, [ROOT, *tree.parents[1:]], tree.tokens, len(tree))

    def keep(self, nodes: Sequence[int]) -> None:
        self.backend.move([self.num_kept + node for node in nodes], self.num_kept)
        self.num_kept += len(nodes)

    def _take(self, source: Any, num_ids: int) -> int:
        if source.backend.rotation_offset != self.backend.rotation_offset:
            return 0
        self.backend.copy(source.backend, num_ids)
        return num_ids

    def close(self) -> None:
        self.backend = self._model.open()


Step = tuple[PassSegment | None, Callable[[np.ndarray | None], np.ndarray]]
"""What has to be computed, if anything, and what makes the logits that its caller needs of its logits [R, V]."""


class BranchingSession:
    """Implements ports.DraftSession."""

    def __init__(self, model: KvModel, head: AcceptanceHead | None = None, factors: Any = None) -> None:
        self._model = model
        self.backend = model.open(keeps_hidden=head is not None, factors=factors)
        self._head = head
        self._length = 0
        self._state_RH: Sequence[torch.Tensor] = ()
        self._clear_branches()

    def prefill_or_extend(self, keep: int, ids: Sequence[int]) -> np.ndarray:
        """See ports.DraftSession."""
        return run_together(self._model, [self.prefill_or_extend_step(keep, ids)])[0]

    def branch(self, ids: Sequence[int], parents: Sequence[int]) -> np.ndarray:
        """See ports.DraftSession."""
        return run_together(self._model, [self.branch_step(ids, parents)])[0]

    def prefill_or_extend_step(self, keep: int, ids: Sequence[int]) -> Step:
        """Begin `prefill_or_extend`, so that the caller can compute it with others."""
        path = self._matching_path(ids) if keep == self._length else []
        self.backend.move([keep + node for node in path], keep)

        def finish(logits_1V: np.ndarray | None) -> np.ndarray:
            if logits_1V is None:
                logits_V, self._state_RH = self._logits[path[-1]], self._hidden[path[-1] : path[-1] + 1]
            else:
                logits_V, self._state_RH = logits_1V[0], self._new_hidden()
            self._length = keep + len(ids)
            self._clear_branches()
            return logits_V

        new_ids = ids[len(path) :]
        return PassSegment(self.backend, keep + len(path), None, new_ids, 1) if new_ids else None, finish

    def branch_step(self, ids: Sequence[int], parents: Sequence[int]) -> Step:
        """Begin `branch`, so that the caller can compute it with others."""

        def finish(logits_RV: np.ndarray | None) -> np.ndarray:
            assert logits_RV is not None
            self._parents += parents
            self._ids += ids
            self._logits.extend(logits_RV)
            self._state_RH = self._new_hidden()
            self._hidden += self._state_RH
            return logits_RV

        return PassSegment(self.backend, self._length, [*self._parents, *parents], ids, len(ids)), finish

    def acceptance_probabilities(self) -> Sequence[AcceptanceFn] | None:
        """See ports.DraftSession."""
        return None if self._head is None else self._head.acceptance_probabilities(torch.stack(list(self._state_RH)))

    def _new_hidden(self) -> Sequence[torch.Tensor]:
        return () if self._head is None else list(self.backend.hidden_RH)

    def _clear_branches(self) -> None:
        self._parents: list[int] = []
        self._ids: list[int] = []
        self._logits: list[np.ndarray] = []
        self._hidden: list[torch.Tensor] = []

    def _matching_path(self, ids: Sequence[int]) -> list[int]:
        """Return the path of branches that spells these ids, as far as there is one."""
        path: list[int] = []
        for token in ids:
            siblings = zip(self._parents, self._ids, strict=True)
            parent = path[-1] if path else ROOT
            node = next((node for node, each in enumerate(siblings) if each == (parent, token)), None)
            if node is None:
                break
            path.append(node)
        return path


def run_together(model: KvModel, steps: Sequence[Step]) -> list[np.ndarray]:
    """Run steps of different texts with one call of the model; return their results."""
    segments = [segment for segment, _ in steps if segment is not None]
    computed = iter(model.forward_arrays(segments) if segments else ())
    return [finish(None if segment is None else next(computed)) for segment, finish in steps]


class KvDrafter:
    """Implements ports.DraftModel at one set of weights."""

    def __init__(self, model: KvModel, head: AcceptanceHead | None = None) -> None:
        self._model, self._head = model, head
        self.vocab_size = model.vocab_size
        self.context_limit = model.first_context
        self.has_head = head is not None

    def open(self) -> BranchingSession:
        """See ports.DraftModel."""
        return BranchingSession(self._model, self._head)

    def with_factors(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], BranchingSession]:
        """Return what opens sessions that add these low-rank factors to the shared weights; see low_rank.py. They take
        part in this model's passes beside all others. Raises SnapshotCorrupt when the factors do not fit."""
        return partial(BranchingSession, self._model, self._head, self._model.pack_factors(tensors))

    def prefill_or_extend_all(self, requests: Sequence[tuple[Any, int, Sequence[int]]]) -> list[np.ndarray]:
        """See ports.DraftModel; the sessions are this model's."""
        return run_together(self._model, [session.prefill_or_extend_step(keep, ids) for session, keep, ids in requests])

    def branch_all(self, requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]]) -> list[np.ndarray]:
        """See ports.DraftModel."""
        return run_together(self._model, [session.branch_step(ids, parents) for session, ids, parents in requests])
