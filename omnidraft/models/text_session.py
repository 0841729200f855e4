"""The sessions of all targets: which ids of a text are read and kept, and passes over several texts.

Shapes: N nodes of a tree, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from omnidraft.errors import ContractError
from omnidraft.ports import DraftTree, TargetSession, TreeLimits


class TextSession(ABC):
    """Implements ports.TargetSession. A subclass has the keys, and its rows are what computes them, unless it has a
    `compute` of its own that batches texts."""

    def __init__(self, prompt_ids: Sequence[int], limits: TreeLimits) -> None:
        self._prompt_ids = tuple(prompt_ids)
        self.limits = limits
        self.num_kept = 0

    @staticmethod
    def _compute_one_by_one(rows: Sequence[Callable[[], Any]]) -> Sequence[Any]:
        return [each() for each in rows]

    compute: Callable[[Sequence[Any]], Sequence[Any]] = _compute_one_by_one
    """Computes the rows of all sessions that have it in common; returns the logits of each."""

    @property
    def num_unread(self) -> int:
        return max(len(self._prompt_ids) - self.num_kept, 0)

    def prompt_rows(self, num_ids: int) -> Any:
        """Return the rows of so many unread prompt ids, for `compute`; `forward` makes them kept."""
        return partial(self._read, self._prompt_ids[self.num_kept :][:num_ids])

    def tree_rows(self, tree: DraftTree) -> Any:
        """Return the rows of a tree that fits, behind the kept ids, for `compute`."""
        return partial(self._score, tree)

    def _read(self, ids: Sequence[int]) -> None:
        """Compute the keys of the next ids of the prompt."""
        raise NotImplementedError

    def _score(self, tree: DraftTree) -> torch.Tensor:
        """Return the logits [N, V] of a tree behind the kept ids."""
        raise NotImplementedError

    def read(self, num_ids: int) -> None:
        """Compute the keys of so many unread prompt ids."""
        forward([], [(self, num_ids)])

    def score(self, tree: DraftTree) -> torch.Tensor:
        if self.num_unread:
            self.read(self.num_unread)
        return forward([(self, tree)])[0]

    @abstractmethod
    def keep(self, nodes: Sequence[int]) -> None: ...

    def reuse(self, source: Any, num_ids: int) -> int:
        """See ports.Target."""
        self._require_new()
        num_same = min(num_ids, source.num_kept, self.num_unread)
        self.num_kept = self._take(source, num_same) if num_same else 0
        return self.num_kept

    def _require_new(self) -> None:
        if self.num_kept:
            raise ContractError(f"reuse: the session has keys of {self.num_kept} ids already")

    def _take(self, source: Any, num_ids: int) -> int:
        """Begin with the keys of so many ids of another session of the target; return the number of ids."""
        return 0

    @abstractmethod
    def close(self) -> None: ...


class ChunkedSession(TextSession):
    """Reads prompts in chunks of one size from position 0, each as soon as its first id is, so that their bits do not
    depend on the other texts."""

    _chunk: int
    """The number of ids."""
    _num_read = 0
    """The end of the last chunk that was computed."""

    def prompt_rows(self, num_ids: int) -> Callable[[], None]:
        return partial(self._read_to, self.num_kept + num_ids)

    def _read_to(self, end: int) -> None:
        while self._num_read < end:
            ids = self._prompt_ids[self._num_read :][: self._chunk]
            self._read(ids)
            self._num_read += len(ids)

    def reuse(self, source: Any, num_ids: int) -> int:
        """See ports.Target. Whole chunks are taken."""
        num_same = min(num_ids, source._num_read) // self._chunk * self._chunk if type(source) is type(self) else 0
        self._num_read = super().reuse(source, num_same)
        return self._num_read


def forward(
    trees: Sequence[tuple[TextSession, DraftTree]], prompts: Sequence[tuple[TextSession, int]] = ()
) -> list[torch.Tensor]:
    """See ports.Target.forward. Sessions that have `compute` in common share a pass."""
    require_valid_pass(trees, prompts)
    rows_of = defaultdict[Any, list[tuple[TextSession, Any]]](list)
    for session, tree in trees:
        if not tree.fits(session.limits):
            raise ContractError(f"a tree of {len(tree) - 1} drafted nodes does not fit {session.limits}")
        rows_of[session.compute].append((session, session.tree_rows(tree)))
    for session, num_ids in prompts:
        rows_of[session.compute].append((session, session.prompt_rows(num_ids)))
    computed: dict[TextSession, Any] = {}
    for compute, own in rows_of.items():
        computed.update(zip([session for session, _ in own], compute([rows for _, rows in own]), strict=True))
    for session, num_ids in prompts:
        session.num_kept += num_ids
    return [computed[session] for session, _ in trees]


def require_valid_pass(
    trees: Sequence[tuple[TargetSession, DraftTree]], prompts: Sequence[tuple[TargetSession, int]]
) -> None:
    """Raise ContractError when a session is named twice, or its prompt is too short or too long for the pass."""
    sessions = [id(session) for session, _ in (*trees, *prompts)]
    if len(set(sessions)) < len(sessions):
        raise ContractError("forward: a session is named twice")
    for session, _ in trees:
        if session.num_unread:
            raise ContractError(f"forward: a tree, but {session.num_unread} prompt ids are unread")
    for session, num_ids in prompts:
        if not 0 < num_ids <= session.num_unread:
            raise ContractError(f"forward: {num_ids} prompt ids to read, {session.num_unread} are unread")
