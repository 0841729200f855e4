"""The noise of a text: fixed for ever, even for the rarest token, the same for whoever asks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.decode.sampling.noise import SeededNoise
from tests.unit.decode.checks import QWEN_IDS, tail_wins
from tests.unit.decode.toys import slow_uniform

GOLDEN = [
    0.7387163675734378,
    0.5506997838229231,
    0.5065448210508724,
    2.3108642180024956,
    0.09010616659624301,
    1.4131194339315798,
    0.20576467754128955,
    0.22648101453252353,
]
GOLDEN_LARGE = [0.5309343241208998, 0.5907459800726911, 1.436783020915479]


def test_the_words_never_change():
    """Golden: a text that a seed gave once, it gives in every later version."""
    noise = SeededNoise(2**64 - 1, 3, 8)
    assert noise.exponentials(17, np.arange(8)).tolist() == GOLDEN
    assert SeededNoise(0, 0, QWEN_IDS).exponentials(5, np.array([0, 1, 151_935])).tolist() == GOLDEN_LARGE


def test_every_word_belongs_to_its_seed_choice_position_and_id():
    for seed, choice, position in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 9)]:
        got = SeededNoise(seed, choice, 7).exponentials(position, np.arange(7))
        expected = [-np.log1p(-slow_uniform(seed, choice, position, token)) for token in range(7)]
        assert got.tolist() == expected


def test_positions_can_be_asked_in_any_order_and_again():
    noise = SeededNoise(3, 0, 50)
    first = [noise.exponentials(position, np.arange(50)) for position in range(80)]
    again = [noise.exponentials(position, np.arange(50)) for position in reversed(range(80))]
    assert np.array_equal(first, again[::-1])


@settings(max_examples=100)
@given(st.integers(0, 2**64 - 1), st.integers(0, 100), st.data())
def test_a_draw_is_the_race_by_definition_over_any_subset(seed, position, data):
    """The noise of an id does not depend on who else runs; so leaving a loser out never changes the winner."""
    rng = np.random.default_rng(seed % 1000)
    p_V = rng.dirichlet(np.full(40, 0.3)) + 1e-300
    noise = SeededNoise(seed, 0, 40)
    winner = noise.draw(np.arange(40), p_V, position)
    times = noise.exponentials(position, np.arange(40)) / p_V
    assert winner == int(times.argmin())
    others = data.draw(st.sets(st.integers(0, 39)))
    subset = np.array(sorted(others | {winner}))
    assert noise.draw(subset, p_V[subset] / p_V[subset].sum(), position) == winner


def test_the_order_of_the_ids_does_not_matter():
    noise, ids = SeededNoise(5, 0, 30), np.arange(30)
    p_M = np.random.default_rng(0).dirichlet(np.ones(30))
    for position in range(20):
        order = np.random.default_rng(position).permutation(30)
        assert noise.draw(ids[order], p_M[order], position) == noise.draw(ids, p_M, position)


class FixedWords(SeededNoise):
    """The same uniform number for every id."""

    def __init__(self, uniform: float, vocab_size: int) -> None:
        super().__init__(0, 0, vocab_size)
        self._uniforms[0] = np.full(vocab_size, uniform)


@pytest.mark.parametrize("uniform", [2.0**-53, 3 * 2.0**-53, 2.0**-50, 0.3, 1 - 2.0**-53])
def test_the_smallest_and_the_largest_word_still_have_a_winner(uniform):
    noise = FixedWords(uniform, 4)
    assert noise.draw(np.arange(4), np.array([0.1, 0.3, 0.3, 0.3]), 0) == 1
    for p in np.linspace(0.01, 1.0, 97):
        assert noise.draw(np.array([2]), np.array([p]), 0) == 2


def test_a_tail_of_a_millionth_is_drawn_once_in_a_million_at_full_vocabulary_size():
    """300 seeds: an honest draw from the tail has probability 3e-4 (and the seeds are fixed)."""
    assert tail_wins(SeededNoise, 300) == 0


def test_a_draw_follows_p_at_full_vocabulary_size():
    """300 seeds, half of the mass on one id, a quarter on the next, a quarter spread over all others.

    Each share of an honest sample lies within 0.12 of p with probability above 1 - 1e-4 (4 standard deviations).
    """
    p_V = np.full(QWEN_IDS, 0.25 / (QWEN_IDS - 2))
    p_V[[1000, 99_999]] = 0.5, 0.25
    ids = np.arange(QWEN_IDS)
    drawn = np.array([SeededNoise(seed, 0, QWEN_IDS).draw(ids, p_V, 3) for seed in range(300)])
    assert (drawn == 1000).mean() == pytest.approx(0.5, abs=0.12)
    assert (drawn == 99_999).mean() == pytest.approx(0.25, abs=0.12)
    rest = drawn[(drawn != 1000) & (drawn != 99_999)]
    assert len(set(rest.tolist())) > 0.95 * len(rest)
    assert rest.mean() / QWEN_IDS == pytest.approx(0.5, abs=0.12)


def test_a_draw_follows_p_over_ten_thousand_seeds():
    """Total variation of an honest sample of this size over 4 tokens exceeds 0.03 with probability below 1e-4 (and
    the seeds are fixed)."""
    p_M, ids = np.array([0.5, 0.3, 0.15, 0.05]), np.arange(4)
    drawn = [SeededNoise(seed, 0, 4).draw(ids, p_M, 6) for seed in range(10_000)]
    share = np.bincount(drawn, minlength=4) / 10_000
    assert np.abs(share - p_M).sum() / 2 < 0.03


def test_neighbouring_positions_choices_and_seeds_are_independent():
    """20,000 ids: the correlation of independent noises exceeds 0.04 with probability below 1e-7."""
    ids = np.arange(20_000)
    rows = [
        SeededNoise(seed, choice, 20_000).exponentials(position, ids)
        for seed, choice, position in [(1, 0, 5), (2, 0, 5), (1, 1, 5), (1, 0, 6), (0, 1, 5)]
    ]
    assert np.abs(np.corrcoef(rows) - np.eye(5)).max() < 0.04
    assert np.mean(rows) == pytest.approx(1.0, abs=0.02)


def test_what_was_drawn_is_not_kept():
    """A text of 16 beside others may have a vocabulary of a quarter of a million, and goes on for thousands."""
    noise, ids = SeededNoise(3, 0, 50), np.arange(50)
    for position in range(20, 40):
        noise.exponentials(position, ids)
    noise.draw(ids, np.full(50, 0.02), 35)
    assert sorted(noise._uniforms) == [35, 36, 37, 38, 39]
