"""Which of the drafted nodes teach the head, and behind which draft id each was guessed."""

from dataclasses import replace

import numpy as np
import pytest

from omnidraft.distill.examples.training_example import ExampleBuilder, TrainingExample
from omnidraft.traces.checks import check
from omnidraft.traces.record import SOURCES, TraceRecord
from tests.tiny_pair import no_rounds
from tests.unit.distill.drafted import RIGHT_LOG_Q, WRONG_LOG_Q, with_drafts

TEXT = "The water of the river goes into the sea, and the river itself stays."


def read(pair, record: TraceRecord) -> TrainingExample:
    return ExampleBuilder(pair.draft, pair.target.vocabulary, pair.alignment, max_tokens=256).build(record)


def test_every_guess_stands_behind_the_draft_id_it_was_drafted_from(pair) -> None:
    """The text up to there, in bytes, is the text before the emitted token that was drawn in its place."""
    record = with_drafts(pair, pair.record(text=TEXT), seed=1)
    check(record)
    positions = read(pair, record)
    vocabulary, prompt = pair.target.vocabulary, len(record.drafter_prompt_ids)
    befores = {vocabulary.spell(record.emitted_ids[:end].tolist()) for end in range(len(record.emitted_ids) + 1)}
    assert len(positions.guesses.at_G) > 5
    for at in positions.guesses.at_G:
        assert pair.draft.vocabulary.spell(positions.ids_T[prompt : at + 1].tolist()) in befores
    assert set(positions.guesses.at_G) <= set(positions.at_P)


def test_right_and_wrong_guesses_are_told_apart_with_what_the_drafter_thought(pair) -> None:
    record = with_drafts(pair, pair.record(text=TEXT), seed=2)
    guesses = read(pair, replace(record, temperature=0.0)).guesses
    is_right_G = guesses.log_q_G == np.float32(RIGHT_LOG_Q)
    assert is_right_G.any()
    assert (guesses.log_q_G[~is_right_G] == np.float32(WRONG_LOG_Q)).all()
    assert guesses.right_G[is_right_G].all()
    assert np.array_equal(guesses.soft_G, guesses.right_G)
    believed = read(pair, replace(record, temperature=1.0, top_p=None)).guesses
    assert believed.soft_G[is_right_G] == pytest.approx(0.7, abs=0.02)  # a merge's beginning may share with others
    assert np.array_equal(believed.right_G, guesses.right_G)


def test_a_guess_that_looked_at_the_targets_noise_is_as_right_as_it_was(pair) -> None:
    """The target's chance is that of a guess that knows nothing of the draw."""
    record = replace(with_drafts(pair, pair.record(text=TEXT), seed=2), temperature=1.0, top_p=None)
    looked = read(pair, replace(record, noise_weight=0.5)).guesses
    assert np.array_equal(looked.soft_G, looked.right_G)
    for noise_weight in (None, 0.0):
        guesses = read(pair, replace(record, noise_weight=noise_weight)).guesses
        assert not np.array_equal(guesses.soft_G, guesses.right_G)


def test_what_the_drafter_did_not_choose_teaches_nothing(pair) -> None:
    record = with_drafts(pair, pair.record(text=TEXT), are_right=True)
    rounds = record.rounds
    lookups = replace(rounds, sources_M=np.full_like(rounds.sources_M, SOURCES.index("lookup")))
    assert not len(read(pair, replace(record, rounds=lookups)).guesses.at_G)
    splits = replace(rounds, sources_M=np.full_like(rounds.sources_M, SOURCES.index("split")))
    num_first = int((rounds.parents_M == 0).sum())
    assert 0 < num_first < len(rounds.parents_M)
    assert len(read(pair, replace(record, rounds=splits)).guesses.at_G) <= num_first


def test_guesses_outside_the_window_are_left_out(pair) -> None:
    record = with_drafts(pair, pair.record(text=TEXT))
    reader = ExampleBuilder(pair.draft, pair.target.vocabulary, pair.alignment, max_tokens=12)
    cut, whole = reader.build(record), read(pair, record)
    assert 0 < len(cut.guesses.at_G) < len(whole.guesses.at_G)
    shift = len(whole.ids_T) - len(cut.ids_T)
    num = len(cut.guesses.at_G)
    assert np.array_equal(cut.guesses.at_G + shift, whole.guesses.at_G[-num:])
    assert np.array_equal(cut.guesses.soft_G, whole.guesses.soft_G[-num:])


def test_a_record_without_drafts_has_no_guesses(pair) -> None:
    assert not len(read(pair, pair.record(rounds=no_rounds())).guesses.at_G)
