"""Trees for all texts of a round from several draft sources: each source adds its candidates, the round's plan decides
how much of them the target scores.

The target's tokens then calibrate every candidate, scored or not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol

from omnidraft.decode.drafting.acceptance_stats import AcceptanceCalibrator, Calibrators
from omnidraft.decode.drafting.constraints import DraftConstraints
from omnidraft.decode.drafting.draft_tree_builder import DraftTreeBuilder
from omnidraft.decode.drafting.forced_tokens import ForcedRuns
from omnidraft.ports import (
    NO_OTHERS,
    DraftRequest,
    DraftTree,
    Mode,
    Noise,
    OtherTexts,
    Policy,
    Proposer,
    Request,
    RoundPlan,
    RoundText,
    Source,
    TextOutcome,
    TreeLimits,
)


class DraftSourceSession(Protocol):
    """One source's part in the trees of one request."""

    def observe(self, emitted: Sequence[int], reached: Sequence[tuple[int, int]]) -> None:
        """Learn that the target emitted these ids; `reached` are the nodes on its path, each with the id that came
        next."""

    def reset(self) -> None:
        """See ports.ProposerSession."""
        return

    def close(self) -> None:
        """Free the memory, which is taken again when the text is drafted for again."""
        return


class DraftSource(Protocol):
    """Adds candidates to trees. One per snapshot, many sessions."""

    def open(self, request: Request, calibrator: AcceptanceCalibrator) -> DraftSourceSession:
        """Begin a request, whose last prompt id is the first root."""

    def extend_all(self, sessions: Sequence[Any], drafts: Sequence[DraftTreeBuilder], plan: RoundPlan) -> None:
        """Add candidates to the tree of each of these sessions, which are this source's, after the root, or after those
        of other sources. A source that cannot batch inherits this: one text after another."""
        for session, draft in zip(sessions, drafts, strict=True):
            session.extend(draft, plan)


class TreeProposer(Proposer):
    """Implements ports.Proposer for one snapshot, which keeps its measured acceptance."""

    def __init__(
        self, sources: Sequence[DraftSource], policy_for: Callable[[Mode], Policy], *, has_trees: bool = True
    ) -> None:
        """Combine draft sources under the policy of a mode.

        Args:
            sources: in the order in which they draft, cheap ones first.
            policy_for: the policy of a mode, the same one every time.
            has_trees: without it every text is drafted one chain.
        """
        self.sources, self.has_trees = tuple(sources), has_trees
        self.calibrators = Calibrators()
        self.policy_for = policy_for

    def open(self, request: Request) -> "TreeSession":
        """See ports.Proposer."""
        return TreeSession(self, request)

    def propose_all(self, requests: Sequence[DraftRequest], others: OtherTexts = NO_OTHERS) -> list[DraftTree]:
        """See ports.Proposer."""
        sessions: list[TreeSession] = [each.session for each in requests]
        policy = self.policy_for(sessions[0].request.mode)
        plan = policy.start_round([each.text for each in sessions], others)
        this_round = Round(policy, others, len(sessions))
        drafts = [each.begin(index, requests[index], this_round) for index, each in enumerate(sessions)]
        for number, source in enumerate(self.sources):
            for session in sessions:
                session.extend_forced()  # before a source too, so that it begins behind what is forced
            if number == len(self.sources) - 1:
                for session, nodes in zip(sessions, _prune(drafts, plan), strict=True):
                    session.nodes_without = frozenset(nodes)
            source.extend_all([each.sources[number] for each in sessions], drafts, plan)
        for session in sessions:
            session.extend_forced()
        scored = _prune(drafts, plan)
        return [each.score(nodes) for each, nodes in zip(sessions, scored, strict=True)]


@dataclass(slots=True)
class Round:
    """Collects the outcomes of the texts that were drafted for together, and updates the policy with all of them."""

    policy: Policy
    others: OtherTexts
    num_waiting: int
    """Texts whose emitted ids are not known yet."""
    outcomes: list[TextOutcome] = field(default_factory=list)

    def end(self, outcome: TextOutcome | None) -> None:
        """Add the outcome of one text; None where there is none, because drafting failed or the text ended."""
        self.num_waiting -= 1
        if outcome is not None:
            self.outcomes.append(outcome)
        if self.outcomes and not self.num_waiting:
            self.policy.update(self.outcomes, self.others)


class TreeSession:
    """Implements ports.ProposerSession."""

    def __init__(self, proposer: TreeProposer, request: Request) -> None:
        self.request = request
        self.text = RoundText(request.tenant, request.max_new_tokens, request.work)
        self.calibrator = proposer.calibrators.of_new_text(request.tenant, request.work)
        self.sources = tuple(each.open(request, self.calibrator) for each in proposer.sources)
        self._constraints = DraftConstraints(request) if DraftConstraints.are_needed(request) else None
        self._forced = ForcedRuns(request, self.calibrator)
        self._proposer = proposer
        self._root = request.prompt_ids[-1]
        self._draft: DraftTreeBuilder | None = None
        self._round: Round | None = None
        self._scored: Sequence[int] = ()
        self._num_emitted = 0
        self.nodes_without: frozenset[int] = frozenset()
        """The nodes that would be scored without the last source, which is the drafter if there is one."""

    def propose(self, position: int, limits: TreeLimits, noise: Noise) -> DraftTree:
        """See ports.ProposerSession."""
        return self._proposer.propose_all([DraftRequest(self, position, limits, noise)])[0]

    def begin(self, index: int, request: DraftRequest, this_round: Round) -> DraftTreeBuilder:
        """Begin a tree in this round."""
        self._end_round(None)
        limits = request.limits if self._proposer.has_trees else replace(request.limits, num_chains=1)
        self._draft = DraftTreeBuilder(self._root, limits, request.noise, self._constraints, index, request.position)
        self._round = this_round
        return self._draft

    def extend_forced(self) -> None:
        """Add what the grammar forces after the leaves of the tree."""
        assert self._draft is not None
        if self._constraints is not None and self._draft.limits.num_nodes:
            self._forced.extend_leaves(self._draft)

    def score(self, nodes: Sequence[int]) -> DraftTree:
        """Return the tree of these nodes, which the target is about to score."""
        assert self._draft is not None
        self._scored = nodes
        return self._draft.build(nodes)

    def observe(self, emitted: Sequence[int]) -> None:
        """See ports.ProposerSession."""
        draft, self._root = self._draft, emitted[-1]
        self._num_emitted += len(emitted)
        reached = draft.follow(emitted) if draft else []
        if draft:
            self._calibrate(draft, reached)
            self._end_round(self._outcome(draft, len(emitted), reached))
        if self._constraints is not None:
            self._constraints.observe(emitted)
        for source in self.sources:
            source.observe(emitted, reached)

    def pause(self) -> None:
        """See ports.ProposerSession."""
        self._end_round(None)
        for source in self.sources:
            source.close()

    def reset(self) -> None:
        """See ports.ProposerSession."""
        self._end_round(None)
        if self._constraints is not None:
            self._constraints.reset()
        for source in self.sources:
            source.reset()

    def close(self) -> None:
        """See ports.ProposerSession."""
        self.pause()
        self._proposer.policy_for(self.request.mode).finish(self.request.tenant, self._num_emitted, self.request.work)
        self._num_emitted = 0

    def _outcome(self, tree: DraftTreeBuilder, num_emitted: int, reached: Sequence[tuple[int, int]]) -> TextOutcome:
        without, accepted = self.nodes_without, [node for node, _ in reached]
        return TextOutcome(
            self.text.tenant,
            num_emitted,
            len(self._scored),
            tree.step_rows,
            self.text.work,
            num_nodes_without=len(without),
            num_accepted_without=sum(node in without for node in accepted),
            search_s=tree.search_s,
            num_remembered=_num_remembered(tree, self._scored),
            num_accepted_remembered=_num_remembered(tree, accepted),
        )

    def _end_round(self, outcome: TextOutcome | None) -> None:
        ended, self._round, self._draft = self._round, None, None
        if ended is not None:
            ended.end(outcome)

    def _calibrate(self, tree: DraftTreeBuilder, reached: Sequence[tuple[int, int]]) -> None:
        for node, token in reached:
            for child in tree.children(node):
                for kind, q in child.estimates:
                    self.calibrator.update(kind, q, child.depth, is_right=child.token == token)


def _num_remembered(tree: DraftTreeBuilder, nodes: Sequence[int]) -> int:
    """Return how many of these nodes the suffix memory drafted."""
    return sum(tree.nodes[node].source is Source.SUFFIX for node in nodes)


def _prune(drafts: Sequence[DraftTreeBuilder], plan: RoundPlan) -> list[list[int]]:
    """Return the nodes of each tree that the target scores: those of all texts compete, and each tree stays a
    prefix of its own ranking."""
    for draft in drafts:
        draft.exclude_siblings()
    ranked = [draft.ranked() for draft in drafts]
    competing: list[tuple[float, float, float, int]] = []
    for at, (draft, order) in enumerate(zip(drafts, ranked, strict=True)):
        values, later = ([of_all[node] for node in order] for of_all in (draft.values(), draft.later_acceptances()))
        competing += zip(accumulate(values, min), values, later, [at] * len(order), strict=True)
    if not competing:
        return ranked
    competing.sort(key=lambda node: -node[0])
    num_scored = [0] * len(drafts)
    for *_, at in competing[: plan.prune([node[1] for node in competing], [node[2] for node in competing])]:
        num_scored[at] += 1
    return [order[:num] for order, num in zip(ranked, num_scored, strict=True)]
