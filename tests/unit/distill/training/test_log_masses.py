"""Picked logits and two masses of each row: torch's own formula, values and gradients."""

import pytest
import torch
from torch import Tensor

from omnidraft.distill.training.alm import picked_and_masses

ROWS, IDS = torch.tensor([0, 0, 2, 2, 1]), torch.tensor([3, 5, 6, 6, 8])


def naive(logits_RV: Tensor, row_M: Tensor, id_M: Tensor, some_V: Tensor | None) -> tuple[Tensor, ...]:
    logits_RV = logits_RV.double()
    picked_M, all_R = logits_RV[row_M, id_M], logits_RV.logsumexp(dim=1)
    if some_V is None:
        return picked_M, all_R
    return picked_M, all_R, logits_RV[:, : len(some_V)].masked_fill(~some_V, float("-inf")).logsumexp(dim=1)


@pytest.mark.parametrize("some_V", [None, torch.tensor([True, True, False, True, True, False, True])])
def test_values_and_gradients_are_those_of_the_formula(some_V: Tensor | None) -> None:
    logits_RV = torch.randn(3, 9, generator=torch.Generator().manual_seed(0)) * 4
    weights = [torch.tensor(w) for w in ([1.0, -2.0, 0.5, 3.0, -1.0], [0.3, -1.0, 2.0], [2.0, 0.7, -3.0])]
    outputs, gradients = [], []
    for compute in (picked_and_masses, naive):
        leaf = logits_RV.clone().requires_grad_()
        values = [value for value in compute(leaf, ROWS, IDS, some_V) if value is not None]
        sum((value * weight).sum() for value, weight in zip(values, weights, strict=False)).backward()
        outputs.append([value.detach().float() for value in values])
        gradients.append(leaf.grad)
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_some_ids_of_hardly_any_mass_have_finite_values_and_gradients() -> None:
    logits_RV = torch.tensor([[500.0, -300.0, -301.0]], requires_grad=True)
    _, _, some_R = picked_and_masses(logits_RV, ROWS[:0], IDS[:0], torch.tensor([False, True, True]))
    assert some_R.item() < 500 - 80
    some_R.sum().backward()
    assert logits_RV.grad.isfinite().all()


def test_sixteen_bit_logits_are_added_up_in_float32() -> None:
    """50,000 equal logits: in bfloat16 a sum stops growing at 256."""
    logits_RV = torch.zeros(1, 50_000, dtype=torch.bfloat16, requires_grad=True)
    _, all_R, some_R = picked_and_masses(logits_RV, ROWS[:1], IDS[:1], torch.ones(50_000, dtype=torch.bool))
    assert all_R.item() == some_R.item() == pytest.approx(torch.tensor(50_000.0).log().item(), rel=1e-6)
    (all_R + some_R).sum().backward()
    assert logits_RV.grad.dtype == torch.bfloat16
