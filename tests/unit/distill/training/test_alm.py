"""Likelihoods of chunks: zero at equality, and the right limits; test_gradients.py has values and gradients."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from omnidraft.distill.examples.targets import ChunkTargets
from omnidraft.distill.training.alm import chunk_kl

V = 7
R = 6
every_tau = pytest.mark.parametrize("tau", [1.0, 100.0])
STARTS_V = torch.tensor([1, 0, 0, 1, 0], dtype=torch.bool)  # shorter than the head, which has unused rows


def make_chunks(tau: float = 100.0, starts_V: Tensor | None = STARTS_V) -> ChunkTargets:
    """Rows 0 to 1, 2 to 4 and 4 alone; a boundary is looked at one row later."""
    return ChunkTargets(
        row_N=torch.tensor([0, 2, 4]),
        ids_NL=torch.tensor([[3, 1, 0], [2, 2, 5], [6, 0, 0]]),
        num_ids_N=torch.tensor([2, 3, 1]),
        log_p_N=torch.tensor([0.3, 0.01, 0.9]).log(),
        tau=tau,
        starts_V=starts_V,
    )


def random_logits(seed: int) -> Tensor:
    return torch.randn(R, V, generator=torch.Generator().manual_seed(seed))


def slow_log_q(logits_RV: Tensor, chunks: ChunkTargets) -> Tensor:
    slow = []
    log_q_RV = logits_RV.log_softmax(dim=-1)
    for first, ids, num in zip(chunks.row_N, chunks.ids_NL, chunks.num_ids_N, strict=True):
        total = torch.stack([log_q_RV[first + n, ids[n]] for n in range(num)]).sum()
        if chunks.starts_V is not None:
            total = total + log_q_RV[first + num, : len(STARTS_V)].exp()[STARTS_V].sum().log()
        slow.append(total)
    return torch.stack(slow)


@every_tau
def test_is_zero_when_both_find_a_chunk_equally_likely(tau: float) -> None:
    chunks = make_chunks(tau)
    same = replace(chunks, log_p_N=slow_log_q(random_logits(0), chunks))
    torch.testing.assert_close(chunk_kl(random_logits(0), same), torch.zeros(3), atol=2e-4, rtol=0)
    assert (chunk_kl(random_logits(0), chunks) > 0.005).all()


def test_one_token_at_temperature_one_is_the_binary_divergence() -> None:
    """What is left when the vocabularies are the same."""
    chunks = replace(make_chunks(1.0, None)[2:3], log_p_N=torch.tensor([0.3]).log())
    q = random_logits(0).softmax(dim=-1)[4, 6]
    p = torch.tensor(0.3)
    kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    torch.testing.assert_close(chunk_kl(random_logits(0), chunks)[0], kl, atol=1e-4, rtol=1e-3)


def test_a_high_temperature_compares_log_likelihoods() -> None:
    chunks = make_chunks(1000.0)
    a, b = -chunks.log_p_N, -slow_log_q(random_logits(0), chunks)
    kl = chunk_kl(random_logits(0), chunks)
    torch.testing.assert_close(kl, a * (a / b).log() - a + b, rtol=0.02, atol=0.01)


@every_tau
@settings(max_examples=30)
@given(
    row=st.lists(st.sampled_from([-1e4, -100.0, 0.0, 100.0, 1e4]), min_size=V, max_size=V),
    log_p=st.sampled_from([0.0, -1e-7, -1.0, -1e4]),
)
def test_extreme_logits_and_likelihoods_give_finite_gradients(tau: float, row: list[float], log_p: float) -> None:
    logits_RV = torch.tensor([row] * R).requires_grad_()
    chunks = replace(make_chunks(tau), log_p_N=torch.full((3,), log_p))
    loss_N = chunk_kl(logits_RV, chunks)
    (grad_RV,) = torch.autograd.grad(loss_N.sum(), logits_RV)
    assert loss_N.isfinite().all()
    assert grad_RV.isfinite().all()


def test_a_drafter_certain_of_what_the_target_doubts_is_called_back() -> None:
    """At q = 1 - 1e-6 the gradient still points away from the token."""
    logits_RV = torch.zeros(R, V)
    logits_RV[4, 6] = 15.0
    logits_RV.requires_grad_()
    (grad_RV,) = torch.autograd.grad(chunk_kl(logits_RV, make_chunks(starts_V=None)[2:3]).sum(), logits_RV)
    assert grad_RV[4, 6] > 0
