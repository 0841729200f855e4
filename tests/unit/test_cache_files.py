"""No reader finds a file of the cache half written, whoever writes it at the same time."""

import os
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
    file, rename = tmp_path / "costs.json", os.replace

    def rename_after_the_other(partial: Path, path: Path) -> None:
        monkeypatch.setattr(os, "replace", rename)
        replace_file(file, b"other")
        rename(partial, path)

    monkeypatch.setattr(os, "replace", rename_after_the_other)
    replace_file(file, b"ours")
    assert file.read_bytes() == b"ours"
    assert list(tmp_path.iterdir()) == [file]
