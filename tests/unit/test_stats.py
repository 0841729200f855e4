"""The error of a paired change of agreement, against the spread over repeated draws of requests."""

import numpy as np
import pytest

from omnidraft.distill.ingest.record_disposition import is_held_out
from omnidraft.stats import paired_standard_error
from omnidraft.traces.request_ids import answer_id
from tests.trace_records import make_record

Pairs = list[tuple[str, np.ndarray, np.ndarray]]


def hits(num_agreed: int, num_scored: int) -> np.ndarray:
    return np.arange(num_scored) < num_agreed


def drawn(rng: np.random.Generator, num_requests: int) -> Pairs:
    """Requests of several lengths, each easier or harder than others for the later snapshot."""
    pairs = []
    for request in range(num_requests):
        gain = rng.normal(0.03, 0.05)
        for _ in range(rng.integers(1, 3)):
            length = int(rng.integers(10, 80))
            before, after = rng.binomial(length, 0.6), rng.binomial(length, 0.6 + gain)
            pairs.append((f"r{request}", hits(before, length), hits(after, length)))
    return pairs


def change(pairs: Pairs) -> float:
    return sum(int(b.sum()) - int(a.sum()) for _, a, b in pairs) / sum(len(b) for _, _, b in pairs)


def test_it_is_the_spread_of_the_change_over_repeated_draws() -> None:
    rng = np.random.default_rng(0)
    draws = [drawn(rng, 40) for _ in range(600)]
    predicted = float(np.mean([paired_standard_error(pairs) for pairs in draws]))
    spread = float(np.std([change(pairs) for pairs in draws]))
    assert predicted == pytest.approx(spread, rel=0.1)


def test_segments_of_one_request_are_one_draw() -> None:
    whole = [
        ("a", hits(10, 20), hits(14, 20)),
        ("b", hits(9, 20), hits(9, 20)),
        ("c", hits(3, 9), hits(3, 9)),
    ]
    halves = whole[1:]
    halves += [("a", hits(5, 10), hits(7, 10)), ("a", hits(5, 10), hits(7, 10))]
    assert paired_standard_error(halves) == pytest.approx(paired_standard_error(whole))


def test_one_request_says_nothing_of_the_spread() -> None:
    assert paired_standard_error([("a", hits(1, 9), hits(3, 9)), ("a", hits(1, 9), hits(3, 9))]) is None
    assert paired_standard_error([("a", hits(1, 9), hits(3, 9)), ("b", hits(0, 0), hits(0, 0))]) is None


def test_several_answers_of_one_request_are_one_draw_and_on_one_side() -> None:
    """Four answers at temperature 0 are one text four times."""
    for number in range(200):
        first = make_record(f"request{number}")
        answers = [first, *(make_record(answer_id(first.request_id, choice)) for choice in range(1, 4))]
        assert len({is_held_out(each, 4) for each in answers}) == 1
    assert len({each.request_id for each in answers}) == 4
    assert paired_standard_error([(each.request, hits(1, 9), hits(3, 9)) for each in answers]) is None
