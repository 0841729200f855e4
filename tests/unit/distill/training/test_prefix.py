"""The divergence over spans of a sorted vocabulary: torch's own formula, values and gradients."""

import numpy as np
import pytest
import torch
from torch import Tensor

from omnidraft.distill.examples.targets import PrefixTargets
from omnidraft.distill.training.prefix import prefix_kl
from omnidraft.distill.training.span_masses import span_masses

V = 9
ORDER_V = torch.tensor([4, 0, 8, 1, 7, 2, 3, 6, 5])
ROWS, LOWS, HIGHS = torch.tensor([0, 0, 2, 2, 1]), torch.tensor([0, 2, 3, 3, 7]), torch.tensor([9, 5, 4, 3, 9])


def logits(rows: int = 3) -> Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(0)) * 4


def naive_masses(logits_RV: Tensor) -> Tensor:
    mass_RV = (logits_RV.double() - logits_RV.detach().double().amax(dim=1, keepdim=True)).exp()[:, ORDER_V]
    return torch.stack(
        [mass_RV[row, low:high].sum() for row, low, high in zip(ROWS, LOWS, HIGHS, strict=True)]  # type: ignore[misc]
    )


def targets(p_NS: list[list[float]], rows: list[int], within: list[tuple[int, int]]) -> PrefixTargets[Tensor]:
    """Buckets of one id and of two, the first of all that a target is about."""
    p = torch.tensor(p_NS)
    low = [[low, low, low + 1] for low, _ in within]
    high = [[high, low + 1, low + 3] for low, high in within]
    return PrefixTargets(torch.tensor(rows), torch.tensor(low), torch.tensor(high), p, 1 - p.sum(dim=1), ORDER_V)


def test_masses_and_gradients_are_those_of_the_formula() -> None:
    weight_M = torch.tensor([0.3, -1.0, 2.0, 5.0, 0.7], dtype=torch.float64)
    values, gradients = [], []
    for compute in (lambda leaf: span_masses(leaf, ROWS, LOWS, HIGHS, ORDER_V), naive_masses):
        leaf = logits().requires_grad_()
        value_M = compute(leaf)
        (value_M * weight_M).sum().backward()
        values.append(value_M.detach())
        gradients.append(leaf.grad)
    torch.testing.assert_close(values[0], values[1], rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-7)


def test_a_small_mass_among_many_ids_is_not_lost() -> None:
    """The last of 200,000 ids has a part in 10 million: sums in float32 would be off by as much."""
    logits_RV = torch.zeros(1, 200_000)
    logits_RV[0, -1] = -4.0
    last = torch.tensor([199_999])
    mass = span_masses(logits_RV, torch.tensor([0]), last, last + 1, torch.arange(200_000))
    assert mass.item() == pytest.approx(np.exp(-4.0), rel=1e-6)


def test_the_divergence_is_the_one_over_buckets_and_rest() -> None:
    within, p_NS = [(0, 9), (2, 7)], [[0.2, 0.5], [0.1, 0.0]]
    logits_RV = logits(2)
    q_RV = logits_RV.double().softmax(dim=1)[:, ORDER_V].numpy()
    expected = []
    for (low, high), row, p_S in zip(within, q_RV, p_NS, strict=True):
        q = row[low:high] / row[low:high].sum()
        buckets = [(p_S[0], q[0]), (p_S[1], q[1] + q[2]), (1 - sum(p_S), q[3:].sum())]
        expected.append(sum(p * np.log(p / q) for p, q in buckets if p > 0))
    assert prefix_kl(logits_RV, targets(p_NS, [0, 1], within)).numpy() == pytest.approx(expected, rel=1e-5)


def test_equal_masses_have_no_divergence_and_no_gradient() -> None:
    logits_RV = logits(1).requires_grad_()
    q_V = logits_RV.detach().double().softmax(dim=1)[0, ORDER_V]
    p_NS = [[q_V[0].item(), (q_V[1] + q_V[2]).item()]]
    loss_N = prefix_kl(logits_RV, targets(p_NS, [0], [(0, 9)]))
    loss_N.sum().backward()
    assert abs(loss_N.item()) < 1e-6
    assert logits_RV.grad.abs().max() < 1e-6


def test_a_bucket_that_the_student_rules_out_costs_much_and_stays_finite() -> None:
    logits_RV = torch.zeros(1, V)
    logits_RV[0, ORDER_V[0]] = -1000.0
    leaf = logits_RV.requires_grad_()
    loss_N = prefix_kl(leaf, targets([[0.9, 0.1]], [0], [(0, 9)]))
    loss_N.sum().backward()
    assert 20 < loss_N.item() < 100
    assert leaf.grad.isfinite().all()
