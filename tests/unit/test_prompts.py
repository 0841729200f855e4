"""What prompt files promise: errors that name file and line, rows as they were written, odd texts built in."""

import json
from pathlib import Path

import pytest

from omnidraft import prompts
from omnidraft.errors import RequestError


@pytest.mark.parametrize(
    "line",
    ["{", "5", "[]", '{"other": 1}', '{"prompt": 5}', '{"prompt": ""}', '{"prompt": "a", "answer_ids": 3}'],
)
def test_a_bad_prompt_is_refused_by_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n\n{line}\n')
    with pytest.raises(RequestError, match=f"{path}:3 needs a JSON object with a prompt or question"):
        prompts.read(path)


def test_a_file_that_cannot_be_read_is_told_in_plain_words(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=rf"^cannot read {tmp_path}/nowhere: No such file or directory$"):
        prompts.read(tmp_path / "nowhere")
    with pytest.raises(RequestError, match=rf"^cannot read {tmp_path}: Is a directory$"):
        prompts.read(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(RequestError, match=rf"^cannot read {tmp_path}/bytes: it is not UTF-8 text$"):
        prompts.read(tmp_path / "bytes")


@pytest.mark.parametrize("field", ["prompt", "answer", "reference"])
def test_half_of_a_surrogate_pair_is_refused_by_file_and_line(tmp_path: Path, field: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "a", field: "b\ud83d"}) + "\n")
    with pytest.raises(RequestError, match=f"{path}:1 .*character 1 is half of a surrogate pair, not text"):
        prompts.read(path)


def test_prompts_are_skipped_counted_and_of_a_split_or_of_none(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"question": "a", "split": "test"}, {"prompt": "b", "answer_ids": [1]}, {"prompt": "c", "split": "train"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert prompts.read(path, 1, skip=1) == [prompts.Prompt("b", (1,))]
    assert [prompt.text for prompt in prompts.read(path)] == ["a", "b", "c"]
    assert [prompt.text for prompt in prompts.read(path, split="train")] == ["b", "c"]
    with pytest.raises(RequestError, match="no prompts after the first 3"):
        prompts.read(path, skip=3)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(RequestError, match=r"has no prompts$"):
        prompts.read(tmp_path / "empty.jsonl")


def test_a_split_without_rows_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "split": "train"}\n')
    for skip, end in ((0, ""), (1, " after the first 1")):
        with pytest.raises(RequestError, match=f"has no prompts of split test{end}$"):
            prompts.read(path, skip=skip, split="test")


def test_a_line_separator_inside_a_text_ends_no_row(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert prompts.read(path) == [prompts.Prompt("a\u2028b\x85c")]


def test_the_built_in_prompts_hold_odd_texts_too() -> None:
    texts = [prompt.text for prompt in prompts.built_in()]
    together = "".join(texts)
    assert all(odd in together for odd in ("\U0001f680", "\u660e\u65e5", "\t", "\n\n\n", "\x00", "x" * 200))
    assert [prompt.text for prompt in prompts.built_in(2)] == texts[:2]
