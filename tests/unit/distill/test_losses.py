"""What every loss promises, and the buckets they are made of."""

import pytest
import torch
from torch import Tensor

from omnidraft.distill.losses import LOSSES, Buckets, forward_kl_buckets, log_q, parse, reverse_kl_buckets
from omnidraft.errors import ConfigError

V = 9
every_loss = pytest.mark.parametrize("name", LOSSES)


def make_buckets(ids: list[list[int]], p: list[list[float]], rest: list[float]) -> Buckets:
    p_NS = torch.tensor(p)
    return Buckets(torch.tensor(ids), p_NS.log(), torch.ones_like(p_NS, dtype=torch.bool), torch.tensor(rest).log())


def asked_of(name: str) -> Buckets:
    """Two positions as this loss meets them."""
    if LOSSES[name].positions == "piece":
        return make_buckets([[3], [5]], [[1.0], [1.0]], [0.0, 0.0])
    return make_buckets([[1, 4, 2], [0, 7, 8]], [[0.5, 0.3, 0.1], [0.6, 0.2, 0.1]], [0.1, 0.1])


def logits_equal_to(buckets: Buckets) -> Tensor:
    """q has exactly the asked mass in every bucket; the rest is spread over all other tokens."""
    outside_N = V - buckets.real_NS.sum(dim=1)
    spread_N = buckets.log_p_rest_N.clamp_min(-40) - outside_N.log()
    return spread_N[:, None].repeat(1, V).scatter(1, buckets.ids_NS, buckets.log_p_NS)


@every_loss
def test_is_zero_when_the_drafter_believes_what_the_target_believes(name: str) -> None:
    asked = asked_of(name)
    loss_N = LOSSES[name].per_position(logits_equal_to(asked) + 3.0, asked)
    torch.testing.assert_close(loss_N, torch.zeros(2), atol=1e-5, rtol=0)


@every_loss
def test_is_positive_elsewhere(name: str) -> None:
    draws = torch.randn(50, 2, V, generator=torch.Generator().manual_seed(0))
    assert all((LOSSES[name].per_position(logits_NV, asked_of(name)) > 0).all() for logits_NV in draws)


@every_loss
def test_falls_along_its_own_gradient(name: str) -> None:
    logits_NV = torch.randn(2, V, generator=torch.Generator().manual_seed(0)).requires_grad_()
    before_N = LOSSES[name].per_position(logits_NV, asked_of(name))
    before_N.sum().backward()
    assert logits_NV.grad is not None
    after_N = LOSSES[name].per_position((logits_NV - 0.1 * logits_NV.grad).detach(), asked_of(name))
    assert (after_N < before_N).all()


@every_loss
def test_a_constant_added_to_the_logits_changes_nothing(name: str) -> None:
    logits_NV = torch.randn(2, V, generator=torch.Generator().manual_seed(0))
    shifted_N = LOSSES[name].per_position(logits_NV + 100.0, asked_of(name))
    torch.testing.assert_close(shifted_N, LOSSES[name].per_position(logits_NV, asked_of(name)), atol=1e-4, rtol=0)


@every_loss
def test_a_padded_bucket_counts_for_nothing(name: str) -> None:
    logits_NV = torch.randn(2, V, generator=torch.Generator().manual_seed(0)).requires_grad_()
    asked = asked_of(name)
    padded = Buckets(
        torch.cat([asked.ids_NS, asked.ids_NS[:, :1]], dim=1),
        torch.cat([asked.log_p_NS, torch.zeros(2, 1)], dim=1),
        torch.cat([asked.real_NS, torch.zeros(2, 1, dtype=torch.bool)], dim=1),
        asked.log_p_rest_N,
    )
    plain_N, padded_N = LOSSES[name].per_position(logits_NV, asked), LOSSES[name].per_position(logits_NV, padded)
    torch.testing.assert_close(padded_N, plain_N)
    (plain_grad,) = torch.autograd.grad(plain_N.sum(), logits_NV)
    (padded_grad,) = torch.autograd.grad(padded_N.sum(), logits_NV)
    torch.testing.assert_close(padded_grad, plain_grad)


def test_equal_vocabularies_and_all_tokens_kept_give_plain_kl() -> None:
    """K = V: every token is a bucket, and the rest, which is empty, has neither value nor gradient."""
    logits_NV = torch.randn(3, V, generator=torch.Generator().manual_seed(0)).requires_grad_()
    log_p_NV = torch.randn(3, V, generator=torch.Generator().manual_seed(1)).log_softmax(dim=-1)
    nothing_N = torch.full((3,), -torch.inf)
    asked = Buckets(torch.arange(V).repeat(3, 1), log_p_NV, torch.ones(3, V, dtype=torch.bool), nothing_N)
    log_q_NV = logits_NV.log_softmax(dim=-1)
    forward_N = (log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(dim=-1)
    reverse_N = (log_q_NV.exp() * (log_q_NV - log_p_NV)).sum(dim=-1)
    for plain_N, loss in ((forward_N, forward_kl_buckets), (reverse_N, reverse_kl_buckets)):
        loss_N = loss(logits_NV, asked)
        torch.testing.assert_close(loss_N, plain_N)
        (grad,) = torch.autograd.grad(loss_N.sum(), logits_NV, retain_graph=True)
        (plain_grad,) = torch.autograd.grad(plain_N.sum(), logits_NV, retain_graph=True)
        torch.testing.assert_close(grad, plain_grad)


def test_the_rest_bucket_is_all_other_mass_even_when_it_is_tiny() -> None:
    logits_NV = torch.zeros(1, V).index_fill_(1, torch.tensor([0]), 60.0)
    log_q_NS, log_q_rest_N = log_q(logits_NV, make_buckets([[0, 1]], [[0.5, 0.5]], [1e-9]))
    assert log_q_NS[0, 0] == 0.0
    assert log_q_rest_N.item() == pytest.approx(torch.tensor(V - 2.0).log().item() - 60.0, abs=1e-4)


@every_loss
def test_a_bucket_without_mass_gives_finite_numbers(name: str) -> None:
    asked = make_buckets([[1, 4]], [[1.0, 0.0]], [0.0])
    logits_NV = torch.randn(1, V, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = LOSSES[name].per_position(logits_NV, asked).sum()
    loss.backward()
    assert loss.isfinite()
    assert logits_NV.grad is not None
    assert logits_NV.grad.isfinite().all()


def test_a_sum_is_read_with_its_weights() -> None:
    assert parse("dm + 0.2 ngram") == (("dm", 1.0), ("ngram", 0.2))
    assert parse("0.5*dm+0.5 * dm_reverse") == (("dm", 0.5), ("dm_reverse", 0.5))


@pytest.mark.parametrize(
    "text", ["", "dm +", "dmm", "dm + 0.2", "-1 dm", "nan dm", "inf dm", "x dm", "1 2 dm", "dm + dm"]
)
def test_a_sum_that_cannot_be_meant_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="loss"):
        parse(text)


def test_a_refusal_names_what_there_is() -> None:
    with pytest.raises(ConfigError, match="dm, dm_reverse, ngram"):
        parse("dm + 0.2 alm")
