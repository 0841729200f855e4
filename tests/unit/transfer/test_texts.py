"""Two tokenisations of one text meet where they spell the same bytes, and files say what the texts are."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.errors import ModelError, RequestError
from omnidraft.transfer.texts import TextTokenizer, align_text, read_texts
from tests.tiny_pair import Pair


def sides(pair: Pair) -> tuple[TextTokenizer, TextTokenizer]:
    return TextTokenizer.of(pair.draft, [], "old"), TextTokenizer.of(pair.target, [], "new")


@given(text=st.text(min_size=1, max_size=60), max_tokens=st.integers(2, 80))
@settings(max_examples=60)
def test_both_sides_spell_the_same_bytes_up_to_every_point(pair: Pair, text: str, max_tokens: int) -> None:
    old, new = sides(pair)
    aligned = align_text(text, old, new, max_tokens)
    data = text.encode()
    for old_at, new_at in zip(aligned.old_at_P, aligned.new_at_P, strict=True):
        spelled = old.vocabulary.spell(aligned.old_ids_O[1 : old_at + 1])
        assert spelled == new.vocabulary.spell(aligned.new_ids_T[1 : new_at + 1])
        assert data.startswith(spelled)
    assert len(spelled) == aligned.num_bytes
    assert max(len(aligned.old_ids_O), len(aligned.new_ids_T)) <= max_tokens
    assert (np.diff(aligned.old_at_P) > 0).all()
    if max_tokens == 80 and len(data) < 70:
        assert aligned.num_bytes == len(data)


def test_a_text_is_a_prompt_with_its_answer_whatever_form_that_has(pair: Pair, tmp_path: Path) -> None:
    ids = pair.target.encode("the sea")
    rows = [
        {"prompt": "Where?", "answer": "There."},
        {"question": "Where?", "answer_ids": ids},
        {"prompt": "Where?", "reference": "Here."},
        {"prompt": "Alone"},
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    texts = ["Where?\n\nThere.", "Where?\n\nthe sea", "Where?\n\nHere.", "Alone"]
    assert read_texts(path, pair.target.vocabulary) == texts


def test_answers_in_another_vocabulary_are_refused(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "Where?", "answer_ids": [len(pair.target.vocabulary)]}))
    with pytest.raises(RequestError, match="outside the 330 ids"):
        read_texts(path, pair.target.vocabulary)


def test_a_tokenizer_without_any_start_is_refused(pair: Pair) -> None:
    class Bare:
        vocabulary = type(pair.draft.vocabulary)((b"a",), {}, frozenset())

    with pytest.raises(ModelError, match="start"):
        TextTokenizer.of(Bare(), [], "bare")  # type: ignore[arg-type]


def test_rows_of_another_split_are_not_learned(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "one", "split": "train"}, {"prompt": "two", "split": "test"}, {"prompt": "three"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read_texts(path, pair.target.vocabulary) == ["one", "three"]
