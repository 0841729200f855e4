"""Promises of every loss at single positions, and of the buckets they compare.

Every loss of the table is tested by standing in it.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from omnidraft.distill.examples.targets import BucketTargets
from omnidraft.distill.training.losses import LOSSES, log_q

V = 9
NAMES = [name for name, loss in LOSSES.items() if loss.positions != "chunk"]
DIVERGENCES = [name for name in NAMES if LOSSES[name].positions in ("boundary", "direct")]
every_loss = pytest.mark.parametrize("name", NAMES)

DIRECT_V = torch.tensor([1, 1, 1, 0, 1, 0, 0, 1, 1], dtype=torch.bool)
"""For losses at direct positions: the draft tokens that are target tokens."""


def make_buckets(
    ids: list[list[int]], p: list[list[float]], rest: list[float], direct: Tensor | None = None
) -> BucketTargets:
    p_NS = torch.tensor(p)
    real_NS = torch.ones_like(p_NS, dtype=torch.bool)
    rows, rest_N = torch.arange(len(ids)), torch.tensor(rest)
    return BucketTargets(rows, torch.tensor(ids), p_NS.log(), real_NS, rest_N.log(), direct)


def targets_of(name: str) -> BucketTargets:
    """Two positions as this loss meets them."""
    match LOSSES[name].positions:
        case "emitted" | "piece":
            return make_buckets([[3], [5]], [[1.0], [1.0]], [0.0, 0.0])
        case kind:
            direct_V = DIRECT_V if kind == "direct" else None
            p, rest = [[0.5, 0.3, 0.1], [0.6, 0.2, 0.1]], [0.1, 0.1]
            return make_buckets([[1, 4, 2], [0, 7, 8]], p, rest, direct_V)


def logits_equal_to(buckets: BucketTargets) -> Tensor:
    """q has exactly the target mass in every bucket; the rest is spread over all other tokens that may be in it."""
    in_rest_V = torch.ones(V, dtype=torch.bool) if buckets.rest_V is None else buckets.rest_V
    outside_N = in_rest_V.sum() - buckets.real_NS.sum(dim=1)
    spread_N = buckets.log_p_rest_N.clamp_min(-40) - outside_N.log()
    spread_NV = spread_N[:, None].repeat(1, V).where(in_rest_V, 5.0)  # 5: what belongs nowhere may be anything
    return spread_NV.scatter(1, buckets.ids_NS, buckets.log_p_NS)


def best_logits(name: str) -> Tensor:
    """The drafter that minimises this loss."""
    if LOSSES[name].positions in ("emitted", "piece"):
        return 40.0 * torch.nn.functional.one_hot(targets_of(name).ids_NS[:, 0], V).float()
    return logits_equal_to(targets_of(name))


def losses_of(name: str, logits_NV: Tensor, targets: BucketTargets | None = None) -> Tensor:
    return LOSSES[name].per_position(logits_NV, targets or targets_of(name))


def random_logits(seed: int, num_rows: int = 2) -> Tensor:
    return torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed))


@every_loss
def test_is_zero_when_the_drafter_equals_the_target(name: str) -> None:
    torch.testing.assert_close(losses_of(name, best_logits(name) + 3.0), torch.zeros(2), atol=1e-5, rtol=0)


@every_loss
def test_is_positive_elsewhere(name: str) -> None:
    for seed in range(50):
        assert (losses_of(name, random_logits(seed)) > 0).all()


@every_loss
@settings(max_examples=30)
@given(logits=st.lists(st.sampled_from([-1e4, -100.0, 0.0, 3.0, 100.0, 1e4]), min_size=V, max_size=V))
def test_extreme_logits_give_finite_gradients(name: str, logits: list[float]) -> None:
    """float32 knows 1e4 to 1e-3."""
    logits_NV = torch.tensor([logits, logits]).requires_grad_()
    loss_N = losses_of(name, logits_NV)
    (grad_NV,) = torch.autograd.grad(loss_N.sum(), logits_NV)
    assert (loss_N > -5e-3).all()
    assert loss_N.isfinite().all()
    assert grad_NV.isfinite().all()


@every_loss
def test_a_bucket_without_mass_gives_finite_numbers(name: str) -> None:
    targets = make_buckets([[1, 4]], [[1.0, 0.0]], [0.0])
    logits_NV = random_logits(0, 1).requires_grad_()
    loss = losses_of(name, logits_NV, targets).sum()
    (grad_NV,) = torch.autograd.grad(loss, logits_NV)
    assert loss.isfinite()
    assert grad_NV.isfinite().all()


def plain(name: str, log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """The textbook divergence between two distributions over one vocabulary."""
    p_NV, q_NV = log_p_NV.exp(), log_q_NV.exp()
    forward_N = (p_NV * (log_p_NV - log_q_NV)).sum(dim=-1)
    reverse_N = (q_NV * (log_q_NV - log_p_NV)).sum(dim=-1)
    return {
        "dm": forward_N,
        "dm_reverse": reverse_N,
        "dm_paper": reverse_N,
        "tv": 0.5 * (p_NV - q_NV).abs().sum(dim=-1),
    }[name]


def with_rest(log_NV: Tensor, num_kept: int) -> Tensor:
    """The masses of the first ids, and that of all others together if there are some."""
    rest_N1 = log_NV[:, num_kept:].logsumexp(dim=-1, keepdim=True)
    return torch.cat([log_NV[:, :num_kept], rest_N1], dim=1) if num_kept < V else log_NV


@pytest.mark.parametrize("num_kept", [V, 4])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_equal_vocabularies_give_the_textbook_divergence_of_what_is_kept_and_the_rest(name: str, num_kept: int) -> None:
    """K = V: every token is a bucket, and the rest, which is empty, has neither value nor gradient."""
    logits_NV = random_logits(0, 3).requires_grad_()
    log_p_NV = random_logits(1, 3).log_softmax(dim=-1)
    targets = BucketTargets(
        torch.arange(3),
        torch.arange(num_kept).repeat(3, 1),
        log_p_NV[:, :num_kept],
        torch.ones(3, num_kept, dtype=torch.bool),
        log_p_NV[:, num_kept:].logsumexp(dim=-1),
        torch.ones(V, dtype=torch.bool) if LOSSES[name].positions == "direct" else None,
    )
    log_p_NB, log_q_NB = (with_rest(each, num_kept) for each in (log_p_NV, logits_NV.log_softmax(dim=-1)))
    plain_N, loss_N = plain(name, log_p_NB, log_q_NB), losses_of(name, logits_NV, targets)
    torch.testing.assert_close(loss_N, plain_N)
    (grad,) = torch.autograd.grad(loss_N.sum(), logits_NV)
    (plain_grad,) = torch.autograd.grad(plain_N.sum(), logits_NV)
    torch.testing.assert_close(grad, plain_grad)


def test_the_rest_bucket_is_all_other_mass_even_when_it_is_tiny() -> None:
    logits_NV = torch.zeros(1, V).index_fill_(1, torch.tensor([0]), 60.0)
    log_q_NS, log_q_rest_N = log_q(logits_NV, make_buckets([[0, 1]], [[0.5, 0.5]], [1e-9]))
    assert log_q_NS[0, 0] == 0.0
    assert log_q_rest_N.item() == pytest.approx(torch.tensor(V - 2.0).log().item() - 60.0, abs=1e-4)


def test_tokens_that_belong_nowhere_have_no_part_in_the_papers_loss() -> None:
    logits_NV = random_logits(0).requires_grad_()
    (grad_NV,) = torch.autograd.grad(losses_of("dm_paper", logits_NV).sum(), logits_NV)
    assert (grad_NV[:, ~DIRECT_V] == 0).all()
    assert (grad_NV[:, DIRECT_V] != 0).all()


def test_a_wider_head_than_the_vocabulary_changes_nothing_where_only_direct_tokens_count() -> None:
    logits_NV = random_logits(0)
    wider_NV = torch.cat([logits_NV, torch.full((2, 3), 7.0)], dim=1)
    torch.testing.assert_close(losses_of("dm_paper", wider_NV), losses_of("dm_paper", logits_NV))
