"""Stats of texts: agreement by position, speed without the first step, sums that add up."""

from types import SimpleNamespace

import pytest

from omnidraft.decode import step_stats
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.ports import DraftTree, Source, Step, Timings


def step(drafted: list[int], emitted: list[int], num_accepted: int, *, source: Source = Source.DIRECT) -> Step:
    tree = DraftTree.chain(0, drafted, [source] * len(drafted), [-1.0] * len(drafted))
    path = tuple(range(1, num_accepted + 1))
    return Step(tree, tuple(emitted), path, "", None, Timings(0.5, 0.25, 0.125), None)


def figures_of(*steps: Step) -> DecodeStats:
    stats = DecodeStats()
    for each in steps:
        stats.take(each)
    return stats


def test_agreement_by_depth_counts_passes_that_came_so_far() -> None:
    stats = figures_of(
        step([1, 2, 3], [1, 9], 1), step([1, 2], [1, 2, 9], 2), step([1], [9], 0), step([], [9], 0), step([1], [1], 1)
    )
    assert stats.scored_by_depth == {1: 4, 2: 2}
    assert stats.agreed_by_depth == {1: 3, 2: 1}
    assert stats.agreement_by_depth == [3 / 4, 1 / 2]
    assert (stats + stats).agreement_by_depth == stats.agreement_by_depth


def test_any_accepted_sibling_agrees_at_its_depth() -> None:
    sources = (None, Source.DIRECT, Source.DIRECT, Source.DIRECT)
    tree = DraftTree((0, 5, 6, 7), (0, 0, 0, 2), sources, (0.0, -1.0, -2.0, -1.0))
    second = Step(tree, (6, 9), (2,), "", None, Timings(), None)
    first = Step(tree, (5, 9), (1,), "", None, Timings(), None)
    assert figures_of(second, first).scored_by_depth == {1: 2, 2: 1}
    assert figures_of(second, first).agreed_by_depth == {1: 2}


def test_speed_leaves_out_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_stats, "time", SimpleNamespace(perf_counter=iter([3.0, 3.5]).__next__))
    stats = DecodeStats(_started=1.0)
    stats.take(step([], [1, 2, 3], 0))
    assert (stats.first_token_s, stats.tokens_per_s) == (2.0, 0.0)
    stats.take(step([], [4, 5], 0))
    assert (stats.num_later_tokens, stats.decode_s, stats.tokens_per_s) == (2, 0.5, 4.0)


def test_two_texts_together_have_the_sums_of_both() -> None:
    one = figures_of(step([1, 2], [1, 9], 1), step([], [3], 0))
    other = figures_of(step([1], [1, 2], 1, source=Source.MERGE), step([4], [5], 0))
    both = one + other
    assert (both.num_tokens, both.num_passes, both.num_later_tokens) == (6, 4, 2)
    assert (both.num_scored, both.num_agreed) == (4, 2)
    assert (both.draft_s, both.target_s, both.other_s) == (2.0, 1.0, 0.5)
    assert both.decode_s == one.decode_s + other.decode_s
    assert both.accepted_by_source == {"direct": 1, "merge": 1}
    assert both.accepted_per_pass == {1: 2, 0: 2}
    assert both.tokens_per_pass == 1.5
    assert (one.num_tokens, one.accepted_by_source) == (3, {"direct": 1})
