"""Samples of the distribution pass at any shape, others do not; every error probability is stated.

The sampling test passes the loop's own samples at few passes, and fails a biased loop or a wrong distribution.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from omnidraft.decode.decoder import Decoder
from omnidraft.decode.sampling.noise import SeededNoise
from omnidraft.exactness.distribution_test import Cell, SamplingTest, total_variation, tv_limit
from omnidraft.ports import Proposer, Sampling
from omnidraft.testing.toy_models import ToyTarget
from tests.unit.decode.planted_bugs import RootRowForAll
from tests.unit.decode.toys import PROPOSERS, TABLE, TARGET_TOKENIZER, make_drafter, make_request, toy_decoder
from tests.unit.exactness.rounded import rounded_decoder

LAWS = {
    "one cell": np.array([1.0]),
    "nearly one cell": np.array([0.99, 0.01]),
    "two": np.array([0.5, 0.5]),
    "zipf": 1 / np.arange(1, 51) / (1 / np.arange(1, 51)).sum(),
    "flat": np.full(100, 0.01),
}
NUM_SAMPLES = 300


def cells(p_C: np.ndarray) -> dict[Cell, float]:
    return {(index,): float(p) for index, p in enumerate(p_C)}


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("num_samples", [100, 1000])
def test_honest_samples_stay_below_the_limit(name: str, num_samples: int) -> None:
    """10,000 draws of multinomial counts; one is above the limit with probability below 1e-6 (seeds are fixed). And
    the limit is no empty promise: it is at most 3.5 times what the worst of them showed, plus 15 samples."""
    p_C = LAWS[name]
    counts_MC = np.random.default_rng(0).multinomial(num_samples, p_C, size=10_000)
    tv_M = np.abs(counts_MC / num_samples - p_C).sum(axis=1) / 2
    allowed = tv_limit(cells(p_C), num_samples)
    assert tv_M.max() <= allowed
    assert allowed <= 3.5 * tv_M.max() + 15 / num_samples


def test_the_distance_counts_cells_that_were_not_expected() -> None:
    p = {(1,): 0.5, (2,): 0.25}
    assert total_variation(p, Counter({(1,): 50, (2,): 25, (3,): 25}), 100) == pytest.approx(0.0)
    assert total_variation(p, Counter({(1,): 50, (3,): 50}), 100) == pytest.approx(0.25)
    assert total_variation(p, Counter({(3,): 100}), 100) == pytest.approx(0.75)


def test_a_distribution_off_by_a_quarter_is_detected_with_a_thousand_samples() -> None:
    """A Zipf distribution at total variation 0.25 fails in 100 of 100 experiments (each misses with p below 1e-3)."""
    p_C = LAWS["zipf"]
    other_C = p_C.copy()
    other_C[0] += 0.25
    other_C[1:] *= (1 - other_C[0]) / other_C[1:].sum()
    allowed = tv_limit(cells(p_C), 1000)
    for counts_C in np.random.default_rng(1).multinomial(1000, other_C, size=100):
        counts = Counter({(index,): int(count) for index, count in enumerate(counts_C)})
        assert total_variation(cells(p_C), counts, 1000) > allowed


def test_lower_odds_and_fewer_samples_allow_more() -> None:
    p = cells(LAWS["zipf"])
    assert tv_limit(p, 1000, 1e-9) > tv_limit(p, 1000, 1e-6) > tv_limit(p, 4000, 1e-6)


class CountingTarget(ToyTarget):
    """Counts its passes."""

    num_passes = 0

    def open(self, prompt_ids, max_new_tokens, mode):
        session = super().open(prompt_ids, max_new_tokens, mode)
        score = session.score

        def counted(tree):
            self.num_passes += 1
            return score(tree)

        session.score = counted
        return session


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.0, top_k=3)])
def test_honest_decoding_follows_the_distribution_with_every_proposer(
    any_proposer: Proposer, sampling: Sampling
) -> None:
    """A false alarm has odds of 2e-6 (and the seeds are fixed)."""
    results = SamplingTest(toy_decoder(), any_proposer).run(make_request(sampling), NUM_SAMPLES, rounding=0.0)
    assert [result.position for result in results] == [1, 2]
    for result in results:
        assert result.passed, result
        assert result.samples == NUM_SAMPLES
        assert result.logit_difference == result.rounding == 0.0
        assert result.tv_limit < 0.3


@pytest.mark.parametrize(("noise_weight", "most"), [(0.0, 60), (1.0, 160)])
def test_many_samples_cost_few_passes(noise_weight: float, most: int) -> None:
    """A drafter that looks at the noise makes several trees for one text."""
    target = CountingTarget(TABLE)
    proposer = make_drafter(noise_weight=noise_weight)
    SamplingTest(toy_decoder().with_target(target), proposer).run(
        make_request(Sampling(1.0)), NUM_SAMPLES, rounding=0.0
    )
    assert target.num_passes < most


class HalfTheFirst(SeededNoise):
    """Planted: the first of two equally seeded races is always won by the most probable token, half of the time."""

    def draw(self, ids_M, p_M, position):
        drawn = super().draw(ids_M, p_M, position)
        return int(ids_M[np.argmax(p_M)]) if int(self._key[0]) % 2 else drawn


@pytest.mark.parametrize("proposer", ["good tree", "coupled"])
def test_noise_that_favours_some_token_is_found(proposer: str) -> None:
    """Every draw of half of the seeds is greedy: total variation (1 - max p) / 2, far beyond chance."""
    decoder = Decoder(ToyTarget(TABLE), TARGET_TOKENIZER.vocabulary, noise=HalfTheFirst)
    results = SamplingTest(decoder, PROPOSERS[proposer]).run(make_request(Sampling(1.0)), NUM_SAMPLES, rounding=0.0)
    assert not all(result.passed for result in results)
    assert max(result.tv - result.tv_limit for result in results) > 0


class Flattering(ToyTarget):
    """Planted: what was drafted becomes likelier."""

    def open(self, prompt_ids, max_new_tokens, mode):
        session = super().open(prompt_ids, max_new_tokens, mode)
        score = session.score

        def flattered(tree):
            logits_NV = score(tree).clone()
            for node in range(1, len(tree)):
                logits_NV[tree.parents[node], tree.tokens[node]] += 2.0
            return logits_NV

        session.score = flattered
        return session


@pytest.mark.parametrize("proposer", ["good", "bad"])
def test_probabilities_that_depend_on_the_draft_are_found(proposer: str) -> None:
    decoder = toy_decoder().with_target(Flattering(TABLE))
    results = SamplingTest(decoder, PROPOSERS[proposer]).run(make_request(Sampling(1.0)), NUM_SAMPLES, rounding=0.5)
    assert not any(result.passed for result in results)
    assert results[0].logit_difference == pytest.approx(2.0)
    assert max(result.tv - (result.tv_limit - result.rounding) for result in results) > 0


def test_a_second_token_from_the_wrong_row_is_found() -> None:
    """The first token's distribution is right, the second's is not; its logits are too far from plain's as well."""
    first, second = SamplingTest(toy_decoder().with_target(RootRowForAll(TABLE)), PROPOSERS["good tree"]).run(
        make_request(Sampling(1.0)), NUM_SAMPLES, rounding=0.5
    )
    assert first.passed
    assert not second.passed
    assert second.logit_difference > second.logit_limit


def test_rounding_is_allowed_for_by_what_it_changes() -> None:
    """Two ways to round give two distributions; their distance is computed and no more than that is allowed."""
    results = SamplingTest(rounded_decoder(0.3), PROPOSERS["good tree"]).run(
        make_request(Sampling(1.0)), NUM_SAMPLES, rounding=0.7
    )
    for result in results:
        assert result.passed
        assert 0 < result.rounding < 0.4
        assert result.tv_limit == pytest.approx(result.rounding, abs=0.25)
    strict = SamplingTest(rounded_decoder(0.3), PROPOSERS["good tree"]).run(
        make_request(Sampling(1.0)), NUM_SAMPLES, rounding=0.0
    )
    assert not any(result.passed for result in strict)


def test_the_prompt_that_leaves_most_open_is_chosen() -> None:
    requests = [replace(make_request(Sampling(1.0)), prompt_ids=(token, token)) for token in range(2, 12)]
    log_p = [TABLE.logits(request.prompt_ids).log_softmax(-1) for request in requests]
    entropies = [float(-(each.exp() * each).sum()) for each in log_p]
    chosen = SamplingTest(toy_decoder(), PROPOSERS["empty"]).highest_entropy(requests)
    assert requests.index(chosen) == int(np.argmax(entropies))
