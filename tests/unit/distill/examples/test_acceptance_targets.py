"""Targets of the acceptance head: the drafted nodes among them, and the draft id behind which each was drafted."""

from dataclasses import replace

import numpy as np
import pytest

from omnidraft.distill.examples.training_example import ExampleBuilder, TrainingExample
from omnidraft.traces.checks import check
from omnidraft.traces.codec import no_rounds
from omnidraft.traces.record import SOURCES, TraceRecord
from tests.unit.distill.drafted import RIGHT_LOG_Q, WRONG_LOG_Q, with_drafts

TEXT = "The water of the river goes into the sea, and the river itself stays."


def build(pair, record: TraceRecord) -> TrainingExample:
    return ExampleBuilder(pair.draft, pair.target.vocabulary, pair.alignment, max_tokens=256).build(record)


def test_every_drafted_token_has_the_row_of_the_draft_id_it_was_drafted_from(pair) -> None:
    """The text up to there, in bytes, is the text before the emitted token that was drawn in its place."""
    record = with_drafts(pair, pair.record(text=TEXT), seed=1)
    check(record)
    example = build(pair, record)
    vocabulary, prompt = pair.target.vocabulary, len(record.drafter_prompt_ids)
    befores = {vocabulary.spell(record.emitted_ids[:end].tolist()) for end in range(len(record.emitted_ids) + 1)}
    assert len(example.acceptance.row_N) > 5
    for at in example.acceptance.row_N:
        assert pair.draft.vocabulary.spell(example.ids_T[prompt : at + 1].tolist()) in befores
    assert set(example.acceptance.row_N) <= set(example.at_P)


def test_right_and_wrong_tokens_differ_in_label_and_have_the_drafters_log_q(pair) -> None:
    record = with_drafts(pair, pair.record(text=TEXT), seed=2)
    drafted = build(pair, replace(record, temperature=0.0)).acceptance
    is_right_N = drafted.log_q_N == np.float32(RIGHT_LOG_Q)
    assert is_right_N.any()
    assert (drafted.log_q_N[~is_right_N] == np.float32(WRONG_LOG_Q)).all()
    assert drafted.label_N[is_right_N].all()
    drafted_at_1 = build(pair, replace(record, temperature=1.0, top_p=None)).acceptance
    assert drafted_at_1.label_N[is_right_N] == pytest.approx(0.7, abs=0.02)  # a merge's beginning may share with others


def test_a_token_drafted_with_a_look_at_the_targets_noise_has_its_hard_label(pair) -> None:
    """The soft label is right for drafting that does not depend on the draw."""
    record = replace(with_drafts(pair, pair.record(text=TEXT), seed=2), temperature=1.0, top_p=None)
    hard_N = build(pair, replace(record, temperature=0.0)).acceptance.label_N
    assert set(hard_N.tolist()) == {0.0, 1.0}
    assert np.array_equal(build(pair, replace(record, noise_weight=0.5)).acceptance.label_N, hard_N)
    for noise_weight in (None, 0.0):
        assert not np.array_equal(build(pair, replace(record, noise_weight=noise_weight)).acceptance.label_N, hard_N)


def test_tokens_that_the_drafter_did_not_choose_are_no_targets(pair) -> None:
    record = with_drafts(pair, pair.record(text=TEXT), are_right=True)
    rounds = record.rounds
    for source in ("lookup", "suffix", "forced"):
        others = replace(rounds, sources_M=np.full_like(rounds.sources_M, SOURCES.index(source)))
        assert not len(build(pair, replace(record, rounds=others)).acceptance.row_N)
    splits = replace(rounds, sources_M=np.full_like(rounds.sources_M, SOURCES.index("split")))
    num_first = int((rounds.parents_M == 0).sum())
    assert 0 < num_first < len(rounds.parents_M)
    assert len(build(pair, replace(record, rounds=splits)).acceptance.row_N) <= num_first


def test_drafted_tokens_outside_the_window_are_left_out(pair) -> None:
    record = with_drafts(pair, pair.record(text=TEXT))
    reader = ExampleBuilder(pair.draft, pair.target.vocabulary, pair.alignment, max_tokens=12)
    cut, whole = reader.build(record), build(pair, record)
    assert 0 < len(cut.acceptance.row_N) < len(whole.acceptance.row_N)
    shift = len(whole.ids_T) - len(cut.ids_T)
    num = len(cut.acceptance.row_N)
    assert np.array_equal(cut.acceptance.row_N + shift, whole.acceptance.row_N[-num:])
    assert np.array_equal(cut.acceptance.label_N, whole.acceptance.label_N[-num:])


def test_a_record_without_drafts_has_no_targets(pair) -> None:
    assert not len(build(pair, pair.record(rounds=no_rounds())).acceptance.row_N)
