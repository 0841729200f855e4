"""The ranking of target tokens from a drafter's logits, against its definition."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.decode.drafting.ranking import CandidateRanker, most_probable
from omnidraft.decode.sampling.noise import SeededNoise
from omnidraft.ports import Sampling
from tests.unit.decode.toys import ALIGNMENT, DRAFT_PIECES, TARGET_PIECES

NOISE = SeededNoise(3, 0, len(TARGET_PIECES))


def slow(logits, temperature, weight, position):
    """All target ids by log q / T + w G, q summed over the draft tokens that begin with them."""
    q_D = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    q = dict.fromkeys(range(len(TARGET_PIECES)), 0.0)
    for draft_id in range(len(DRAFT_PIECES)):
        if pieces := ALIGNMENT.pieces(draft_id):
            q[pieces[0]] += q_D[draft_id]
    q = {token: mass for token, mass in q.items() if mass > 0}
    scores = {token: np.log(mass) for token, mass in q.items()}
    if temperature and weight:
        gumbel = {token: -np.log(NOISE.exponentials(position, np.array([token]))[0]) for token in q}
        scores = {token: score / temperature + weight * gumbel[token] for token, score in scores.items()}
    return q, sorted(q, key=lambda token: (-scores[token], token))


@settings(max_examples=60)
@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 50))
def test_candidates_are_ranked_and_weighed_as_defined(seed, temperature, weight, position):
    logits = np.random.default_rng(seed).normal(size=len(DRAFT_PIECES)) * 3
    q, order = slow(logits, temperature, weight, position)
    best = CandidateRanker(logits.astype(np.float32), ALIGNMENT, Sampling(temperature)).best(5, weight, NOISE, position)
    assert [each.target_id for each in best] == order[:5]
    for each in best:
        assert each.q == pytest.approx(q[each.target_id], rel=1e-5)  # sums of float32
        assert ALIGNMENT.pieces(each.draft_id)[0] == each.target_id
        rivals = [token for token in range(len(DRAFT_PIECES)) if ALIGNMENT.pieces(token)[:1] == (each.target_id,)]
        assert each.draft_id == max(rivals, key=lambda token: logits[token])
        assert each.draft_share <= 1 + 1e-9


def test_confidence_is_q_as_the_temperature_makes_it():
    logits = np.zeros(len(DRAFT_PIECES), np.float32)
    logits[DRAFT_PIECES.index(b"a")] = 2.0
    cold, warm = (
        CandidateRanker(logits, ALIGNMENT, Sampling(temperature)).best(1, 0.0, NOISE, 0)[0]
        for temperature in (0.5, 2.0)
    )
    assert cold.q == pytest.approx(warm.q)
    assert cold.confidence > cold.q > warm.confidence


@pytest.mark.parametrize("temperature", [1e-307, 5e-324])
def test_the_least_temperatures_rank_like_none_and_leave_numbers(temperature):
    """A confidence that is no number would spoil what all tenants' rounds of a policy share."""
    logits = np.linspace(0.0, 3.0, len(DRAFT_PIECES), dtype=np.float32)
    cold = CandidateRanker(logits, ALIGNMENT, Sampling(temperature)).best(3, 1.0, NOISE, 0)
    assert [each.confidence for each in cold] == [1.0, 0.0, 0.0]
    assert cold[0].target_id == CandidateRanker(logits, ALIGNMENT, Sampling(0.0)).best(1, 0.0, NOISE, 0)[0].target_id


def test_each_weight_says_what_it_would_have_guessed_first():
    logits = np.zeros(len(DRAFT_PIECES), np.float32)
    ranking = CandidateRanker(logits, ALIGNMENT, Sampling(1.0))
    firsts = ranking.first_ids((0.0, 0.5, 1.0), NOISE, 9)
    assert firsts == [ranking.best(1, weight, NOISE, 9)[0].target_id for weight in (0.0, 0.5, 1.0)]


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 20.0])
def test_the_most_probable_tokens_of_a_large_vocabulary_are_those_of_a_sort(spread):
    """Whether few or many logits are close to the largest one."""
    logits = np.random.default_rng(3).normal(size=40_000).astype(np.float32).round(2) * np.float32(spread)
    ids, q = most_probable(logits)
    assert ids.tolist() == np.argsort(-logits, kind="stable")[:128].tolist()
    np.testing.assert_allclose(q, torch.softmax(torch.tensor(logits).double(), 0).numpy()[ids], rtol=1e-5)
