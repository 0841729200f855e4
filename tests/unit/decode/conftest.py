"""All proposers by name."""

import math

import pytest

from omnidraft.decode.policy.chain import AcceptancePolicy
from omnidraft.decode.policy.cost import CostPolicy
from omnidraft.decode.policy.cost_model import CostCurve
from omnidraft.ports import Proposer
from tests.unit.decode.toys import PROPOSERS, hostile_memory, make_drafter, memory_proposer


@pytest.fixture(params=[*PROPOSERS, "drafter", "coupled drafter", "cost policy", "acceptance policy", "memory"])
def any_proposer(request) -> Proposer:
    """Good, bad, empty, hostile, and the real one with and without a look at the noise."""
    if request.param == "drafter":
        return make_drafter()
    if request.param == "coupled drafter":
        return make_drafter(noise_weight=1.0)
    if request.param == "cost policy":
        policy = CostPolicy(CostCurve({1: 1.0, 8: 1.1}), CostCurve({1: 0.01, 4: 0.02}))
        return make_drafter(policy=policy, has_lookup=True)
    if request.param == "acceptance policy":
        return make_drafter(policy=AcceptancePolicy(0.7), has_lookup=True, acceptance=lambda log_q: math.exp(log_q / 2))
    if request.param == "memory":
        return memory_proposer(hostile_memory)
    return PROPOSERS[request.param]
