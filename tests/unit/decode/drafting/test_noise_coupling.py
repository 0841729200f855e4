"""The weight of the noise: whichever would have guessed first most often."""

from omnidraft.decode.drafting.noise_coupling import NoiseCoupling


def test_the_first_weight_is_used_until_another_was_right_more_often():
    weights = NoiseCoupling((0.0, 1.0))
    assert weights.best(0.7) == 0.0
    weights.update(0.7, [4, 5], 5)
    assert weights.best(0.7) == 1.0


def test_temperatures_are_kept_apart():
    weights = NoiseCoupling((0.0, 1.0))
    weights.update(1.0, [4, 5], 5)
    assert weights.best(0.3) == 0.0


def test_what_was_right_long_ago_fades():
    weights = NoiseCoupling((0.0, 1.0))
    for _ in range(1000):
        weights.update(1.0, [4, None], 4)
    for _ in range(200):
        weights.update(1.0, [4, 5], 5)
    assert weights.best(1.0) == 1.0
