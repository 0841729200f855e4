"""Which rows of a file, and which records of an archive, `pipelines.learn` takes."""

import json
from pathlib import Path

import pytest

from omnidraft.errors import RequestError
from pipelines import learn
from tests.trace_records import make_record


def write_rows(path: Path, *splits: str | None) -> Path:
    rows = [{"prompt": f"{number}"} | ({"split": split} if split else {}) for number, split in enumerate(splits)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_train_alone_is_learned_where_a_file_names_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows(tmp_path / "rows.jsonl", "test", "train", None, "train", "test")
    assert [row.text for row in learn._rows(path, None, None)] == ["1", "2", "3"]
    assert "train alone is learned" in capsys.readouterr().err
    assert [row.text for row in learn._rows(path, 2, None)] == ["1", "2"]
    capsys.readouterr()
    assert [row.text for row in learn._rows(path, None, "test")] == ["0", "2", "4"]
    assert capsys.readouterr().err == ""


def test_a_file_without_splits_is_learned_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows(tmp_path / "rows.jsonl", None, None)
    assert len(learn._rows(path, None, None)) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("split", [None, "validation"])
def test_a_split_that_a_file_does_not_name_is_refused(tmp_path: Path, split: str | None) -> None:
    path = write_rows(tmp_path / "rows.jsonl", "dev", None)
    with pytest.raises(RequestError, match="--split is one of dev"):
        learn._rows(path, None, split)


def test_answers_of_an_archive_are_counted_not_records() -> None:
    """A long answer has several records, and those of other answers may be between them."""
    names = [("a", 0), ("b", 0), ("a", 1), ("c", 0), ("b", 1)]
    records = [make_record(request_id, segment=segment) for request_id, segment in names]
    taken = [(each.request_id, each.segment) for each in learn._of_first_answers(records, 2)]
    assert taken == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert list(learn._of_first_answers(records, None)) == records
