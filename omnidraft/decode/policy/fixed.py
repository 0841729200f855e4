"""Always as much as is allowed: one chain, as deep as the limits are."""

from collections.abc import Sequence


class FixedPolicy:
    """Implements ports.Policy."""

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
