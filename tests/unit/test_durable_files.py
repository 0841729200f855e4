"""Files written aside: nobody else's file or link gets in their way, and what killed writers left goes."""

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from omnidraft import durable_files
from omnidraft.cache_files import replace_file
from omnidraft.durable_files import LEFTOVER_S, replaced_file
from omnidraft.private_files import PRIVATE, USUAL
from omnidraft.snapshots.files import link_or_copy, separate, write_text
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

    monkeypatch.setattr(durable_files.uuid, "uuid4", Guessed)
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
