"""Weighted sums of losses as configuration spells them."""

import pytest

from omnidraft.config import LearnerSettings
from omnidraft.distill.training.losses import LOSSES, parse
from omnidraft.errors import ConfigError


def test_a_sum_is_read_with_its_weights() -> None:
    assert parse("dm + 0.2 ngram") == (("dm", 1.0), ("ngram", 0.2))
    assert parse("0.5*dm+0.5 * dm_reverse") == (("dm", 0.5), ("dm_reverse", 0.5))


@pytest.mark.parametrize(
    "text", ["", "dm +", "dmm", "dm + 0.2", "-1 dm", "nan dm", "inf dm", "x dm", "1 2 dm", "dm + dm"]
)
def test_a_sum_that_cannot_be_meant_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="loss"):
        parse(text)


def test_the_setting_names_every_loss() -> None:
    described = LearnerSettings.model_fields["loss"].description
    assert described is not None
    words = described.replace(",", " ").replace(".", " ").replace("(", " ").replace(":", " ").split()
    assert set(LOSSES) <= set(words)
