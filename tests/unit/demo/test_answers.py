"""The recorded answers of the demo: who judges and who teaches, and how the curve over them is shown."""

from omnidraft import prompts
from omnidraft.demo.answers import recorded
from omnidraft.demo.recorded import HELD_OUT_EVERY, QUESTIONS
from omnidraft.distill.ingest.record_disposition import is_held_out


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
