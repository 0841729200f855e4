"""The sessions of all targets: which ids of a text are read and kept, and passes over several texts.

Shapes: N nodes of a tree, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from omnidraft.errors import ContractError
from omnidraft.ports import DraftTree, TargetSession, TreeLimits


class TextSession(ABC):
    """Implements ports.TargetSession. A subclass has the keys."""

    compute: Callable[[Sequence[Any]], Sequence[Any]]
    """Computes the rows of all sessions that have it in common; returns the logits of each."""

    def __init__(self, prompt_ids: Sequence[int], limits: TreeLimits, chunk: int = 1) -> None:
        """`chunk`: only the keys of whole chunks of so many ids are reused."""
        self._prompt_ids = tuple(prompt_ids)
        self.limits = limits
        self._chunk = chunk
        self.num_kept = 0

    @property
    def num_unread(self) -> int:
        return max(len(self._prompt_ids) - self.num_kept, 0)

    @property
    def num_lent(self) -> int:
        """The number of first ids whose keys other texts may take."""
        return self.num_kept

    @abstractmethod
    def prompt_rows(self, num_ids: int) -> Any:
        """Return the rows of so many unread prompt ids, for `compute`; `forward` makes them kept."""

    @abstractmethod
    def tree_rows(self, tree: DraftTree) -> Any:
        """Return the rows of a tree that fits, behind the kept ids, for `compute`."""

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
        require_new(self)
        num_same = min(num_ids, source.num_lent, self.num_unread) // self._chunk * self._chunk
        if num_same and self._take(source, num_same):
            self.num_kept = num_same
        return self.num_kept

    def _take(self, source: Any, num_ids: int) -> bool:
        """Begin with the keys of so many ids of another session of the target; return whether that is possible."""
        return False

    @abstractmethod
    def close(self) -> None: ...


class SerialSession(TextSession):
    """A text that is computed by itself, since its bits would depend on the other texts, or that cannot be batched.

    Prompts are read in chunks of one size from position 0, each as soon as its first id is.
    """

    _num_read = 0
    """The end of the last chunk that was computed."""

    @staticmethod
    def compute(rows: Sequence[Callable[[], Any]]) -> Sequence[Any]:
        return [each() for each in rows]

    def prompt_rows(self, num_ids: int) -> Callable[[], None]:
        return partial(self._read_to, self.num_kept + num_ids)

    def tree_rows(self, tree: DraftTree) -> Callable[[], torch.Tensor]:
        return partial(self._score, tree)

    @property
    def num_lent(self) -> int:
        return self._num_read

    def reuse(self, source: Any, num_ids: int) -> int:
        self._num_read = super().reuse(source, num_ids)
        return self._num_read

    def _read_to(self, end: int) -> None:
        while self._num_read < end:
            ids = self._prompt_ids[self._num_read :][: self._chunk]
            self._read(ids)
            self._num_read += len(ids)

    @abstractmethod
    def _read(self, ids: Sequence[int]) -> None:
        """Compute the keys of the prompt's next chunk, which begins at `_num_read`."""

    @abstractmethod
    def _score(self, tree: DraftTree) -> torch.Tensor:
        """Return the logits [N, V] of a tree behind the kept ids."""


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


class ReadingSession(TargetSession, Protocol):
    """A session that can compute a part of its prompt by itself."""

    def read(self, num_ids: int) -> None:
        """Compute the keys of so many unread prompt ids."""


def forward_serially(
    trees: Sequence[tuple[ReadingSession, DraftTree]], prompts: Sequence[tuple[ReadingSession, int]] = ()
) -> list[torch.Tensor]:
    """See ports.Target.forward: one text after another."""
    require_valid_pass(trees, prompts)
    for session, num_ids in prompts:
        session.read(num_ids)
    return [session.score(tree) for session, tree in trees]


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


def require_new(session: TargetSession) -> None:
    """Raise ContractError when this session has keys of its own, which reused ones would overwrite."""
    if session.num_kept:
        raise ContractError(f"reuse: the session has keys of {session.num_kept} ids already")
