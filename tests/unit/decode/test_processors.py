"""Shaping a distribution, against the definitions written out slowly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.decode.processors import shape
from omnidraft.ports import Sampling
from tests.unit.decode.toys import slow_shape

SAMPLINGS = st.builds(
    Sampling,
    st.sampled_from([0.0, 0.2, 1.0, 1.7]),
    st.none() | st.integers(1, 60),
    st.none() | st.floats(2**-7, 1.0, width=32),  # within 1e-15 of a sum of probabilities the order of adding decides
)


def shaped(logits: np.ndarray, sampling: Sampling) -> dict[int, float]:
    ids, p = shape(logits, sampling)
    return dict(zip(ids.tolist(), p.tolist(), strict=True))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), SAMPLINGS, st.booleans())
def test_fast_equals_slow(seed, sampling, has_ties):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, 40).astype(np.float32)
    if has_ties:
        logits = np.round(logits)
    expected = slow_shape(logits.tolist(), sampling)
    got = shaped(logits, sampling)
    assert got.keys() == expected.keys()
    assert [got[token] for token in expected] == pytest.approx(list(expected.values()), rel=1e-9)


@pytest.mark.parametrize("top_p", [0.5, 0.95, 0.9999])
def test_a_nucleus_wider_than_the_first_guess_is_found_whole(top_p):
    logits = np.random.default_rng(1).normal(0, 0.1, 5000).astype(np.float32)
    expected = slow_shape(logits.tolist(), Sampling(1.0, top_p=top_p))
    assert len(expected) > 1024
    assert shaped(logits, Sampling(1.0, top_p=top_p)).keys() == expected.keys()


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.3)], ids=str)
def test_of_equal_tokens_the_lower_ids_stay(sampling):
    assert min(shaped(np.array([0.0, 5.0, 5.0, 5.0], np.float32), sampling)) == 1
    assert 3 not in shaped(np.array([0.0, 5.0, 5.0, 5.0], np.float32), sampling)


def test_top_p_is_taken_of_what_top_k_left():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    assert list(shaped(logits, Sampling(1.0, top_k=2, top_p=0.5))) == [0]  # 0.4 of 0.7 is more than half
    assert list(shaped(logits, Sampling(1.0, top_p=0.5))) == [0, 1]


def test_impossible_tokens_cannot_be_drawn():
    got = shaped(np.array([0.0, -np.inf, -1000.0, 0.0], np.float32), Sampling(1.0))
    assert got == {0: 0.5, 3: 0.5}
    assert shaped(np.array([0.0, -np.inf, 0.0], np.float32), Sampling(1.0, top_k=3)).keys() == {0, 2}


@pytest.mark.parametrize("temperature", [1e-306, 1e-30, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature):
    assert shaped(np.array([40.0, 39.0, -3.0], np.float32), Sampling(temperature)) == {0: 1.0}


def test_a_huge_temperature_is_uniform():
    got = shaped(np.array([40.0, 39.0, -3.0], np.float32), Sampling(1e300))
    assert list(got.values()) == pytest.approx([1 / 3] * 3)


def test_probabilities_are_float64_and_sum_to_one_at_full_vocabulary_size():
    logits = np.random.default_rng(0).normal(0, 4, 151_936).astype(np.float32)
    for sampling in (Sampling(1.0), Sampling(0.7, top_p=0.95), Sampling(1.0, top_k=50)):
        ids, p = shape(logits, sampling)
        assert p.dtype == np.float64
        assert p.sum() == pytest.approx(1.0, abs=1e-12)
        assert len(set(ids.tolist())) == len(ids)
