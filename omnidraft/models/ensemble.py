"""Several targets with one vocabulary that answer together: a target whose distribution is the mean of theirs.

It is a function of the members' logits at one position alone, so the ensemble is exact and reproducible wherever all
its members are.
Shapes: N nodes of a tree, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omnidraft.errors import ConfigError
from omnidraft.models.text_session import require_valid_pass
from omnidraft.ports import DraftTree, Mode, Target, TargetSession, TreeLimits


class EnsembleTarget:
    """Implements ports.Target. The members compute one after another."""

    def __init__(self, members: Sequence[Target]) -> None:
        """Raises ConfigError if there are not two members or more of one vocabulary."""
        _require_members(members)
        self._members = tuple(members)
        self.vocab_size = members[0].vocab_size
        self.context_limit = min(member.context_limit for member in members)
        self.first_context = min(member.first_context for member in members)
        self.max_rows = min(member.max_rows for member in members)
        self.fingerprint = "ensemble-" + "+".join(f"({each.fingerprint})" for each in members)

    def limits(self, mode: Mode) -> TreeLimits:
        """Return what every member takes."""
        limits = [member.limits(mode) for member in self._members]
        return TreeLimits(
            min(each.num_nodes for each in limits),
            min((each.num_chains for each in limits if each.num_chains is not None), default=None),
            min((each.depth for each in limits if each.depth is not None), default=None),
        )

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> "EnsembleSession":
        """See ports.Target."""
        return EnsembleSession([member.open(prompt_ids, max_new_tokens, mode) for member in self._members])

    def forward(self, trees: Sequence[tuple[Any, DraftTree]], prompts: Sequence[tuple[Any, int]] = ()) -> list[Tensor]:
        """See ports.Target; the sessions are this target's. A member that reused more keys than another reads less."""
        require_valid_pass(trees, prompts)
        left = [(session, session.num_unread - num_ids) for session, num_ids in prompts]
        logits = [
            member.forward(
                [(session.parts[number], tree) for session, tree in trees],
                [
                    (session.parts[number], session.parts[number].num_unread - num_left)
                    for session, num_left in left
                    if session.parts[number].num_unread > num_left
                ],
            )
            for number, member in enumerate(self._members)
        ]
        return [_mean_of_each_node(of_tree) for of_tree in zip(*logits, strict=True)]

    def reuse(self, session: Any, source: Any, num_ids: int) -> int:
        """See ports.Target; the sessions are this target's."""
        pairs = zip(self._members, session.parts, source.parts, strict=True)
        return min(member.reuse(own, other, num_ids) for member, own, other in pairs)

    def kv_bytes(self, num_ids: int, mode: Mode) -> int:
        """See ports.Target."""
        return sum(member.kv_bytes(num_ids, mode) for member in self._members)


class EnsembleSession:
    """Implements ports.TargetSession: one session of each member. Where members reused different numbers of keys, it
    counts as that of the fewest."""

    def __init__(self, parts: Sequence[TargetSession]) -> None:
        self.parts = parts

    @property
    def num_kept(self) -> int:
        return min(part.num_kept for part in self.parts)

    @property
    def num_unread(self) -> int:
        return max(part.num_unread for part in self.parts)

    def score(self, tree: DraftTree) -> Tensor:
        return _mean_of_each_node([part.score(tree) for part in self.parts])

    def keep(self, nodes: Sequence[int]) -> None:
        for part in self.parts:
            part.keep(nodes)

    def close(self) -> None:
        for part in self.parts:
            part.close()


def _mean_of_each_node(logits: Sequence[Tensor]) -> Tensor:
    """Return the mean of the members' distributions, as logits [N, V].

    Each node by itself: torch computes the ends of arrays in another way, so bits would depend on their length.
    """
    return torch.stack([mean_logits(of_node) for of_node in zip(*logits, strict=True)])


def mean_logits(logits: Sequence[Tensor]) -> Tensor:
    """Return the log of the mean of distributions, up to a constant of each row, from float32 logits of each."""
    total, *others = (each.log_softmax(dim=-1) for each in logits)
    for each in others:
        total = torch.logaddexp(total, each)
    return total


def _require_members(members: Sequence[Target]) -> None:
    if len(members) < 2:
        raise ConfigError(f"an ensemble has two members or more, not {len(members)}; name more in models.members")
    sizes = sorted({member.vocab_size for member in members})
    if len(sizes) > 1:
        raise ConfigError(f"members of an ensemble need one vocabulary, these have {sizes} tokens; omnidraft transfer")
