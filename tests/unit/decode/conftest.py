"""One core for every test; all proposers by name."""

import pytest
import torch

from omnidraft.ports import Proposer
from tests.unit.decode.toys import PROPOSERS, make_drafter


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[*PROPOSERS, "drafter", "coupled drafter"])
def any_proposer(request) -> Proposer:
    """Good, bad, empty, hostile, and the real one with and without a look at the noise."""
    if request.param == "drafter":
        return make_drafter()
    if request.param == "coupled drafter":
        return make_drafter(noise_weight=1.0)
    return PROPOSERS[request.param]
