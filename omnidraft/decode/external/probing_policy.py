"""Rounds that measure passes of another engine: their drafts have the length whose cost is not known yet."""

from collections.abc import Callable, Sequence

from omnidraft.decode.external.step_time_model import StepTimeModel
from omnidraft.decode.policy.chain import FixedPolicy
from omnidraft.decode.policy.cost import CATCH_UP
from omnidraft.ports import Policy, RoundPlan, RoundText, TextOutcome, Work


class ProbingPolicy:
    """Implements ports.Policy by another policy, except in the rounds that measure."""

    def __init__(self, policy: Policy, passes: StepTimeModel, num_tokens: Callable[[], int]) -> None:
        """Measure passes with at most `num_tokens` drafted tokens for each text."""
        self._policy = policy
        self._passes = passes
        self._num_tokens = num_tokens

    def start_round(self, texts: Sequence[RoundText], num_other_rows: int = 0) -> RoundPlan:
        """See ports.Policy."""
        length = self._passes.probe_length(len(texts) + num_other_rows, self._num_tokens())
        plan = self._policy.start_round(texts, num_other_rows)
        return plan if length is None else _ProbePlan(plan, length * len(texts))

    def update(self, outcomes: Sequence[TextOutcome], num_other_rows: int = 0) -> None:
        """See ports.Policy."""
        self._policy.update(outcomes, num_other_rows)

    def finish(self, tenant: str, num_emitted: int, work: Work = "text") -> None:
        """See ports.Policy."""
        self._policy.finish(tenant, num_emitted, work)


class _ProbePlan(FixedPolicy):
    """Implements ports.RoundPlan: so many nodes, likely or not, of the texts that the drafter has read and of those it
    would read anyway, since many unread prompts take longer than the passes that are measured."""

    def __init__(self, plan: RoundPlan, num_nodes: int) -> None:
        """Measure so many nodes in a round of this plan."""
        self._plan = plan
        self._num_nodes = num_nodes

    def should_draft(self, index: int, num_ids: int) -> bool:
        """See ports.RoundPlan."""
        return self._num_nodes > 0 and (num_ids <= CATCH_UP or self._plan.should_draft(index, num_ids))

    def should_read(self, index: int, num_ids: int, num_last: int) -> bool:
        """See ports.RoundPlan."""
        return self._plan.should_read(index, num_ids, num_last)

    def select_expansions(self, values: Sequence[float], num_nodes: int) -> int:
        """See ports.RoundPlan."""
        return len(values) if num_nodes < self._num_nodes else 0

    def prune(self, values: Sequence[float]) -> int:
        """See ports.RoundPlan."""
        return min(len(values), self._num_nodes)
