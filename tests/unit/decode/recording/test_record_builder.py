"""From steps to records: every token once, whatever the segments."""

from dataclasses import replace

import numpy as np
import pytest

from omnidraft.decode.recording.record_builder import RecordContext, TraceRecordBuilder
from omnidraft.decode.recording.text_memorizer import TextMemorizer
from omnidraft.memory.recent_texts import RecentTexts
from omnidraft.ports import Grammar, Sampling
from omnidraft.traces.record import SOURCES
from omnidraft.vocab.thoughts import Phase, ThoughtMarkers, Thoughts
from tests.unit.decode.toys import (
    PROPOSERS,
    TARGET_EOS,
    TARGET_TOKENIZER,
    emitted,
    make_drafter,
    make_request,
    toy_decoder,
)

ENDS = frozenset({TARGET_EOS})
ORIGIN = RecordContext("request-1", "tenant", "worker", "target", "drafter", 7, "aligned")


def traced(request, proposer, *, segment_tokens=256, window_tokens=1024, top_k=4):
    """The steps of a request and its records."""
    records = []
    builder = TraceRecordBuilder(
        request, ORIGIN, records.append, segment_tokens=segment_tokens, window_tokens=window_tokens
    )
    steps = list(toy_decoder(trace_top_k=top_k).decode(request, proposer))
    for step in steps:
        builder.take(step)
    return steps, records


def test_a_short_answer_is_one_record_that_says_where_it_comes_from():
    request = make_request(Sampling(0.7, top_k=9, top_p=0.9), seed=11)
    steps, [record] = traced(request, make_drafter())
    assert record.emitted_ids.tolist() == emitted(steps)
    assert record.prompt_ids.tolist() == list(request.prompt_ids)
    assert record.drafter_prompt_ids.tolist() == list(request.drafter_prompt_ids)
    assert record.before_ids.tolist() == []
    assert (record.segment, record.finish_reason, record.seed, record.mode) == (0, "length", 11, "fast")
    assert (record.temperature, record.top_k, record.top_p) == (0.7, 9, 0.9)
    assert (record.request_id, record.snapshot_version, record.alignment) == ("request-1", 7, "aligned")
    assert 1.7e12 < record.time_ms < 4e12


def test_what_a_client_did_not_see_behind_a_stop_string_is_in_the_record_and_not_in_the_memory():
    ends_inside = []
    for seed in range(40):
        recent = RecentTexts()
        request = make_request(Sampling(1.0), seed=seed, max_new_tokens=60, stop_strings=(b"b",))
        steps, records = traced(request, make_drafter())
        memorizer = TextMemorizer(recent, request)
        for step in steps:
            memorizer.take(step)
        memorizer.end(None)
        ids = emitted(steps)
        assert [token for record in records for token in record.emitted_ids.tolist()] == ids
        if steps[-1].stop_string is None:
            continue
        assert records[-1].finish_reason == "stop_string"
        assert recent.num_ids == (len(ids) if len(ids) > 1 else 0)  # a separator instead of the last
        ends_inside.append(not TARGET_TOKENIZER.vocabulary.spell(ids).endswith(b"b"))
    assert any(ends_inside)
    assert not all(ends_inside)


def test_a_record_says_how_its_draws_were_shaped():
    plain = make_request(Sampling(0.0))
    _, [record] = traced(plain, make_drafter(noise_weight=0.5))
    assert record.is_drawn_from_logprobs
    assert record.noise_weight == 0.0  # greedy draws have no noise
    shaped = Sampling(0.8, min_p=0.05, repetition_penalty=1.1, presence_penalty=-0.5, frequency_penalty=0.25)
    _, [record] = traced(make_request(replace(shaped, logit_bias={3: 1.0})), make_drafter(noise_weight=0.5))
    assert (record.min_p, record.repetition_penalty) == (0.05, 1.1)
    assert (record.presence_penalty, record.frequency_penalty) == (-0.5, 0.25)
    assert (record.has_logit_bias, record.has_grammar, record.noise_weight) == (True, False, 0.5)
    assert not record.is_drawn_from_logprobs
    markers = ThoughtMarkers(TARGET_TOKENIZER.vocabulary, {}, "ab", "cd")
    for budget in (None, 4):
        thoughts = Thoughts(markers, Phase.THOUGHTS, budget=budget)
        _, [record] = traced(make_request(Sampling(0.0), thoughts=thoughts), None)
        assert record.is_drawn_from_logprobs is (budget is None)
    _, [record] = traced(make_request(Sampling(0.0, grammar=Grammar("regex", "[a-h ]*")), stop_ids=ENDS), None)
    assert (record.has_grammar, record.noise_weight) == (True, None)


@pytest.mark.parametrize("segment_tokens", [1, 6, 23, 100])
@pytest.mark.parametrize("proposer", ["good", "bad"])
def test_segments_cover_every_emitted_token_once(segment_tokens, proposer):
    request = make_request(Sampling(0.0), max_new_tokens=60)
    steps, records = traced(request, PROPOSERS[proposer], segment_tokens=segment_tokens)
    ids = emitted(steps)
    assert np.concatenate([record.emitted_ids for record in records]).tolist() == ids
    assert [record.segment for record in records] == list(range(len(records)))
    largest = max(len(step.emitted) for step in steps)
    assert all(0 < len(record.emitted_ids) <= max(segment_tokens, largest) for record in records)
    assert [record.finish_reason for record in records] == [None] * (len(records) - 1) + ["length"]


def test_a_later_segment_carries_the_ids_before_it_up_to_the_window():
    request = make_request(Sampling(1.0), max_new_tokens=60)
    steps, records = traced(request, PROPOSERS["good"], segment_tokens=9, window_tokens=20)
    ids, num_before = emitted(steps), 0
    for record in records:
        assert record.before_ids.tolist() == ids[max(num_before - 20, 0) : num_before]
        num_before += len(record.emitted_ids)
    assert len(records[-1].before_ids) == 20


def test_no_window_carries_nothing():
    _, records = traced(make_request(max_new_tokens=30), None, segment_tokens=10, window_tokens=0)
    assert [len(record.before_ids) for record in records] == [0, 0, 0]


@pytest.mark.parametrize("name", PROPOSERS)
def test_counts_add_up_and_columns_fit(name):
    request = make_request(Sampling(1.0), max_new_tokens=60, stop_ids=frozenset({TARGET_EOS}))
    steps, records = traced(request, PROPOSERS[name], segment_tokens=16)
    assert sum(len(record.rounds.num_nodes_R) for record in records) == len(steps)
    for record in records:
        rounds, num_nodes = record.rounds, int(record.rounds.num_nodes_R.sum())
        columns = (rounds.node_ids_M, rounds.parents_M, rounds.sources_M, rounds.log_q_M, rounds.accepted_M)
        assert {len(column) for column in columns} == {num_nodes}
        assert rounds.num_emitted_R.sum() == len(record.emitted_ids)
        assert rounds.num_accepted_R.sum() == rounds.accepted_M.sum()
        assert rounds.num_draft_ids_R.sum() == len(rounds.draft_ids_D)
        assert len(rounds.draft_s_R) == len(rounds.target_s_R) == len(rounds.num_nodes_R)
        assert len(record.beliefs.emitted_log_p_E) == len(record.emitted_ids)


def test_accepted_nodes_are_the_emitted_tokens_that_were_drafted():
    _, [record] = traced(make_request(Sampling(0.7)), PROPOSERS["good tree"])
    rounds, node, at = record.rounds, 0, 0
    for num_nodes, num_accepted, num_emitted in zip(
        rounds.num_nodes_R, rounds.num_accepted_R, rounds.num_emitted_R, strict=True
    ):
        mine = slice(node, node + num_nodes)
        accepted = rounds.node_ids_M[mine][rounds.accepted_M[mine] == 1]
        assert accepted.tolist() == record.emitted_ids[at : at + num_accepted].tolist()
        assert all(0 <= parent < num_nodes for parent in rounds.parents_M[mine])
        node, at = node + num_nodes, at + num_emitted


def test_sources_are_named_as_the_record_names_them():
    steps, [record] = traced(make_request(Sampling(0.0)), make_drafter())
    drafted = [source.value for step in steps for source in step.tree.sources[1:]]
    assert [SOURCES[number] for number in record.rounds.sources_M] == drafted
    assert {"direct"} <= set(drafted)


def test_an_answer_without_log_probabilities_has_no_beliefs():
    _, [record] = traced(make_request(), None, top_k=None)
    assert record.beliefs is None
