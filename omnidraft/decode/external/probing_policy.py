"""Rounds that measure passes of another engine: their drafts have the length whose cost is not known yet."""

from collections.abc import Callable, Sequence

from omnidraft.decode.external.step_time_model import StepTimeModel
from omnidraft.decode.policy.cost import CATCH_UP
from omnidraft.ports import NO_OTHERS, OtherTexts, Policy, RoundPlan, RoundText, TextOutcome, Work


class ProbingPolicy:
    """Implements ports.Policy by another policy, except in the rounds that measure."""

    def __init__(self, policy: Policy, passes: StepTimeModel, num_tokens: Callable[[], int]) -> None:
        """Measure passes with at most `num_tokens` drafted tokens for each text."""
        self._policy = policy
        self._passes = passes
        self._num_tokens = num_tokens
        self._probe: _ProbePlan | None = None
        """The plan of the round whose outcome is not known yet, if it may measure."""

    def start_round(self, texts: Sequence[RoundText], others: OtherTexts = NO_OTHERS) -> RoundPlan:
        """See ports.Policy."""
        length = self._passes.probe_length(len(texts) + others.num_rows, self._num_tokens())
        plan = self._policy.start_round(texts, others)
        self._probe = None if length is None else _ProbePlan(plan, length, len(texts), others.num_rows)
        return self._probe or plan

    def update(self, outcomes: Sequence[TextOutcome], others: OtherTexts = NO_OTHERS) -> None:
        """See ports.Policy."""
        if self._probe is not None and self._probe.is_measuring:
            self._passes.count_probe(self._probe.num_rows)
        self._policy.update(outcomes, others)

    def finish(self, tenant: str, num_emitted: int, work: Work = "text") -> None:
        """See ports.Policy."""
        self._policy.finish(tenant, num_emitted, work)


class _ProbePlan:
    """Implements ports.RoundPlan: a length for every text, likely or not, if the drafter has read them all or would
    read them anyway; else another plan. Many unread prompts take longer than the passes that are measured."""

    num_candidates = 1
    uses_acceptance_head = False

    def __init__(self, plan: RoundPlan, length: int, num_texts: int, num_other_rows: int) -> None:
        """Measure drafts of this length, or follow the plan."""
        self.num_rows = num_texts * (1 + length) + num_other_rows
        self._plan = plan
        self._num_nodes = num_texts * length
        self._num_texts = num_texts
        self._ready: set[int] = set()
        self._is_wanted = False
        """Whether the plan drafts for any text by itself."""

    @property
    def is_measuring(self) -> bool:
        """Whether every text is drafted the length that is measured."""
        return not self._num_nodes or len(self._ready) == self._num_texts

    def should_search(self, index: int) -> bool:
        """See ports.RoundPlan."""
        return self._plan.should_search(index)

    def should_draft(self, index: int, num_ids: int) -> bool:
        """See ports.RoundPlan."""
        if not self._num_nodes:
            return False
        is_wanted = self._plan.should_draft(index, num_ids)
        self._is_wanted |= is_wanted
        if is_wanted or num_ids <= CATCH_UP:
            self._ready.add(index)
        return index in self._ready

    def should_read(self, index: int, num_ids: int, num_last: int) -> bool:
        """See ports.RoundPlan."""
        return self._plan.should_read(index, num_ids, num_last)

    def select_expansions(self, values: Sequence[float], num_nodes: int) -> int:
        """See ports.RoundPlan."""
        if self.is_measuring:
            return len(values) if num_nodes < self._num_nodes else 0
        return self._plan.select_expansions(values, num_nodes) if self._is_wanted else 0

    def prune(self, values: Sequence[float], acceptances: Sequence[float] | None = None) -> int:
        """See ports.RoundPlan."""
        return min(len(values), self._num_nodes) if self.is_measuring else self._plan.prune(values, acceptances)
