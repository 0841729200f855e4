"""Picked logits and the logsumexp of all others: torch's own formula, values and gradients."""

import pytest
import torch
from torch import Tensor

from omnidraft.distill.training.losses import picked_and_rest

IDS = torch.tensor([[3, 5, 3], [0, 1, 2], [6, 6, 6]])


def naive(logits_NV: Tensor, ids_NS: Tensor, rest_V: Tensor | None) -> tuple[Tensor, Tensor]:
    logits_NV = logits_NV.double()
    is_rest_NV = torch.ones_like(logits_NV, dtype=torch.bool).scatter(1, ids_NS, False)
    if rest_V is not None:
        is_rest_NV[:, : len(rest_V)] &= rest_V
        is_rest_NV[:, len(rest_V) :] = False
    return logits_NV.gather(1, ids_NS), logits_NV.masked_fill(~is_rest_NV, float("-inf")).logsumexp(dim=1)


@pytest.mark.parametrize("rest_V", [None, torch.tensor([True, True, False, True, True, False, True])])
def test_values_and_gradients_are_those_of_the_formula(rest_V: Tensor | None) -> None:
    logits_NV = torch.randn(3, 9, generator=torch.Generator().manual_seed(0)) * 4
    weight_NS, weight_N = torch.tensor([[1.0, -2.0, 0.5]]), torch.tensor([0.3, -1.0, 2.0])
    outputs, gradients = [], []
    for compute in (picked_and_rest, naive):
        leaf = logits_NV.clone().requires_grad_()
        picked_NS, rest_N = compute(leaf, IDS, rest_V)
        ((picked_NS * weight_NS).sum() + (rest_N * weight_N).sum()).backward()
        outputs.append((picked_NS.detach().float(), rest_N.detach().float()))
        gradients.append(leaf.grad)
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_rest_far_below_the_picked_logits_is_exact() -> None:
    """One minus a sum of probabilities would be zero."""
    logits_NV = torch.tensor([[500.0, -300.0, -301.0]], requires_grad=True)
    _, rest_N = picked_and_rest(logits_NV, torch.tensor([[0]]))
    assert rest_N.item() == pytest.approx(-300 + torch.tensor(-1.0).exp().log1p().item())
    rest_N.sum().backward()
    assert logits_NV.grad.tolist()[0] == pytest.approx([0.0, 0.7310586, 0.2689414])


def test_sixteen_bit_logits_are_added_up_in_float32() -> None:
    """50,000 equal logits: in bfloat16 a sum stops growing at 256."""
    logits_NV = torch.zeros(1, 50_001, dtype=torch.bfloat16, requires_grad=True)
    _, rest_N = picked_and_rest(logits_NV, torch.tensor([[0]]))
    assert rest_N.dtype == torch.float32
    assert rest_N.item() == pytest.approx(torch.tensor(50_000.0).log().item(), rel=1e-6)
    rest_N.sum().backward()
    assert logits_NV.grad.dtype == torch.bfloat16


def test_a_row_whose_picked_ids_are_the_whole_vocabulary_has_a_finite_gradient() -> None:
    logits_NV = torch.zeros(1, 2, requires_grad=True)
    picked_NS, rest_N = picked_and_rest(logits_NV, torch.tensor([[0, 1]]))
    torch.logaddexp(picked_NS.logsumexp(dim=1), rest_N).sum().backward()
    assert logits_NV.grad.tolist() == [[0.5, 0.5]]
