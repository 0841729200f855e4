"""The recorded answers of the demo: who judges and who teaches, and how the curve over them is shown."""

import io

import pytest
from rich.console import Console

from omnidraft import prompts
from omnidraft.demo import report
from omnidraft.demo.answers import recorded
from omnidraft.demo.curve import CurvePoint
from omnidraft.demo.recorded import HELD_OUT_EVERY, QUESTIONS
from omnidraft.distill.ingest.record_disposition import is_held_out


@pytest.fixture
def points():
    first = CurvePoint(1, 0, 2515, 0.62, 0.0, 0.0, 2.9)
    return [first, CurvePoint(2, 3840, 2515, 0.66, 0.04, 0.006, 3.2), CurvePoint(3, 7680, 2515, 0.71, 0.09, 0.008, 3.4)]


def test_at_least_2000_tokens_judge_and_none_of_them_is_learned():
    held_out, learned = recorded(1000)
    assert sum(len(record.emitted_ids) for record in held_out) >= 2000
    assert len(learned) == 96
    assert all(is_held_out(record, HELD_OUT_EVERY) for record in held_out)
    assert not {record.request_id for record in held_out} & {record.request_id for record in learned}
    assert not {tuple(record.prompt_ids) for record in held_out} & {tuple(record.prompt_ids) for record in learned}


def test_so_many_are_learned_as_are_asked_for_and_all_the_others_still_judge():
    assert [len(part) for part in recorded(7)] == [16, 7]
    assert [len(part) for part in recorded(0)] == [16, 0]


def test_every_recorded_token_has_the_targets_probabilities():
    held_out, learned = recorded(1000)
    for record in [*held_out, *learned]:
        assert record.beliefs.top_ids_EK.shape == (len(record.emitted_ids), 16)


def test_the_questions_are_more_than_are_asked_at_most():
    assert len(prompts.read(QUESTIONS, 64)) == 64


def test_the_table_shows_each_gain_with_its_error_and_bars_that_grow(points):
    output = io.StringIO()
    Console(file=output, width=120).print(report.curve_table(points))
    lines = [line for line in output.getvalue().splitlines() if "version" in line]
    assert "2,515 held-out positions" in output.getvalue()
    assert ["+0.040 ± 0.006" in line for line in lines] == [False, True, False]
    lengths = [line.count("█") for line in lines]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) == 3
