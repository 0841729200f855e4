"""Which positions a record teaches, what is believed there, and what is left out and counted."""

from dataclasses import replace

import numpy as np
import pytest

from omnidraft.decode.drafting.drafter_context import DrafterContext
from omnidraft.distill.examples.bucket_targets import Split, bucket_targets, direct_buckets, one_against_all
from omnidraft.distill.examples.training_example import ExampleBuilder, TrainingExample
from omnidraft.errors import WireError
from omnidraft.ports import Request
from omnidraft.traces.record import TargetLogprobs, TraceRecord
from omnidraft.traces.redaction import hashed_tenant, without_prompts
from omnidraft.vocab.alignment import Alignment
from omnidraft.vocab.packed_lists import PackedLists
from tests.tiny_pair import no_rounds

TEXT = "The water of the river goes. Where does the river itself go? into the sea"


def read(pair, record: TraceRecord, max_tokens: int = 500) -> TrainingExample:
    return ExampleBuilder(pair.draft, pair.target.vocabulary, pair.alignment, max_tokens=max_tokens).build(record)


def spelled_before(pair, positions: TrainingExample, record: TraceRecord) -> list[bytes]:
    """The text of the answer before each position, as the drafter's ids spell it."""
    num_prompt = len(record.drafter_prompt_ids)
    return [pair.draft.vocabulary.spell(positions.ids_T[num_prompt : at + 1].tolist()) for at in positions.at_P]


def test_a_position_is_conditioned_on_exactly_the_text_before_its_token(pair) -> None:
    record = pair.record(text=TEXT)
    positions = read(pair, record)
    emitted = record.emitted_ids.tolist()
    texts = [pair.target.vocabulary.spell(emitted[:index]) for index in range(len(emitted))]
    before = spelled_before(pair, positions, record)
    at_boundary = [index for index, text in enumerate(texts) if text in before]
    assert before == [texts[index] for index in at_boundary]
    assert positions.emitted_P.tolist() == [emitted[index] for index in at_boundary]
    assert len(at_boundary) + sum(positions.skipped.values()) == len(emitted)


def test_the_end_of_the_text_is_asked_for_by_role(pair) -> None:
    positions = read(pair, pair.record(text=TEXT))
    assert positions.emitted_P[-1] == pair.target.vocabulary.roles["eos"]
    assert positions.at_P[-1] == len(positions.ids_T) - 2
    assert positions.ids_T[-1] == pair.draft.vocabulary.roles["eos"]
    assert pair.draft.vocabulary.roles["eos"] in positions.buckets.ids_PS[-1]


def test_an_earlier_segment_is_context_and_no_position(pair) -> None:
    whole = pair.record(text=TEXT)
    cut = 12
    beliefs = TargetLogprobs(*(getattr(whole.beliefs, name)[cut:] for name in TargetLogprobs.__dataclass_fields__))
    later = replace(whole, before_ids=whole.emitted_ids[:cut], emitted_ids=whole.emitted_ids[cut:], beliefs=beliefs)
    later = replace(later, rounds=no_rounds())
    first, second = read(pair, whole), read(pair, later)
    assert second.ids_T.tolist() == first.ids_T.tolist()
    assert second.at_P.tolist() == first.at_P.tolist()[-len(second.at_P) :]
    assert second.num_emitted == first.num_emitted - cut
    np.testing.assert_array_equal(second.buckets.log_p_PS, first.buckets.log_p_PS[-len(second.at_P) :])


def test_what_follows_the_last_safe_boundary_waits_when_the_text_goes_on(pair) -> None:
    said = pair.target.encode(TEXT + " xyzxyz")
    done, going_on = (read(pair, pair.record(emitted=said, finish_reason=reason)) for reason in ("length", None))
    assert "after_the_last_safe_boundary" not in done.skipped
    assert going_on.skipped["after_the_last_safe_boundary"] > 0
    assert going_on.at_P.tolist() == done.at_P.tolist()[: len(going_on.at_P)]


def test_the_window_drops_the_front_of_the_prompt_first(pair) -> None:
    record = pair.record(text=TEXT)
    whole = read(pair, record)
    shorter = read(pair, record, max_tokens=len(whole.ids_T) - 2)
    assert shorter.ids_T.tolist() == whole.ids_T.tolist()[2:]
    assert (shorter.at_P + 2).tolist() == whole.at_P.tolist()
    assert (shorter.piece_at_M + 2).tolist() == whole.piece_at_M.tolist()


def test_positions_outside_the_window_are_counted(pair) -> None:
    positions = read(pair, pair.record(text=TEXT), max_tokens=10)
    assert len(positions.ids_T) == 10
    assert positions.at_P.min() >= 0
    assert positions.piece_at_M.min(initial=0) >= 0
    assert positions.skipped["outside_the_window"] > 0
    assert len(positions.at_P) + sum(positions.skipped.values()) == positions.num_emitted


def test_pieces_spell_the_tokens_that_were_emitted_as_merges(pair) -> None:
    positions = read(pair, pair.record(text=TEXT))
    assert len(positions.piece_at_M) > 0
    for row in np.unique(positions.piece_row_M):
        mine = positions.piece_row_M == row
        spelled = pair.draft.vocabulary.spell(positions.piece_ids_M[mine].tolist())
        assert spelled == pair.target.vocabulary.token_bytes[positions.emitted_P[row]]
        assert positions.ids_T[positions.piece_at_M[mine] + 1].tolist() == positions.piece_ids_M[mine].tolist()
        assert positions.piece_at_M[mine][0] == positions.at_P[row]


def test_the_cache_takes_every_merge_of_a_record(pair) -> None:
    cache = pair.cache()
    for ngram in read(pair, pair.record(text=TEXT)).ngrams:
        cache.insert(ngram.draft_ids, ngram.target_id)
    assert len(cache) > 0


def test_mass_is_neither_lost_nor_made(pair) -> None:
    buckets = read(pair, pair.record(text=TEXT)).buckets
    mass_P = np.where(buckets.real_PS, np.exp(buckets.log_p_PS), 0).sum(axis=1) + np.exp(buckets.log_p_rest_P)
    np.testing.assert_allclose(mass_P, 1.0, atol=2e-3)  # float16 log-probabilities
    for ids_S, real_S in zip(buckets.ids_PS, buckets.real_PS, strict=True):
        assert len(set(ids_S[real_S].tolist())) == real_S.sum()
        assert set(ids_S[~real_S].tolist()) <= set(ids_S[real_S].tolist())


def test_a_record_without_beliefs_still_has_positions_and_pieces(pair) -> None:
    positions = read(pair, pair.record(text=TEXT, beliefs=None))
    assert positions.buckets is None
    assert len(positions.at_P) > 0
    assert len(positions.piece_at_M) > 0


def test_the_draft_token_at_a_position_is_the_one_that_comes_next_or_the_partner_of_a_special_id(pair) -> None:
    positions = read(pair, pair.record(text=TEXT))
    assert positions.is_draftable_P.all()
    assert positions.draft_P[:-1].tolist() == positions.ids_T[positions.at_P[:-1] + 1].tolist()
    assert positions.draft_P[-1] == pair.draft.vocabulary.roles["eos"]


def test_a_special_id_without_a_partner_cannot_be_drafted(pair) -> None:
    emitted = [*pair.target.encode("The river"), pair.target.vocabulary.roles["eos"]]
    lonely = replace(pair.alignment, drafts_of_target=without(pair.alignment.drafts_of_target, emitted[-1]))
    positions = read(replace(pair, alignment=lonely), pair.record(emitted=emitted))
    assert positions.is_draftable_P.tolist() == [True] * (len(positions.at_P) - 1) + [False]


def without(lists: PackedLists, index: int) -> PackedLists:
    return PackedLists.of([() if n == index else lists[n] for n in range(len(lists))])


def test_a_refused_token_is_asked_about_by_its_first_draft_token_where_it_was_refused(pair) -> None:
    record = pair.record(text=TEXT)
    positions = read(pair, record)
    row_of = {index: row for row, index in enumerate(emitted_indices(pair, record, positions))}
    beliefs, first_T = record.beliefs, pair.alignment.draft_first_T
    expected = {
        (row_of[own], int(first_T[target]))
        for own in range(1, len(record.emitted_ids), 2)  # conftest.make_rounds: two children at every second token
        for target in beliefs.top_ids_EK[own, 1:3]
        if own in row_of and first_T[target] < pair.alignment.num_draft
    }
    believed = positions.distribution
    assert set(zip(believed.rejected_row_N, believed.rejected.ids_PS[:, 0], strict=True)) == expected
    assert len(expected) == len(believed.rejected_row_N) > 5
    mass_N = np.exp(believed.rejected.log_p_PS[:, 0]) + np.exp(believed.rejected.log_p_rest_P)
    np.testing.assert_allclose(mass_N, 1.0, atol=2e-3)


def emitted_indices(pair, record: TraceRecord, positions: TrainingExample) -> list[int]:
    texts = [pair.target.vocabulary.spell(record.emitted_ids[:n].tolist()) for n in range(len(record.emitted_ids))]
    before = spelled_before(pair, positions, record)
    return [index for index, text in enumerate(texts) if text in before]


def test_beliefs_of_emitted_tokens_follow_the_positions(pair) -> None:
    record = pair.record(text=TEXT)
    falling = np.linspace(-1, -3, len(record.emitted_ids)).astype(np.float16)
    record = replace(record, beliefs=replace(record.beliefs, emitted_log_p_E=falling))
    positions = read(pair, record)
    assert positions.distribution.log_p_P.tolist() == falling[emitted_indices(pair, record, positions)].tolist()


def test_no_prompt_means_no_first_position(pair) -> None:
    positions = read(pair, pair.record(text=TEXT, drafter_prompt_ids=np.zeros(0, np.uint32)))
    assert positions.at_P.min() >= 0
    assert positions.skipped["outside_the_window"] == 1


def test_an_id_outside_its_vocabulary_is_refused(pair) -> None:
    with pytest.raises(WireError, match="target id 9999"):
        read(pair, pair.record(text=TEXT, emitted_ids=np.array([9999], np.uint32), beliefs=None))


# Target tokens 0..4, draft tokens 0..3: 0 and 1 are direct, 2 is spelled (0, 3), 3 cannot be drafted, 4 is (1, 3);
# draft token 2 spells the target tokens (0, 1).
TOY = Alignment("toy", PackedLists.of([(0,), (1,), (0, 1), ()]), PackedLists.of([(0,), (1,), (0, 3), (), (1, 3)]))


def toy_beliefs(top: list[int], p: list[float], tail: float, emitted: float) -> TargetLogprobs:
    return TargetLogprobs(np.array([top]), np.log([p]), np.log([emitted]), np.log([tail]))


def as_masses(buckets) -> dict[int | str, float]:
    masses: dict[int | str, float] = {
        int(token): float(np.exp(log_p))
        for token, log_p, real in zip(buckets.ids_PS[0], buckets.log_p_PS[0], buckets.real_PS[0], strict=True)
        if real
    }
    return masses | {"rest": float(np.exp(buckets.log_p_rest_P[0]))}


def test_a_target_token_lies_with_the_draft_token_that_begins_it() -> None:
    beliefs = toy_beliefs([0, 2, 1, 3], [0.4, 0.2, 0.2, 0.1], 0.1, 0.4)
    masses = as_masses(bucket_targets(beliefs, np.array([0]), TOY, []))
    assert masses == pytest.approx({0: 0.6, 1: 0.2, "rest": 0.2})


def test_a_text_that_one_draft_token_spells_moves_to_that_token() -> None:
    beliefs = toy_beliefs([0, 2, 1, 3], [0.4, 0.2, 0.2, 0.1], 0.1, 0.4)
    masses = as_masses(bucket_targets(beliefs, np.array([0]), TOY, [Split(0, draft_id=2, first_target=0, p=0.3)]))
    assert masses == pytest.approx({0: 0.3, 1: 0.2, 2: 0.3, "rest": 0.2})


def test_what_moves_comes_from_the_rest_when_its_first_token_was_not_kept() -> None:
    beliefs = toy_beliefs([1, 4], [0.5, 0.3], 0.2, 0.1)
    masses = as_masses(bucket_targets(beliefs, np.array([0]), TOY, [Split(0, draft_id=2, first_target=0, p=0.05)]))
    assert masses == pytest.approx({1: 0.8, 2: 0.05, "rest": 0.15})


def test_an_empty_tail_is_an_empty_rest() -> None:
    beliefs = TargetLogprobs(np.array([[0]]), np.zeros((1, 1)), np.zeros(1), np.array([-np.inf]))
    assert as_masses(bucket_targets(beliefs, np.array([0]), TOY, [])) == pytest.approx({0: 1.0, "rest": 0.0})


def test_the_papers_form_is_renormalised_on_direct_tokens() -> None:
    beliefs = toy_beliefs([0, 2, 1, 3], [0.4, 0.2, 0.2, 0.1], 0.1, 0.4)
    masses = as_masses(direct_buckets(beliefs, np.array([0]), TOY))
    assert masses == pytest.approx({0: 4 / 7, 1: 2 / 7, "rest": 1 / 7})


def test_where_no_direct_token_was_kept_all_of_it_is_rest() -> None:
    for tail in (0.3, 0.0):
        with np.errstate(divide="ignore"):
            beliefs = toy_beliefs([2, 4], [0.4, 0.3], tail, 0.4)
        assert as_masses(direct_buckets(beliefs, np.array([0]), TOY)) == pytest.approx({"rest": 1.0})


def test_one_draft_token_stands_against_all_else_and_has_no_mass_when_it_was_not_kept() -> None:
    beliefs = toy_beliefs([0, 2, 1, 3], [0.4, 0.2, 0.2, 0.1], 0.1, 0.4)
    buckets = bucket_targets(beliefs, np.array([0]), TOY, [])
    assert as_masses(one_against_all(buckets, np.array([0]), np.array([1]))) == pytest.approx({1: 0.2, "rest": 0.8})
    assert as_masses(one_against_all(buckets, np.array([0]), np.array([3]))) == pytest.approx({3: 0.0, "rest": 1.0})


@pytest.mark.parametrize("redactor", [hashed_tenant, without_prompts])
def test_a_redacted_record_teaches_the_same_answer(pair, redactor) -> None:
    """Without a prompt nothing stands before the first token, so that one is no position."""
    record = pair.record(text=TEXT)
    whole, redacted = read(pair, record), read(pair, redactor(record))
    num_lost = 1 if redactor is without_prompts else 0
    assert redacted.emitted_P.tolist() == whole.emitted_P.tolist()[num_lost:]
    assert redacted.skipped.get("outside_the_window", 0) == num_lost
    assert redacted.ngrams == whole.ngrams


def said_with_specials(pair) -> list[int]:
    """Text around special ids, one of them inside a word and two together."""
    eos, ours = pair.target.vocabulary.roles["eos"], pair.target.encode
    return [*ours("The water of the ri"), eos, *ours("ver goes"), eos, eos, *ours(" into the sea"), eos]


@pytest.mark.parametrize("num_before", [0, 7, 20])
def test_the_learner_reads_the_answer_as_it_was_served(pair, num_before) -> None:
    """Through the drafter's own context, fed as rounds feed it."""
    said = said_with_specials(pair)
    prompt = tuple(pair.draft.encode("Where? "))
    request = Request((1,), prompt, max_new_tokens=99)
    context = DrafterContext(request, pair.draft, pair.target.vocabulary, pair.alignment, pair.cache(), limit=512)
    for start in range(0, len(said), 3):
        context.observe(said[start : start + 3])
        context.ids  # noqa: B018 -- drafting looks at it in every round
    record = pair.record(emitted=said)
    if num_before:
        cut = {name: getattr(record.beliefs, name)[num_before:] for name in TargetLogprobs.__dataclass_fields__}
        record = replace(
            record,
            before_ids=record.emitted_ids[:num_before],
            emitted_ids=record.emitted_ids[num_before:],
            beliefs=TargetLogprobs(**cut),
            rounds=no_rounds(),
        )
    positions = read(pair, record)
    assert positions.ids_T.tolist() == context.ids
    assert pair.draft.vocabulary.roles["eos"] in positions.ids_T.tolist()


def test_special_ids_inside_an_answer_are_asked_for_and_what_follows_them_stands_behind_them(pair) -> None:
    said, eos = said_with_specials(pair), pair.draft.vocabulary.roles["eos"]
    positions = read(pair, pair.record(emitted=said))
    specials = [row for row, token in enumerate(positions.emitted_P) if token == pair.target.vocabulary.roles["eos"]]
    assert len(specials) == 4
    for row in specials:
        assert positions.ids_T[positions.at_P[row] + 1] == positions.draft_P[row] == eos
        assert row + 1 == len(positions.at_P) or positions.at_P[row + 1] == positions.at_P[row] + 1
    assert positions.is_draftable_P[specials].all()
    assert all(eos not in ngram.draft_ids for ngram in positions.ngrams)


def test_behind_a_special_id_a_text_that_goes_on_is_settled(pair) -> None:
    said = [*pair.target.encode("xyzxyz"), pair.target.vocabulary.roles["eos"], *pair.target.encode("xyzxyz")]
    going_on = read(pair, pair.record(emitted=said, finish_reason=None))
    done = read(pair, pair.record(emitted=said))
    assert going_on.skipped["after_the_last_safe_boundary"] > 0
    eos_at = going_on.emitted_P.tolist().index(pair.target.vocabulary.roles["eos"])
    assert going_on.emitted_P.tolist() == done.emitted_P.tolist()[: eos_at + 2]
