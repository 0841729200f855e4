"""The ranking of target tokens from a drafter's logits, against its definition."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.decode.drafting.ranking import CandidateRanker, rank_tokens
from omnidraft.decode.sampling.noise import SeededNoise
from omnidraft.models.native.drafter import NativeDrafter
from omnidraft.ports import Sampling
from omnidraft.vocab.alignment import Alignment, PackedLists
from tests.unit.decode.toys import ALIGNMENT, DRAFT_PIECES, TARGET_PIECES
from tests.unit.models.tiny import tiny_model

NOISE = SeededNoise(3, 0, len(TARGET_PIECES))


@pytest.fixture(scope="module", params=["numpy", "kernels"])
def rank(request):
    return rank_tokens if request.param == "numpy" else NativeDrafter(tiny_model("llama"), "float32").rank


def ranker(logits, sampling):
    return CandidateRanker(rank_tokens(logits, ALIGNMENT), ALIGNMENT, sampling)


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
    best = ranker(logits.astype(np.float32), Sampling(temperature)).best(5, weight, NOISE, position)
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
    cold, warm = (ranker(logits, Sampling(temperature)).best(1, 0.0, NOISE, 0)[0] for temperature in (0.5, 2.0))
    assert cold.q == pytest.approx(warm.q)
    assert cold.confidence > cold.q > warm.confidence


@pytest.mark.parametrize("temperature", [1e-307, 5e-324])
def test_the_least_temperatures_rank_like_none_and_leave_numbers(temperature):
    """A confidence that is no number would spoil what all tenants' rounds of a policy share."""
    logits = np.linspace(0.0, 3.0, len(DRAFT_PIECES), dtype=np.float32)
    cold = ranker(logits, Sampling(temperature)).best(3, 1.0, NOISE, 0)
    assert [each.confidence for each in cold] == [1.0, 0.0, 0.0]
    assert cold[0].target_id == ranker(logits, Sampling(0.0)).best(1, 0.0, NOISE, 0)[0].target_id


def test_each_weight_says_what_it_would_have_guessed_first():
    logits = np.zeros(len(DRAFT_PIECES), np.float32)
    ranking = ranker(logits, Sampling(1.0))
    firsts = ranking.first_ids((0.0, 0.5, 1.0), NOISE, 9)
    assert firsts == [ranking.best(1, weight, NOISE, 9)[0].target_id for weight in (0.0, 0.5, 1.0)]


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 20.0])
def test_the_most_probable_tokens_of_a_large_vocabulary_are_those_of_a_sort(spread, rank):
    """Whether few or many logits are close to the largest one."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=40_000).astype(np.float32).round(2) * np.float32(spread)
    firsts = [int(each) for each in rng.integers(0, 60, size=39_000)]
    pieces = [(first,) if first < 50 else () for first in firsts]
    alignment = Alignment("", PackedLists.of(pieces), PackedLists.of([()] * 50))
    expected_D = torch.softmax(torch.tensor(logits).double(), 0).numpy()
    order = [token for token in np.argsort(-logits, kind="stable")[:128].tolist() if token < 39_000 and pieces[token]]
    ranked = rank(logits, alignment)
    assert ranked.max_logit == logits.max()
    assert ranked.draft_ids_K.tolist() == order
    np.testing.assert_allclose(ranked.draft_q_K, expected_D[order], rtol=1e-5)
    q = {target: expected_D[[token for token in order if firsts[token] == target]].sum() for target in range(50)}
    assert sorted(ranked.target_ids_M.tolist()) == sorted(target for target in q if q[target])
    np.testing.assert_allclose(ranked.target_q_M, [q[target] for target in ranked.target_ids_M.tolist()], rtol=1e-5)
    assert np.all(np.diff(ranked.target_q_M) <= 0)
    bests = [next(token for token in order if firsts[token] == target) for target in ranked.target_ids_M.tolist()]
    assert ranked.draft_ids_K[ranked.first_M].tolist() == bests


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_logits_that_are_no_numbers_rank_nothing(broken, rank):
    for at in (0, 7, len(DRAFT_PIECES) - 1):
        logits = np.zeros(len(DRAFT_PIECES), np.float32)
        logits[at] = broken
        ranked = rank(logits, ALIGNMENT)
        assert not np.isfinite(ranked.max_logit)
        assert not len(ranked.draft_ids_K)
    none_left = rank(np.full(len(DRAFT_PIECES), -np.inf, np.float32), ALIGNMENT)
    assert none_left.max_logit == -np.inf
    assert not len(none_left.target_ids_M)
