"""Records as training examples: the positions, the mass at each, and the tokens that are skipped and counted."""

from dataclasses import replace

import numpy as np
import pytest

from omnidraft.decode.drafting.drafter_context import DrafterContext
from omnidraft.distill.examples.training_example import ExampleBuilder, TrainingExample
from omnidraft.errors import WireError
from omnidraft.ports import Request
from omnidraft.traces.codec import no_rounds
from omnidraft.traces.record import TargetLogprobs, TraceRecord
from omnidraft.traces.redaction import hashed_tenant, without_prompts
from omnidraft.vocab.alignment import PackedLists

TEXT = "The water of the river goes. Where does the river itself go? into the sea"


def build(pair, record: TraceRecord, max_tokens: int = 500) -> TrainingExample:
    return ExampleBuilder(pair.draft, pair.target.vocabulary, pair.alignment, max_tokens=max_tokens).build(record)


def spelled_before(pair, example: TrainingExample, record: TraceRecord) -> list[bytes]:
    """The text of the answer before each position, as the drafter's ids spell it."""
    num_prompt = len(record.drafter_prompt_ids)
    return [pair.draft.vocabulary.spell(example.ids_T[num_prompt : at + 1].tolist()) for at in example.at_P]


def test_a_position_is_conditioned_on_exactly_the_text_before_its_token(pair) -> None:
    record = pair.record(text=TEXT)
    example = build(pair, record)
    emitted = record.emitted_ids.tolist()
    texts = [pair.target.vocabulary.spell(emitted[:index]) for index in range(len(emitted))]
    before = spelled_before(pair, example, record)
    at_boundary = [index for index, text in enumerate(texts) if text in before]
    assert before == [texts[index] for index in at_boundary]
    assert example.emitted_P.tolist() == [emitted[index] for index in at_boundary]
    assert len(at_boundary) + sum(example.skipped.values()) == len(emitted)


def test_the_end_of_the_text_is_predicted_by_role(pair) -> None:
    example = build(pair, pair.record(text=TEXT))
    assert example.emitted_P[-1] == pair.target.vocabulary.roles["eos"]
    assert example.at_P[-1] == len(example.ids_T) - 2
    assert example.ids_T[-1] == pair.draft.vocabulary.roles["eos"]
    assert pair.draft.vocabulary.roles["eos"] in example.targets["boundary"].ids_NS[-1]


def test_an_earlier_segment_is_context_and_no_position(pair) -> None:
    whole = pair.record(text=TEXT)
    cut = 12
    logprobs = TargetLogprobs(*(getattr(whole.beliefs, name)[cut:] for name in TargetLogprobs.__dataclass_fields__))
    later = replace(whole, before_ids=whole.emitted_ids[:cut], emitted_ids=whole.emitted_ids[cut:], beliefs=logprobs)
    later = replace(later, rounds=no_rounds())
    first, second = build(pair, whole), build(pair, later)
    assert second.ids_T.tolist() == first.ids_T.tolist()
    assert second.at_P.tolist() == first.at_P.tolist()[-len(second.at_P) :]
    assert second.num_emitted == first.num_emitted - cut
    of_first, of_second = (each.targets["boundary"].log_p_NS for each in (first, second))
    np.testing.assert_array_equal(of_second, of_first[-len(second.at_P) :])


def test_what_follows_the_last_safe_boundary_waits_when_the_text_goes_on(pair) -> None:
    said = pair.target.encode(TEXT + " xyzxyz")
    done, going_on = (build(pair, pair.record(emitted=said, finish_reason=reason)) for reason in ("length", None))
    assert "after_the_last_safe_boundary" not in done.skipped
    assert going_on.skipped["after_the_last_safe_boundary"] > 0
    assert going_on.at_P.tolist() == done.at_P.tolist()[: len(going_on.at_P)]


def test_the_window_drops_the_front_of_the_prompt_first(pair) -> None:
    record = pair.record(text=TEXT)
    whole = build(pair, record)
    shorter = build(pair, record, max_tokens=len(whole.ids_T) - 2)
    assert shorter.ids_T.tolist() == whole.ids_T.tolist()[2:]
    assert (shorter.at_P + 2).tolist() == whole.at_P.tolist()
    assert (shorter.piece_at_M + 2).tolist() == whole.piece_at_M.tolist()


def test_positions_outside_the_window_are_counted(pair) -> None:
    example = build(pair, pair.record(text=TEXT), max_tokens=10)
    assert len(example.ids_T) == 10
    assert example.at_P.min() >= 0
    assert example.piece_at_M.min(initial=0) >= 0
    assert example.skipped["outside_the_window"] > 0
    assert len(example.at_P) + sum(example.skipped.values()) == example.num_emitted


def test_pieces_spell_the_tokens_that_were_emitted_as_merges(pair) -> None:
    example = build(pair, pair.record(text=TEXT))
    assert len(example.piece_at_M) > 0
    for row in np.unique(example.piece_row_M):
        mine = example.piece_row_M == row
        spelled = pair.draft.vocabulary.spell(example.piece_ids_M[mine].tolist())
        assert spelled == pair.target.vocabulary.token_bytes[example.emitted_P[row]]
        assert example.ids_T[example.piece_at_M[mine] + 1].tolist() == example.piece_ids_M[mine].tolist()
        assert example.piece_at_M[mine][0] == example.at_P[row]


def test_mass_is_neither_lost_nor_made(pair) -> None:
    buckets = build(pair, pair.record(text=TEXT)).targets["boundary"]
    mass_P = np.where(buckets.real_NS, np.exp(buckets.log_p_NS), 0).sum(axis=1) + np.exp(buckets.log_p_rest_N)
    np.testing.assert_allclose(mass_P, 1.0, atol=2e-3)  # float16 log-probabilities
    for ids_S, real_S in zip(buckets.ids_NS, buckets.real_NS, strict=True):
        assert len(set(ids_S[real_S].tolist())) == real_S.sum()
        assert set(ids_S[~real_S].tolist()) <= set(ids_S[real_S].tolist())


def test_a_record_without_log_probabilities_still_has_positions_and_pieces(pair) -> None:
    example = build(pair, pair.record(text=TEXT, beliefs=None))
    assert set(example.targets) == {"emitted", "piece"}
    assert len(example.at_P) > 0
    assert len(example.piece_at_M) > 0


def test_the_draft_token_at_a_position_is_the_one_that_comes_next_or_the_partner_of_a_special_id(pair) -> None:
    example = build(pair, pair.record(text=TEXT))
    emitted = example.targets["emitted"]
    assert emitted.row_N.tolist() == example.at_P.tolist()
    assert emitted.ids_NS[:-1, 0].tolist() == example.ids_T[example.at_P[:-1] + 1].tolist()
    assert emitted.ids_NS[-1, 0] == pair.draft.vocabulary.roles["eos"]


def test_a_special_id_without_a_partner_cannot_be_drafted(pair) -> None:
    emitted = [*pair.target.encode("The river"), pair.target.vocabulary.roles["eos"]]
    lonely = replace(pair.alignment, drafts_of_target=without(pair.alignment.drafts_of_target, emitted[-1]))
    example = build(replace(pair, alignment=lonely), pair.record(emitted=emitted))
    assert example.targets["emitted"].row_N.tolist() == example.at_P[:-1].tolist()


def without(lists: PackedLists, index: int) -> PackedLists:
    return PackedLists.of([() if n == index else lists[n] for n in range(len(lists))])


def test_an_id_outside_its_vocabulary_is_refused(pair) -> None:
    with pytest.raises(WireError, match="target id 9999"):
        build(pair, pair.record(text=TEXT, emitted_ids=np.array([9999], np.uint32), beliefs=None))


@pytest.mark.parametrize("redactor", [hashed_tenant, without_prompts])
def test_a_redacted_record_teaches_the_same_answer(pair, redactor) -> None:
    """Without a prompt nothing stands before the first token, so that one is no position."""
    record = pair.record(text=TEXT)
    whole, redacted = build(pair, record), build(pair, redactor(record))
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
    example = build(pair, record)
    assert example.ids_T.tolist() == context.ids
    assert pair.draft.vocabulary.roles["eos"] in example.ids_T.tolist()


def test_special_ids_inside_an_answer_are_predicted_and_the_text_after_them_follows_them(pair) -> None:
    said, eos = said_with_specials(pair), pair.draft.vocabulary.roles["eos"]
    example = build(pair, pair.record(emitted=said))
    specials = [row for row, token in enumerate(example.emitted_P) if token == pair.target.vocabulary.roles["eos"]]
    assert len(specials) == 4
    for row in specials:
        assert example.ids_T[example.at_P[row] + 1] == eos
        assert row + 1 == len(example.at_P) or example.at_P[row + 1] == example.at_P[row] + 1
    assert set(example.at_P[specials]) <= set(example.targets["emitted"].row_N)
    assert all(eos not in ngram.draft_ids for ngram in example.ngrams)


def test_behind_a_special_id_a_text_that_goes_on_is_settled(pair) -> None:
    said = [*pair.target.encode("xyzxyz"), pair.target.vocabulary.roles["eos"], *pair.target.encode("xyzxyz")]
    going_on = build(pair, pair.record(emitted=said, finish_reason=None))
    done = build(pair, pair.record(emitted=said))
    assert going_on.skipped["after_the_last_safe_boundary"] > 0
    eos_at = going_on.emitted_P.tolist().index(pair.target.vocabulary.roles["eos"])
    assert going_on.emitted_P.tolist() == done.emitted_P.tolist()[: eos_at + 2]
