"""An n-gram never gives a token that spells something else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.errors import VocabularyError
from omnidraft.vocab.ngram_cache import CacheMode, NgramCache
from omnidraft.vocab.tokenizer import Vocabulary

DRAFT = Vocabulary((b"", b"a", b"b", b"c", b"ab", b"bc"), {}, frozenset({0}))
TARGET = Vocabulary((b"abc", b"ab", b"", b"abcab", b"bc"), {}, frozenset({2}))


def cache(capacity: int = 100) -> NgramCache:
    return NgramCache("pair", DRAFT, TARGET, capacity)


def test_an_inserted_ngram_is_found_and_another_spelling_is_not() -> None:
    ngrams = cache()
    assert ngrams.insert([1, 5], 0)
    assert not ngrams.insert([1, 5], 0)
    assert (ngrams.lookup([1, 5]), ngrams.lookup([4, 3]), len(ngrams)) == (0, None, 1)


@pytest.mark.parametrize(
    ("draft_ids", "target_id"), [([1, 2], 0), ([4], 1), ([0, 4], 1), ([1, 2, 0], 1), ([0, 0], 2), ([], 2)]
)
def test_what_does_not_spell_the_target_token_is_refused(draft_ids: list[int], target_id: int) -> None:
    with pytest.raises(VocabularyError, match="spell"):
        cache().insert(draft_ids, target_id)


def test_a_key_that_stands_for_another_ngram_gives_nothing() -> None:
    """A forged table says that [1, 2], which spells ab, is token 0, which spells abc."""
    honest = cache()
    honest.insert([1, 2], 1)
    arrays = honest.to_arrays() | {"target": np.array([0], np.uint32)}
    forged = NgramCache.from_arrays(arrays, "pair", DRAFT, TARGET, 100)
    assert forged.lookup([1, 2]) is None


def test_learning_inserts_every_merge_of_two_tokenisations() -> None:
    ngrams = cache()
    assert ngrams.learn([1, 2, 1, 5, 4], [1, 0, 1]) == 2
    assert (ngrams.lookup([1, 2]), ngrams.lookup([1, 5])) == (1, 0)
    assert ngrams.learn([1, 2, 1, 5, 4], [1, 0, 1]) == 0


def test_learning_from_two_different_texts_is_refused() -> None:
    with pytest.raises(VocabularyError, match="not the same text"):
        cache().learn([1, 2], [4])


def test_a_cache_survives_its_arrays() -> None:
    ngrams = cache()
    ngrams.learn([1, 2, 1, 5], [1, 0])
    loaded = NgramCache.from_arrays(ngrams.to_arrays(), "pair", DRAFT, TARGET, 100)
    assert (loaded.lookup([1, 2]), loaded.lookup([1, 5])) == (1, 0)
    for name, array in ngrams.to_arrays().items():
        np.testing.assert_array_equal(array, cache_of(ngrams).to_arrays()[name])


def cache_of(ngrams: NgramCache) -> NgramCache:
    return NgramCache.from_arrays(ngrams.to_arrays(), "pair", DRAFT, TARGET, 100)


def test_arrays_of_another_pair_are_refused_and_both_are_named() -> None:
    with pytest.raises(VocabularyError, match="alignment pair, here it is other"):
        NgramCache.from_arrays(cache().to_arrays(), "other", DRAFT, TARGET, 100)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"key": np.array([], np.uint64)}, "differ in length"),
        ({"target": np.array([99], np.uint32)}, "token 99 of 5"),
        ({"max_length": None}, "missing"),
    ],
)
def test_damaged_arrays_are_refused(change: dict[str, np.ndarray | None], says: str) -> None:
    ngrams = cache()
    ngrams.insert([1, 2], 1)
    arrays = {name: array for name, array in (ngrams.to_arrays() | change).items() if array is not None}
    with pytest.raises(VocabularyError, match=says):
        NgramCache.from_arrays(arrays, "pair", DRAFT, TARGET, 100)


def test_a_copy_shares_nothing() -> None:
    ngrams = cache()
    ngrams.insert([1, 2], 1)
    other = ngrams.copy()
    other.insert([1, 5], 0)
    ngrams.insert([4, 3], 0)
    assert (ngrams.lookup([1, 5]), other.lookup([4, 3])) == (None, None)
    assert (len(ngrams), len(other)) == (2, 2)


@given(st.lists(st.sampled_from([((1, 2), 1), ((1, 5), 0), ((4, 3), 0), ((1, 2, 3), 0), ((2, 3), 4)]), max_size=30))
def test_no_history_makes_a_wrong_answer(history: list[tuple[tuple[int, ...], int]]) -> None:
    ngrams = cache(capacity=2)
    for draft_ids, target_id in history:
        ngrams.insert(draft_ids, target_id)
        assert len(ngrams) <= 2
        assert ngrams.lookup(draft_ids) == target_id


@pytest.mark.parametrize(("mode", "found"), [("frozen", 1), ("off", None)])
def test_a_cache_that_is_not_online_never_changes(mode: CacheMode, found: int | None) -> None:
    learned = cache()
    learned.insert([1, 2], 1)
    before = learned.to_arrays()
    held = NgramCache.from_arrays(before, "pair", DRAFT, TARGET, 100, mode=mode)
    for ngrams in (held, held.copy()):
        assert not ngrams.insert([1, 5], 0)
        assert ngrams.learn([1, 2, 1, 5], [1, 0]) == 0
        assert (ngrams.lookup([1, 2]), ngrams.lookup([1, 5])) == (found, None)
        with pytest.raises(VocabularyError, match="spell"):
            ngrams.insert([1, 2], 0)
        for name, array in ngrams.to_arrays().items():
            np.testing.assert_array_equal(array, before[name])


def test_a_look_that_only_measures_is_no_use() -> None:
    ngrams = cache(capacity=2)
    ngrams.insert([1, 5], 0)
    ngrams.insert([1, 2], 1)
    before = {name: array.tolist() for name, array in ngrams.to_arrays().items()}
    assert (ngrams.peek([1, 5]), ngrams.peek([4, 3])) == (0, None)
    assert {name: array.tolist() for name, array in ngrams.to_arrays().items()} == before
    assert ngrams.lookup([1, 5]) == 0
    assert {name: array.tolist() for name, array in ngrams.to_arrays().items()} != before
