"""Policies that draft one chain for each text: to the limits, until it is improbable, or until the acceptance head
stops it."""

from collections.abc import Sequence

from omnidraft.ports import NO_OTHERS, OtherTexts, Policy, RoundPlan, RoundText


class FixedPolicy(Policy, RoundPlan):
    """Implements ports.Policy, and is its plan of every round: drafts to the limits."""

    def start_round(self, texts: Sequence[RoundText], others: OtherTexts = NO_OTHERS) -> RoundPlan:
        """See ports.Policy."""
        return self


MIN_PATH_PROBABILITY = 0.2
"""A chain that the target follows to its end less often than once in five costs more passes' rows than it brings."""


class ThresholdPolicy(FixedPolicy):
    """Implements ports.Policy: extends each chain while the target reaches its end with a probability above a
    threshold."""

    def __init__(self, min_path_probability: float = MIN_PATH_PROBABILITY) -> None:
        self._min_path_probability = min_path_probability

    def select_expansions(self, values: Sequence[float], num_nodes: int) -> int:
        """See ports.RoundPlan. The token that made a chain improbable stays in it."""
        return sum(value >= self._min_path_probability for value in values)


MAX_REJECTION = 0.7
"""Gamma of SpecDec++: a chain whose rejection is as probable as this ends."""


class AcceptancePolicy(ThresholdPolicy):
    """Implements ports.Policy: drafts until the acceptance head expects a rejected token in the chain.

    Source: SpecDec++, https://arxiv.org/abs/2405.19715: stop when 1 - prod P(accepted) > gamma. There the probability
    of a token is known one step of the drafter later; here with the token (models/acceptance_head.py), so that no step
    is spent on a chain that stops. Without a head the probabilities are measured agreement, as for all policies.
    """

    uses_acceptance_head = True

    def __init__(self, max_rejection: float = MAX_REJECTION) -> None:
        super().__init__(1 - max_rejection)
