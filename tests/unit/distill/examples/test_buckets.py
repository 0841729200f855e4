"""Mass per draft token, on a toy alignment whose figures can be checked by hand."""

import numpy as np
import pytest

from omnidraft.distill.examples.buckets import (
    Split,
    bucket_targets,
    direct_buckets,
)
from omnidraft.distill.examples.targets import Positions
from omnidraft.traces.record import TargetLogprobs
from omnidraft.vocab.alignment import Alignment, PackedLists

# Target tokens 0..4, draft tokens 0..3: 0 and 1 are direct, 2 is spelled (0, 3), 3 cannot be drafted, 4 is (1, 3);
# draft token 2 spells the target tokens (0, 1).
TOY = Alignment("toy", PackedLists.of([(0,), (1,), (0, 1), ()]), PackedLists.of([(0,), (1,), (0, 3), (), (1, 3)]))


ONLY = Positions(at_P=np.array([0]), emitted_P=np.array([0]), draft_P=np.array([0]))


def toy_logprobs(top: list[int], p: list[float], tail: float, emitted: float) -> TargetLogprobs:
    return TargetLogprobs(np.array([top]), np.log([p]), np.log([emitted]), np.log([tail]))


def as_masses(buckets) -> dict[int | str, float]:
    masses: dict[int | str, float] = {
        int(token): float(np.exp(log_p))
        for token, log_p, real in zip(buckets.ids_NS[0], buckets.log_p_NS[0], buckets.real_NS[0], strict=True)
        if real
    }
    return masses | {"rest": float(np.exp(buckets.log_p_rest_N[0]))}


def test_a_target_token_lies_with_the_draft_token_that_begins_it() -> None:
    logprobs = toy_logprobs([0, 2, 1, 3], [0.4, 0.2, 0.2, 0.1], 0.1, 0.4)
    masses = as_masses(bucket_targets(logprobs, ONLY, TOY, []))
    assert masses == pytest.approx({0: 0.6, 1: 0.2, "rest": 0.2})


def test_a_text_that_one_draft_token_spells_moves_to_that_token() -> None:
    logprobs = toy_logprobs([0, 2, 1, 3], [0.4, 0.2, 0.2, 0.1], 0.1, 0.4)
    masses = as_masses(bucket_targets(logprobs, ONLY, TOY, [Split(0, draft_id=2, first_target=0, p=0.3)]))
    assert masses == pytest.approx({0: 0.3, 1: 0.2, 2: 0.3, "rest": 0.2})


def test_moved_mass_comes_from_the_rest_when_its_first_token_is_not_in_the_record() -> None:
    logprobs = toy_logprobs([1, 4], [0.5, 0.3], 0.2, 0.1)
    masses = as_masses(bucket_targets(logprobs, ONLY, TOY, [Split(0, draft_id=2, first_target=0, p=0.05)]))
    assert masses == pytest.approx({1: 0.8, 2: 0.05, "rest": 0.15})


def test_an_empty_tail_is_an_empty_rest() -> None:
    logprobs = TargetLogprobs(np.array([[0]]), np.zeros((1, 1)), np.zeros(1), np.array([-np.inf]))
    assert as_masses(bucket_targets(logprobs, ONLY, TOY, [])) == pytest.approx({0: 1.0, "rest": 0.0})


def test_the_papers_form_is_renormalised_on_direct_tokens() -> None:
    logprobs = toy_logprobs([0, 2, 1, 3], [0.4, 0.2, 0.2, 0.1], 0.1, 0.4)
    masses = as_masses(direct_buckets(logprobs, ONLY, TOY))
    assert masses == pytest.approx({0: 4 / 7, 1: 2 / 7, "rest": 1 / 7})


def test_without_a_direct_token_in_the_record_all_mass_is_rest() -> None:
    for tail in (0.3, 0.0):
        with np.errstate(divide="ignore"):
            logprobs = toy_logprobs([2, 4], [0.4, 0.3], tail, 0.4)
        assert as_masses(direct_buckets(logprobs, ONLY, TOY)) == pytest.approx({"rest": 1.0})
