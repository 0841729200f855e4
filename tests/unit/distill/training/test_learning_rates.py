"""Rates of learning follow the sizes of weights, so that one setting fits any drafter."""

import pytest
import torch
from torch import nn

from omnidraft.config import LearnerSettings
from omnidraft.distill.training.learner import OF_FACTORS, RELATIVE, parameter_groups
from tests.tiny_pair import assert_same, records_of


def changes_of_a_step(learner, pair) -> dict[str, float]:
    """How far each weight's numbers moved at most, as a share of its root mean square."""
    before = {name: weight.detach().clone() for name, weight in learner.model.trained().items()}
    learner.step(records_of(pair, 2))
    return {
        name: ((weight - before[name]).abs().max() / before[name].square().mean().sqrt()).item()
        for name, weight in learner.model.trained().items()
    }


def test_a_step_moves_large_and_small_weights_by_the_same_share(pair) -> None:
    learner = pair.learner(learning_rate="auto")
    sizes = [weight.square().mean().sqrt().item() for weight in learner.model.trained().values()]
    assert max(sizes) > 5 * min(sizes)
    assert changes_of_a_step(learner, pair).values() == pytest.approx([RELATIVE] * len(sizes), rel=0.02)


def test_a_drafter_whose_weights_are_smaller_takes_smaller_steps() -> None:
    weights = {"small": nn.Parameter(torch.full((4, 4), -0.02)), "large": nn.Parameter(torch.full((4, 4), 0.2))}
    small, large = parameter_groups(weights, LearnerSettings())
    assert (small["lr"], large["lr"]) == pytest.approx((1e-5, 1e-4))
    assert (small["params"], large["params"]) == ([weights["small"]], [weights["large"]])


def test_weights_of_zeros_learn_too() -> None:
    weights = {"bias": nn.Parameter(torch.zeros(4))}
    (group,) = parameter_groups(weights, LearnerSettings())
    assert group["lr"] > 0


@pytest.mark.parametrize(("settings", "rate"), [({"learning_rate": 3e-3}, 3e-3), ({"train": "lora"}, OF_FACTORS)])
def test_a_number_and_factors_have_one_rate_for_all(settings, rate) -> None:
    weights = {"one": nn.Parameter(torch.ones(4)), "other": nn.Parameter(torch.zeros(4))}
    (group,) = parameter_groups(weights, LearnerSettings(**settings))
    assert (group["lr"], group["params"]) == (rate, list(weights.values()))


def test_a_resumed_learner_goes_on_at_the_rates_of_the_first_weights(pair) -> None:
    whole, first, second = (pair.learner(learning_rate="auto") for _ in range(3))
    for step in range(4):
        whole.step(records_of(pair, 2, first=2 * step))
    for step in range(2):
        first.step(records_of(pair, 2, first=2 * step))
    second.load_state({name: tensor.clone() for name, tensor in first.state().items()})
    for step in range(2, 4):
        second.step(records_of(pair, 2, first=2 * step))
    assert_same(second.state(), whole.state())
