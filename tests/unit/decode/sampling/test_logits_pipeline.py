"""Shaping a distribution, against the definitions written out slowly."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

from omnidraft.decode.sampling.logits_pipeline import LogitsPipeline, sampling_distribution
from omnidraft.errors import ContractError
from omnidraft.ports import Request, Sampling
from tests.unit.decode.toys import slow_logits, slow_shape

SAMPLINGS = st.builds(
    Sampling,
    st.sampled_from([0.0, 0.2, 1.0, 1.7]),
    top_k=st.none() | st.integers(1, 60),
    top_p=st.none() | st.floats(2**-7, 1.0, width=32),  # within 1e-15 of a sum, the order of adding decides
    min_p=st.none() | st.sampled_from([0.0, 0.013, 0.2, 0.9, 1.0]),
)
HISTORIES = st.lists(st.integers(0, 39), max_size=12)
PENALISED = st.builds(
    Sampling,
    st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3, 40.0]),
    presence_penalty=st.sampled_from([0.0, -2.0, 0.7, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -2.0, 0.3, 2.0]),
    logit_bias=st.dictionaries(st.integers(0, 39), st.floats(-100, 100), max_size=5),
)


def shaped(logits: np.ndarray, sampling: Sampling) -> dict[int, float]:
    ids, p = sampling_distribution(logits, sampling)
    return dict(zip(ids.tolist(), p.tolist(), strict=True))


@settings(max_examples=200)
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


def sorted_whole(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Top-k and top-p in the same arithmetic, with the vocabulary sorted whole."""
    x_V = torch.from_numpy(logits).double()
    x_V -= x_V.max()
    p_V = torch.softmax(x_V.div_(sampling.temperature), 0).numpy()
    ids = np.argsort(-p_V, kind="stable")[: sampling.top_k]
    ids = ids[p_V[ids] > 0]
    allowed_V = np.zeros_like(p_V)
    allowed_V[ids] = p_V[ids] / p_V[ids].sum()
    front = np.argsort(-allowed_V, kind="stable")
    front = front[: int(np.searchsorted(np.cumsum(allowed_V[front]), sampling.top_p)) + 1]
    front = front[allowed_V[front] > 0]
    return front, p_V[front] / p_V[front].sum()


@settings(max_examples=300)
@given(
    st.integers(0, 10_000),
    st.integers(1, 3000),
    st.floats(2**-7, 1 - 2**-9, width=32),
    st.sampled_from([0.01, 0.3, 1.0, 3.0]),
    st.booleans(),
)
def test_top_k_with_top_p_are_those_of_sorting_everything_bit_for_bit(seed, top_k, top_p, temperature, has_ties):
    logits = np.random.default_rng(seed).normal(0, 3, 2500).astype(np.float32)
    if has_ties:
        logits = np.round(logits)
    sampling = Sampling(temperature, top_k=top_k, top_p=top_p)
    for ours, whole in zip(sampling_distribution(logits, sampling), sorted_whole(logits, sampling), strict=True):
        assert ours.tobytes() == whole.tobytes()


@pytest.mark.parametrize(
    "sampling", [Sampling(0.8, top_k=50, top_p=0.9), Sampling(0.01, top_k=5000, top_p=0.9)], ids=str
)
def test_top_k_with_top_p_sorts_what_top_k_left_and_no_vocabulary(sampling, monkeypatch):
    sizes, whole = [], np.argsort
    monkeypatch.setattr(np, "argsort", lambda values, **options: sizes.append(len(values)) or whole(values, **options))
    sampling_distribution(np.random.default_rng(0).normal(0, 3, 151_936).astype(np.float32), sampling)
    assert 0 < max(sizes) <= sampling.top_k


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
        ids, p = sampling_distribution(logits, sampling)
        assert p.dtype == np.float64
        assert p.sum() == pytest.approx(1.0, abs=1e-12)
        assert len(set(ids.tolist())) == len(ids)


# ---------------------------------------------------------------- what depends on the history


def pipeline_after(sampling: Sampling, prompt: list[int], said: list[int]) -> LogitsPipeline:
    pipeline = LogitsPipeline(Request(tuple(prompt), (), 100, sampling))
    for token in said:
        pipeline.take(token)
    return pipeline


@settings(max_examples=200)
@given(st.integers(0, 10_000), PENALISED, HISTORIES, HISTORIES, st.booleans())
def test_penalties_and_bias_equal_their_definitions(seed, sampling, prompt, said, has_ties):
    logits = np.random.default_rng(seed).normal(0, 3, 40).astype(np.float32)
    if has_ties:
        logits = np.round(logits)
    ids, p = pipeline_after(sampling, prompt, said).distribution(logits)
    expected = slow_shape(slow_logits(logits.tolist(), sampling, prompt, said), sampling)
    assert dict(zip(ids.tolist(), p.tolist(), strict=True)) == pytest.approx(expected, rel=1e-9)


def test_the_row_of_the_target_is_left_as_it_is():
    """Traces read the same memory."""
    logits = np.array([1.0, 2.0], np.float32)
    pipeline_after(Sampling(1.0, logit_bias={0: 5.0}, repetition_penalty=3.0), [0, 1], [1]).distribution(logits)
    assert logits.tolist() == [1.0, 2.0]


# ---------------------------------------------------------------- as transformers has it

PROMPT, SAID = [3, 17, 17], [5, 3, 29]
THEIRS = {
    "top-k": (Sampling(1.0, top_k=7), theirs.TopKLogitsWarper(7)),
    "top-p": (Sampling(1.0, top_p=0.8), theirs.TopPLogitsWarper(0.8)),
    "min-p": (Sampling(1.0, min_p=0.1), theirs.MinPLogitsWarper(0.1)),
    "repetition penalty": (Sampling(1.0, repetition_penalty=1.7), theirs.RepetitionPenaltyLogitsProcessor(1.7)),
    "temperature": (Sampling(0.6), theirs.TemperatureLogitsWarper(0.6)),
    "bias": (Sampling(1.0, logit_bias={4: 2.5}), theirs.SequenceBiasLogitsProcessor([[[4], 2.5]])),
}


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("seed", range(2))
def test_each_processor_equals_that_of_transformers(name, seed):
    sampling, processor = THEIRS[name]
    logits = np.random.default_rng(seed).normal(0, 2, 40).astype(np.float32)
    expected_V = torch.softmax(processor(torch.tensor([PROMPT + SAID]), torch.from_numpy(logits)[None]), dim=-1)[0]
    ids, p = pipeline_after(sampling, PROMPT, SAID).distribution(logits)
    assert sorted(ids.tolist()) == expected_V.nonzero()[:, 0].tolist()
    assert p == pytest.approx(expected_V[ids].numpy(), rel=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5e-324])
@pytest.mark.parametrize("broken", [[0.0, float("nan"), 1.0], [0.0, float("inf"), 1.0], [-float("inf")] * 3], ids=str)
@pytest.mark.parametrize("has_processors", [False, True])
def test_logits_that_are_no_numbers_are_never_drawn_from(temperature, broken, has_processors):
    """A bias of -100 on the broken one hides nothing."""
    sampling = Sampling(temperature, logit_bias={1: -100.0} if has_processors else {}, top_k=2)
    with pytest.raises(ContractError, match=r"the target's largest logit is (nan|inf|-inf)"):
        LogitsPipeline(Request((0,), (), 1, sampling)).distribution(np.array(broken, np.float32))


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1.0])
def test_single_logits_of_minus_infinity_are_only_never_drawn(temperature):
    assert shaped(np.array([-np.inf, 1.0, -np.inf], np.float32), Sampling(temperature)) == {1: 1.0}
