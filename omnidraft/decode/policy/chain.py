"""Policies that draft one chain: to the limits, until it is improbable, or until the acceptance head stops it."""

from collections.abc import Sequence


class FixedPolicy:
    """Implements ports.Policy: drafts to the limits."""

    num_candidates = 1
    uses_acceptance_head = False

    def start(self, max_new_tokens: int) -> None:
        """See ports.Policy."""

    def should_draft(self, num_ids: int) -> bool:
        """See ports.Policy."""
        return True

    def select_expansions(self, values: Sequence[float], num_nodes: int) -> int:
        """See ports.Policy."""
        return 1

    def prune(self, values: Sequence[float]) -> int:
        """See ports.Policy."""
        return len(values)

    def update(self, num_emitted: int, num_nodes: int, step_rows: Sequence[int]) -> None:
        """See ports.Policy."""


class ThresholdPolicy(FixedPolicy):
    """Implements ports.Policy: extends the chain while the target reaches its end with a probability above a
    threshold."""

    def __init__(self, min_path_probability: float) -> None:
        self._min_path_probability = min_path_probability

    def select_expansions(self, values: Sequence[float], num_nodes: int) -> int:
        """See ports.Policy. The token that made the chain improbable stays in it."""
        return int(values[0] >= self._min_path_probability)


class AcceptancePolicy(FixedPolicy):
    """Implements ports.Policy: drafts until the acceptance head expects a rejected token in the chain.

    Source: SpecDec++, https://arxiv.org/abs/2405.19715: stop when 1 - prod P(accepted) > gamma. There the probability
    of a token is known one step of the drafter later; here with the token (models/acceptance_head.py), so that no step
    is spent on a chain that stops. Without a head the probabilities are measured agreement, as for all policies.
    """

    uses_acceptance_head = True

    def __init__(self, max_rejection: float) -> None:
        """Stop above `max_rejection`, the paper's gamma."""
        self._max_rejection = max_rejection

    def select_expansions(self, values: Sequence[float], num_nodes: int) -> int:
        """See ports.Policy. The token that exceeded gamma stays in the chain."""
        return int(1 - values[0] <= self._max_rejection)
