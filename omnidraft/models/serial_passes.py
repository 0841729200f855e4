"""A pass over several texts, computed one text after another, and the checks of every pass over several texts.

For targets that cannot batch texts, or whose bits would then depend on the other texts.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from omnidraft.errors import ContractError
from omnidraft.ports import DraftTree, TargetSession


class SerialSession(TargetSession, Protocol):
    """A session that can compute a part of its prompt by itself."""

    def read(self, num_ids: int) -> None:
        """Compute the keys of so many unread prompt ids."""


def forward_serially(
    trees: Sequence[tuple[SerialSession, DraftTree]], prompts: Sequence[tuple[SerialSession, int]] = ()
) -> list[torch.Tensor]:
    """See ports.Target.forward."""
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
