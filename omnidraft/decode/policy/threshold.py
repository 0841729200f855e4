"""One chain, until it is too unlikely that the target follows it to its end."""

from collections.abc import Sequence

from omnidraft.decode.policy.fixed import FixedPolicy


class ThresholdPolicy(FixedPolicy):
    """Implements ports.Policy."""

    def __init__(self, min_path_probability: float) -> None:
        self._min_path_probability = min_path_probability

    def select_expansions(self, values: Sequence[float], num_nodes: int) -> int:
        """See ports.Policy. The token that made the chain unlikely stays in it."""
        return int(values[0] >= self._min_path_probability)
