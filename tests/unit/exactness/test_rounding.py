"""The measurement gives 0 where passes agree, and about the planted error where they do not."""

import pytest
import torch

from omnidraft.exactness.rounding import Rounding, logit_difference, measure
from omnidraft.ports import Sampling, TreeLimits
from omnidraft.testing.toy_models import ToyTarget
from tests.unit.decode.toys import TABLE, make_request, toy_decoder
from tests.unit.exactness.rounded import rounded_decoder


@pytest.mark.parametrize("num_draft_tokens", [1, 5, 12])
def test_a_target_without_rounding_has_none(num_draft_tokens: int) -> None:
    request = make_request(Sampling(1.0), max_new_tokens=40, num_draft_tokens=num_draft_tokens)
    assert measure(toy_decoder(), request).largest == 0.0


def test_the_planted_error_is_measured() -> None:
    """Two passes, each off by up to 0.3 either way: 0.6 apart at most, and nearly so somewhere among many."""
    rounding = measure(rounded_decoder(0.3), make_request(Sampling(1.0), max_new_tokens=40))
    assert 0.5 < rounding.largest <= 0.6 + 1e-5
    assert rounding.num_positions >= 4 * 40
    assert rounding.limit == 2 * rounding.largest


def test_every_size_of_tree_is_measured() -> None:
    """Kernels change with the number of rows: here only passes over all six rows round."""

    class SixRows(ToyTarget):
        def open(self, prompt_ids, max_new_tokens, mode):
            session = super().open(prompt_ids, max_new_tokens, mode)
            score = session.score
            session.score = lambda tree: score(tree) + 0.25 * (len(tree) == 6)
            return session

    decoder = toy_decoder().with_target(SixRows(TABLE))
    assert measure(decoder, make_request(Sampling(1.0), num_draft_tokens=5)).largest == pytest.approx(0.25)


def test_a_target_of_chains_is_given_no_others() -> None:
    decoder = toy_decoder().with_target(ToyTarget(TABLE, limits=TreeLimits(3, num_chains=1)))
    assert measure(decoder, make_request(Sampling(1.0), num_draft_tokens=8)).largest == 0.0


def test_the_worst_of_several_measurements_holds() -> None:
    assert Rounding(0.1, 5) + Rounding(0.3, 7) == Rounding(0.3, 12)


def test_infinities_of_one_sign_are_equal() -> None:
    one, other = torch.tensor([1.0, -torch.inf, 2.0]), torch.tensor([1.5, -torch.inf, 2.0])
    assert logit_difference(one, other) == 0.5
    assert logit_difference(one, one) == 0.0
