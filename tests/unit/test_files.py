"""Files written aside: nobody else's file or link gets in their way, and what killed writers left goes."""

import json
import os
import re
import resource
import stat
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from omnidraft import files
from omnidraft.errors import RequestError
from omnidraft.files import (
    LEFTOVER_S,
    link_or_copy,
    replace_file,
    replaced_file,
    require_writable,
    require_writable_file,
    separate,
    write_text,
)
from omnidraft.private_files import PRIVATE, USUAL
from omnidraft.traces import archive
from omnidraft.vocab.alignment import Alignment, PackedLists
from tests.trace_records import make_record


def _archive(path: Path) -> None:
    archive.write(path, [make_record()])


def _separate(path: Path) -> None:
    path.write_text("text")
    path.chmod(PRIVATE)
    os.link(path, path.with_name("other name"))
    separate(path.parent)


def _align(path: Path) -> None:
    lists = PackedLists(np.zeros(1, np.int64), np.zeros(0, np.int64))
    Alignment("f", lists, lists).save(path)


WRITERS: dict[str, tuple[Callable[[Path], None], int]] = {
    "archive": (_archive, PRIVATE),
    "private text": (lambda path: write_text(path, "text", PRIVATE), PRIVATE),
    "text": (lambda path: write_text(path, "text"), USUAL & ~0o022),
    "separate": (_separate, PRIVATE),
    "alignment": (_align, USUAL & ~0o022),
    "cache": (lambda path: replace_file(path, b"text"), USUAL & ~0o022),
}


@pytest.mark.parametrize("is_link", [False, True], ids=["file", "link"])
@pytest.mark.parametrize(("write", "rights"), WRITERS.values(), ids=WRITERS)
def test_what_somebody_put_beside_a_file_changes_nothing(
    tmp_path: Path, write: Callable[[Path], None], rights: int, *, is_link: bool
) -> None:
    """A folder that others may write to: the name of what is written aside was known to them."""
    folder, other = tmp_path / "shared", tmp_path / "other"
    folder.mkdir()
    other.write_text("untouched")
    planted = folder / ".made.partial"
    if is_link:
        planted.symlink_to(other)
    else:
        planted.write_text("untouched")
        planted.chmod(0o666)
    umask = os.umask(0o022)
    try:
        write(folder / "made")
    finally:
        os.umask(umask)
    status = (folder / "made").lstat()
    assert stat.S_ISREG(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == rights
    assert other.read_text() == "untouched"
    assert planted.read_text() == "untouched"


def test_a_guessed_name_is_an_error_and_never_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Guessed:
        hex = "0" * 32

    monkeypatch.setattr(files.uuid, "uuid4", Guessed)
    other = tmp_path / "other"
    other.write_text("untouched")
    (tmp_path / f".{Guessed.hex}.partial").symlink_to(other)
    with pytest.raises(FileExistsError), replaced_file(tmp_path / "made"):
        pass
    assert other.read_text() == "untouched"


def test_what_killed_writers_left_is_deleted_once_it_is_old(tmp_path: Path) -> None:
    old, young = tmp_path / f".{'8' * 32}.partial", tmp_path / f".{'9' * 32}.partial"
    strange = [tmp_path / name for name in (".film.partial", f".{'0' * 31}.partial", f"{'0' * 32}.partial")]
    folder = tmp_path / f".{'0' * 32}.partial"
    folder.mkdir()
    link = tmp_path / f".{'1' * 32}.partial"
    link.symlink_to(strange[0])
    for path in (old, young, *strange):
        path.touch()
    long_ago_s = time.time() - LEFTOVER_S - 60
    for path in (old, folder, *strange):
        os.utime(path, (long_ago_s, long_ago_s))
    os.utime(link, (long_ago_s, long_ago_s), follow_symlinks=False)
    write_text(tmp_path / "made", "text")
    assert not old.exists()
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "made", young, folder, link, *strange])


def test_a_failed_write_leaves_the_file_before_and_nothing_else(tmp_path: Path) -> None:
    write_text(tmp_path / "made", "before")

    def interrupt() -> None:
        with replaced_file(tmp_path / "made") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"made": "before"}


def test_a_copy_where_no_link_can_be_made_has_the_rights_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError

    (tmp_path / "source").write_text("text")
    (tmp_path / "source").chmod(PRIVATE)
    monkeypatch.setattr(os, "link", refuse)
    link_or_copy(tmp_path / "source", tmp_path / "copies" / "copy")
    assert [path.name for path in (tmp_path / "copies").iterdir()] == ["copy"]
    assert stat.S_IMODE((tmp_path / "copies" / "copy").stat().st_mode) == PRIVATE


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
    monkeypatch.setattr(files.os, "access", lambda path, mode: Path(path) != locked)
    require_writable_file(locked / "pipe")
    require_writable_file(locked / "link")
    with pytest.raises(RequestError, match="is not writable"):
        require_writable_file(locked / "file")
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)
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
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(RequestError, match="is not writable; name another place"):
        require_writable(tmp_path / "new")
    assert os.listdir(tmp_path) == ["file"]


def test_a_report_is_json_in_a_folder_that_is_made(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "report.json"
    for rows in ([1], [1, 2]):
        files.save_json({"rows": rows}, path)
        assert json.loads(path.read_text()) == {"rows": rows}
    assert list(path.parent.iterdir()) == [path]


def test_a_report_that_the_disk_does_not_take_leaves_the_last_one(tmp_path: Path) -> None:
    """No file of this process can become larger than a limit: writing fails as on a full disk."""
    path = tmp_path / "report.json"
    files.save_json({"rows": [1]}, path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(RequestError, match=re.escape(f"cannot write {path}: File too large; name another file")):
            files.save_json({"rows": list(range(1000))}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert json.loads(path.read_text()) == {"rows": [1]}


def test_a_folder_is_refused_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(RequestError, match=re.escape(f"cannot write {folder}: Is a directory; name another file")):
        files.save_json({}, folder)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_pipe_is_written_to() -> None:
    """So is /dev/stdout, which must not be replaced by a file."""
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w"):
        files.save_json({"rows": [1]}, Path(f"/proc/self/fd/{writer}"))
        assert json.loads(os.read(reader, 1000)) == {"rows": [1]}
