"""One chain, until the drafter's acceptance head believes that it holds a wrong token.

Source: SpecDec++, https://arxiv.org/abs/2405.19715: stop when 1 - prod P(accepted) > gamma. There the
chance of a token is known one step of the drafter later; here with the token (models/acceptance_head.py), so that no
step is spent behind a chain that is given up. Without a head the chances are measured agreement, as for all policies.
"""

from collections.abc import Sequence

from omnidraft.decode.policy.fixed import FixedPolicy


class AcceptancePolicy(FixedPolicy):
    """Implements ports.Policy."""

    uses_acceptance_head = True

    def __init__(self, max_rejection: float) -> None:
        """`max_rejection` is gamma."""
        self._max_rejection = max_rejection

    def select_expansions(self, values: Sequence[float], num_nodes: int) -> int:
        """See ports.Policy. The token that made the chain doubtful stays in it."""
        return int(1 - values[0] <= self._max_rejection)
