"""The log-probabilities of a trace record, and those that a client asks for."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.decode.logprobs import blocked_topk, client_logprobs, top_k_logprobs

HALF = 2e-3
"""float16 keeps three digits; log-probabilities here lie within -16 and 0, where its steps are below 0.016."""


@pytest.mark.parametrize("top_k", [1, 4, 16])
def test_a_record_keeps_the_likeliest_tokens_the_emitted_one_and_the_mass_of_all_others(top_k):
    """One row for each node drawn from, in the types of the record; the second token emitted is the unlikeliest."""
    logits_NV = torch.randn(3, 500, generator=torch.Generator().manual_seed(1)) * 2
    nodes, emitted = (0, 2, 2), (5, int(logits_NV[2].argmin()), int(logits_NV[2].argmax()))
    log_p_EV = torch.log_softmax(logits_NV.double(), dim=-1)[list(nodes)]
    values_EK, ids_EK = log_p_EV.topk(top_k)
    logprobs = top_k_logprobs(logits_NV, nodes, emitted, top_k)
    assert logprobs.top_ids_EK.dtype == np.uint32
    np.testing.assert_array_equal(logprobs.top_ids_EK, ids_EK)
    for column, expected in (
        (logprobs.top_log_p_EK, values_EK),
        (logprobs.emitted_log_p_E, log_p_EV[range(3), emitted]),
        (logprobs.tail_log_p_E, torch.log1p(-values_EK.exp().sum(dim=1))),
    ):
        assert column.dtype == np.float16
        np.testing.assert_allclose(column.astype(np.float64), expected, atol=HALF * 4)


def test_a_vocabulary_that_is_kept_whole_has_no_tail():
    logprobs = top_k_logprobs(torch.randn(1, 5), (0,), (1,), 8)
    assert logprobs.top_ids_EK.shape == (1, 5)
    assert logprobs.tail_log_p_E.tolist() == [-np.inf]


def test_a_tail_far_below_float32_rounding_is_still_seen():
    logits_NV = torch.full((1, 1001), -26.0)
    logits_NV[0, 7] = 0.0
    logprobs = top_k_logprobs(logits_NV, (0,), (7,), 1)
    assert float(logprobs.tail_log_p_E[0]) == pytest.approx(-26 + np.log(1000), abs=2e-2)


@pytest.mark.parametrize("num", [0, 3, 20])
def test_a_client_gets_the_log_softmax_of_the_rows_drawn_from(num):
    logits_NV = torch.randn(3, 2000, generator=torch.Generator().manual_seed(4)) * 3
    before_NV, log_p_NV = logits_NV.clone(), torch.log_softmax(logits_NV.double(), dim=-1)
    log_probs = client_logprobs(logits_NV, (0, 2), (5, 6), num)
    assert log_probs.emitted == pytest.approx([float(log_p_NV[0, 5]), float(log_p_NV[2, 6])], abs=1e-5)
    for node, likeliest in zip((0, 2), log_probs.likeliest, strict=True):
        values, ids = torch.topk(log_p_NV[node], num)
        assert [token for token, _ in likeliest] == ids.tolist()
        assert [log_p for _, log_p in likeliest] == pytest.approx(values.tolist(), abs=1e-5)
    assert torch.equal(logits_NV, before_NV)


@settings(max_examples=60)
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
