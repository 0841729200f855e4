"""One tree from several draft sources: each adds its candidates, the policy decides how much of it the target scores.

The target's tokens then calibrate every candidate, scored or not.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from omnidraft.decode.drafting.acceptance_stats import AcceptanceCalibrator
from omnidraft.decode.drafting.draft_tree_builder import DraftTreeBuilder
from omnidraft.ports import DraftTree, Mode, Noise, Policy, Request, TreeLimits


class DraftSourceSession(Protocol):
    """One source's part in the trees of one request."""

    def extend(self, tree: DraftTreeBuilder, position: int, limits: TreeLimits, noise: Noise) -> None:
        """Add candidates after the root, or after those of other sources."""

    def observe(self, emitted: Sequence[int], reached: Sequence[tuple[int, int]]) -> None:
        """Learn that the target emitted these ids; `reached` are the nodes on its path, each with the id that came
        next."""


class DraftSource(Protocol):
    """Adds candidates to trees. One per snapshot, many sessions."""

    def open(self, request: Request, calibrator: AcceptanceCalibrator, policy: Policy) -> DraftSourceSession:
        """Begin a request, whose last prompt id is the first root."""


class TreeProposer:
    """Implements ports.Proposer for one snapshot, which keeps its measured acceptance."""

    def __init__(self, sources: Sequence[DraftSource], policy_for: Callable[[Mode, str], Policy]) -> None:
        """Combine draft sources under the policy of a request.

        Args:
            sources: in the order in which they draft, cheap ones first.
            policy_for: the policy of a mode and a tenant, the same one every time.
        """
        self.sources = tuple(sources)
        self.calibrator = AcceptanceCalibrator()
        self._policy_for = policy_for

    def open(self, request: Request) -> "TreeSession":
        """See ports.Proposer."""
        policy = self._policy_for(request.mode, request.tenant)
        policy.start(request.max_new_tokens)
        sessions = [each.open(request, self.calibrator, policy) for each in self.sources]
        return TreeSession(request.prompt_ids[-1], sessions, self.calibrator, policy)


class TreeSession:
    """Implements ports.ProposerSession."""

    def __init__(
        self, root: int, sessions: Sequence[DraftSourceSession], calibrator: AcceptanceCalibrator, policy: Policy
    ) -> None:
        self.sessions = tuple(sessions)
        self._root = root
        self._calibrator = calibrator
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
        scored = order[: self._policy.prune([tree.value(node) for node in order])]
        self._num_scored = len(scored)
        return tree.build(scored)

    def observe(self, emitted: Sequence[int]) -> None:
        """See ports.ProposerSession."""
        tree, self._tree, self._root = self._tree, None, emitted[-1]
        reached = tree.follow(emitted) if tree else []
        if tree:
            self._calibrate(tree, reached)
            self._policy.update(len(emitted), self._num_scored, tree.step_rows)
        for session in self.sessions:
            session.observe(emitted, reached)

    def _calibrate(self, tree: DraftTreeBuilder, reached: Sequence[tuple[int, int]]) -> None:
        for node, token in reached:
            for child in tree.children(node):
                if child.estimated_from is not None:
                    kind, q = child.estimated_from
                    self._calibrator.update(kind, q, child.depth, is_right=child.token == token)
