"""Where chunks begin and end, and how likely the target finds them."""

from dataclasses import replace

import numpy as np
import pytest

from omnidraft.distill.examples import chunks
from omnidraft.distill.examples.chunks import AlmSettings, word_starts
from omnidraft.distill.examples.training_example import ExampleBuilder, TrainingExample
from omnidraft.traces.record import TraceRecord
from omnidraft.vocab.alignment import align

TEXT = "The water of the river goes. Where does the river itself go? into the sea"
P_EMITTED = 0.7  # of every token, as conftest.make_beliefs has it
EVERY_POSITION = AlmSettings(debias=False, merge_below=0.0)


def build(pair, record: TraceRecord, settings: AlmSettings = EVERY_POSITION, max_tokens: int = 500) -> TrainingExample:
    reader = ExampleBuilder(pair.draft, pair.target.vocabulary, pair.alignment, max_tokens=max_tokens, alm=settings)
    return reader.build(record)


def spelled(pair, example: TrainingExample) -> list[bytes]:
    chunks = example.targets["chunk"]
    rows = zip(chunks.row_N, chunks.ids_NL, chunks.num_ids_N, strict=True)
    assert all((example.ids_T[at + 1 : at + 1 + num] == ids[:num]).all() for at, ids, num in rows)
    return [
        pair.draft.vocabulary.spell(ids[:num].tolist())
        for ids, num in zip(chunks.ids_NL, chunks.num_ids_N, strict=True)
    ]


def ends_in_target(pair, record: TraceRecord) -> dict[int, int]:
    """Byte offset -> emitted tokens before it."""
    num_bytes = pair.target.vocabulary.num_bytes[record.emitted_ids]
    return {int(end): index + 1 for index, end in enumerate(np.cumsum(num_bytes)) if num_bytes[index]}


def test_chunks_are_the_text_in_order_and_as_likely_as_their_target_tokens(pair) -> None:
    record = pair.record(text=TEXT)
    example = build(pair, record)
    chunks = example.targets["chunk"]
    assert b"".join(spelled(pair, example)) == TEXT.encode()
    ends = ends_in_target(pair, record)
    before, num_bytes = 0, 0
    for text, log_p in zip(spelled(pair, example), chunks.log_p_N, strict=True):
        num_bytes += len(text)
        assert log_p == pytest.approx((ends[num_bytes] - before) * np.log(P_EMITTED), rel=1e-3)
        before = ends[num_bytes]
    assert len(chunks.row_N) > 10


def test_without_merging_a_chunk_ends_wherever_both_tokenisations_do(pair) -> None:
    example = build(pair, pair.record(text=TEXT))
    assert example.targets["chunk"].row_N.tolist() == example.at_P[:-1].tolist()


def test_equal_vocabularies_have_one_token_a_chunk(pair) -> None:
    same = replace(pair, draft=pair.target, alignment=align(pair.target, pair.target))
    example = build(same, same.record(text=TEXT))
    assert (example.targets["chunk"].num_ids_N == 1).all()
    np.testing.assert_allclose(example.targets["chunk"].log_p_N, np.log(P_EMITTED), rtol=1e-3)


def test_merged_chunks_end_where_a_word_probably_starts(pair) -> None:
    record = pair.record(text=TEXT)
    apart, merged = build(pair, record), build(pair, record, AlmSettings(debias=False, merge_below=0.5))
    assert b"".join(spelled(pair, merged)) == TEXT.encode()
    assert len(spelled(pair, merged)) < len(spelled(pair, apart))
    texts = spelled(pair, merged)
    assert all(text.startswith(b" ") for text in texts[1:])
    assert merged.targets["chunk"].log_p_N.sum() == pytest.approx(apart.targets["chunk"].log_p_N.sum())


def test_a_debiased_chunk_counts_the_kept_tokens_that_start_a_word_after_it(pair) -> None:
    record = pair.record(text=TEXT)
    plain, debiased = (build(pair, record, AlmSettings(debias=d, merge_below=0.5)) for d in (False, True))
    starts_T = word_starts(pair.target.vocabulary)
    top_EK, p_EK = record.beliefs.top_ids_EK, np.exp(record.beliefs.top_log_p_EK.astype(float))
    after = np.cumsum([len(text) for text in spelled(pair, plain)]).tolist()
    ends = ends_in_target(pair, record)
    mass = [p_EK[ends[end]][starts_T[top_EK[ends[end]]]].sum() for end in after]
    added = debiased.targets["chunk"].log_p_N - plain.targets["chunk"].log_p_N
    np.testing.assert_allclose(added, np.log(mass), atol=1e-5)
    assert plain.targets["chunk"].starts_V is None
    assert (debiased.targets["chunk"].starts_V == word_starts(pair.draft.vocabulary)).all()


def test_no_chunk_reaches_over_a_special_id(pair) -> None:
    ids = pair.target.encode("The river")
    special = pair.target.vocabulary.roles["bos"]
    record = pair.record(emitted=[*ids, special, *ids])
    texts = spelled(pair, build(pair, record, AlmSettings(debias=False, merge_below=0.99)))
    assert texts == [b"The river"]  # what follows has no end with a word after it


def test_a_text_without_words_is_cut_into_bounded_chunks(pair, monkeypatch) -> None:
    monkeypatch.setattr(chunks, "MAX_CHUNK_IDS", 8)
    record = pair.record(text="xyz" * 20)
    example = build(pair, record, AlmSettings(debias=True, merge_below=0.9))
    assert len(example.targets["chunk"].row_N) > 2
    assert example.targets["chunk"].num_ids_N.max() <= 8
    assert np.isfinite(example.targets["chunk"].log_p_N).all()


def test_chunks_lie_inside_the_window_and_the_segment(pair) -> None:
    example = build(pair, pair.record(text=TEXT), max_tokens=10)
    chunks = example.targets["chunk"]
    assert len(chunks.row_N) > 0
    assert chunks.row_N.min() >= 0
    assert (chunks.row_N + chunks.num_ids_N).max() < 10
    going_on = build(pair, pair.record(emitted=pair.target.encode(TEXT), finish_reason=None)).targets["chunk"]
    assert going_on.row_N.max() < build(pair, pair.record(text=TEXT)).targets["chunk"].row_N.max()


def test_words_start_with_white_space_or_are_special(pair) -> None:
    vocabulary = pair.draft.vocabulary
    starts = word_starts(vocabulary)
    assert starts[vocabulary.roles["eos"]]
    for index, text in enumerate(vocabulary.token_bytes):
        if index not in vocabulary.special_ids:
            assert starts[index] == text.startswith((b" ", b"\t", b"\n", b"\r"))
