"""One tree from several proposers: each adds its guesses, the policy says how much of it the target scores.

What the target then draws says of every guess whether it was right, also of those that were not scored.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from omnidraft.decode.drafting.acceptance_stats import AcceptanceCalibrator
from omnidraft.decode.drafting.draft_tree_builder import DraftTreeBuilder
from omnidraft.ports import DraftTree, Mode, Noise, Policy, Request, TreeLimits


class DraftSourceSession(Protocol):
    """One proposer's part in the trees of one request."""

    def extend(self, tree: DraftTreeBuilder, position: int, limits: TreeLimits, noise: Noise) -> None:
        """Add guesses behind the root, or behind those of others."""

    def observe(self, emitted: Sequence[int], reached: Sequence[tuple[int, int]]) -> None:
        """The target emitted these ids; `reached` are the nodes on its way, each with the id that came next."""


class DraftSource(Protocol):
    """Who adds guesses to a tree. One per snapshot, many sessions."""

    def open(self, request: Request, table: AcceptanceCalibrator, policy: Policy) -> DraftSourceSession:
        """The request's last prompt id is the first root."""


class TreeProposer:
    """Implements ports.Proposer for one snapshot; what it learns of its own agreement stays with it."""

    def __init__(self, contributors: Sequence[DraftSource], policy_for: Callable[[Mode, str], Policy]) -> None:
        """
        Args:
            contributors: in the order in which they are asked, cheap ones first.
            policy_for: the policy of a mode and a tenant, the same one every time.
        """
        self.contributors = tuple(contributors)
        self.table = AcceptanceCalibrator()
        self._policy_for = policy_for

    def open(self, request: Request) -> "TreeSession":
        """See ports.Proposer."""
        policy = self._policy_for(request.mode, request.tenant)
        policy.start(request.max_new_tokens)
        sessions = [each.open(request, self.table, policy) for each in self.contributors]
        return TreeSession(request.prompt_ids[-1], sessions, self.table, policy)


class TreeSession:
    """Implements ports.ProposerSession."""

    def __init__(
        self, root: int, sessions: Sequence[DraftSourceSession], table: AcceptanceCalibrator, policy: Policy
    ) -> None:
        self.sessions = tuple(sessions)
        self._root = root
        self._table = table
        self._policy = policy
        self._tree: DraftTreeBuilder | None = None
        self._num_scored = 0

    def propose(self, position: int, limits: TreeLimits, noise: Noise) -> DraftTree:
        """See ports.ProposerSession."""
        depth = limits.num_nodes if limits.depth is None else min(limits.depth, limits.num_nodes)
        tree = self._tree = DraftTreeBuilder(self._root, depth)
        for session in self.sessions:
            session.extend(tree, position, limits, noise)
        order = tree.ranked(limits)
        kept = order[: self._policy.prune([tree.value(node) for node in order])]
        self._num_scored = len(kept)
        return tree.cut(kept)

    def observe(self, emitted: Sequence[int]) -> None:
        """See ports.ProposerSession."""
        tree, self._tree, self._root = self._tree, None, emitted[-1]
        reached = tree.walk(emitted) if tree else []
        if tree:
            self._judge(tree, reached)
            self._policy.update(len(emitted), self._num_scored, tree.step_rows)
        for session in self.sessions:
            session.observe(emitted, reached)

    def _judge(self, tree: DraftTreeBuilder, reached: Sequence[tuple[int, int]]) -> None:
        for node, token in reached:
            for child in tree.children(node):
                if child.guess is not None:
                    kind, q = child.guess
                    self._table.update(kind, q, child.depth, is_right=child.token == token)
