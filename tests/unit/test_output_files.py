"""What cannot be written is refused before the work whose result goes there."""

import os
from pathlib import Path

import pytest

from omnidraft import output_files
from omnidraft.errors import RequestError
from omnidraft.output_files import require_writable, require_writable_file


def test_what_can_be_written_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    require_writable(Path("new"))
    require_writable_file(Path("some/new/file.json"))
    require_writable_file(Path("file.json"), makes_folder=False)
    require_writable_file(None)
    (tmp_path / "there.json").write_text("{}")
    require_writable_file(tmp_path / "there.json")
    assert [each.name for each in tmp_path.iterdir()] == ["there.json"]


def test_a_pipe_is_written_to_wherever_it_lies_and_a_link_where_it_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/stdout is in a folder that only root may write to."""
    (locked := tmp_path / "locked").mkdir()
    os.mkfifo(locked / "pipe")
    (locked / "link").symlink_to(tmp_path / "file.json")
    monkeypatch.setattr(output_files.os, "access", lambda path, mode: Path(path) != locked)
    require_writable_file(locked / "pipe")
    require_writable_file(locked / "link")
    with pytest.raises(RequestError, match="is not writable"):
        require_writable_file(locked / "file")
    monkeypatch.setattr(output_files.os, "access", lambda path, mode: False)
    with pytest.raises(RequestError, match="it is not writable; name another file"):
        require_writable_file(locked / "pipe")


def test_what_cannot_be_written_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="it is a folder; name a file"):
        require_writable_file(tmp_path)
    with pytest.raises(RequestError, match="is no folder"):
        require_writable(tmp_path / "file" / "new")
    with pytest.raises(RequestError, match="there is no folder"):
        require_writable_file(tmp_path / "none" / "file", makes_folder=False)
    monkeypatch.setattr(output_files.os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(RequestError, match="is not writable; name another place"):
        require_writable(tmp_path / "new")
    assert os.listdir(tmp_path) == ["file"]
