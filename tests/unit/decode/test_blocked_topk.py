"""The fast way to the largest numbers finds what torch.topk finds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.decode.blocked_topk import blocked_topk


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 9000),
    num=st.integers(1, 40),
    rows=st.integers(1, 3),
    levels=st.sampled_from([3, 50, 10**6]),
    seed=st.integers(0, 99),
)
def test_it_is_topk_but_for_the_order_of_equals(size, num, rows, levels, seed):
    values_RV = torch.randint(levels, (rows, size), generator=torch.Generator().manual_seed(seed)).float()
    values_RK, ids_RK = blocked_topk(values_RV, num)
    assert torch.equal(values_RK, torch.topk(values_RV, min(num, size)).values)
    assert torch.equal(values_RV.gather(1, ids_RK), values_RK)
    assert all(len(set(ids)) == len(ids) for ids in ids_RK.tolist())


@pytest.mark.parametrize("at", [0, 8191, 8192, 8199])
def test_the_ends_of_a_row_are_looked_at(at):
    values_1V = torch.zeros(1, 8200)
    values_1V[0, at] = 1.0
    assert blocked_topk(values_1V, 4)[1][0, 0] == at
