"""No reader finds a file of the cache half written, whoever writes it at the same time."""

import os
import time
from pathlib import Path

import pytest

from omnidraft.cache_files import replace_file


def test_a_file_is_replaced_and_nothing_else_stays(tmp_path: Path) -> None:
    file = tmp_path / "new" / "costs.json"
    for content in (b"first", b"second"):
        replace_file(file, content)
        assert file.read_bytes() == content
    assert list(file.parent.iterdir()) == [file]


def test_writers_with_equal_process_and_thread_ids_do_not_collide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of two containers that share a home."""
    file, rename = tmp_path / "costs.json", Path.replace

    def rename_after_the_other(partial: Path, path: Path) -> Path:
        monkeypatch.setattr(Path, "replace", rename)
        replace_file(file, b"other")
        return rename(partial, path)

    monkeypatch.setattr(Path, "replace", rename_after_the_other)
    replace_file(file, b"ours")
    assert file.read_bytes() == b"ours"
    assert list(tmp_path.iterdir()) == [file]


def test_a_writer_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        replace_file(tmp_path / "costs.json", b"x")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_deleted_once_it_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, other = tmp_path / "costs.json", tmp_path / "other.json"
    with monkeypatch.context() as killed:
        killed.setattr(Path, "replace", lambda *_: None)
        killed.setattr(Path, "unlink", lambda *_, **__: None)
        replace_file(file, b"old")
        replace_file(file, b"of a writer at work")
    first, second = sorted(tmp_path.iterdir(), key=lambda each: each.read_bytes(), reverse=True)
    yesterday_s = time.time() - 86400
    os.utime(first, (yesterday_s, yesterday_s))
    replace_file(other, b"x")
    assert sorted(tmp_path.iterdir()) == sorted([second, other])
