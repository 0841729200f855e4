"""What runs as code from the user's cache is the user's or root's, and nobody else may write to it."""

import ctypes
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from omnidraft.errors import KernelsUnavailable
from omnidraft.models.native.build import compiled
from omnidraft.models.native.library import open_library
from omnidraft.private_files import make_folder, require_unshared_file, require_unshared_folder

STRANGER = 12_345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
Change = Callable[[Path], None]


def give_away(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER)


def open_to_all(path: Path) -> None:
    path.chmod(0o777)


def open_to_a_group(path: Path) -> None:
    os.chown(path, -1, STRANGER)
    path.chmod(0o770)


CHANGES = [
    pytest.param(give_away, marks=needs_root),
    pytest.param(open_to_a_group, marks=needs_root),
    open_to_all,
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text('extern "C" int answer() { return 42; }')
    return path


@pytest.mark.parametrize("change", CHANGES)
def test_a_library_that_somebody_else_could_have_written_is_compiled_anew(
    source: Path, tmp_path: Path, change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    library = compiled(source, tmp_path / "native")
    forged = tmp_path / "forged.cpp"
    forged.write_text('extern "C" int answer() { return 666; }')
    shutil.copy(compiled(forged, tmp_path / "elsewhere"), library)
    change(library)
    with caplog.at_level(logging.WARNING):
        assert ctypes.CDLL(str(compiled(source, tmp_path / "native"))).answer() == 42
    assert "anew" in caplog.text
    require_unshared_file(library)


@pytest.mark.parametrize(
    ("which", "change"), [("home/native", open_to_all), pytest.param("home", open_to_a_group, marks=needs_root)]
)
def test_a_folder_that_somebody_else_may_write_to_is_refused_with_what_to_do(
    source: Path, tmp_path: Path, change: Change, which: str
) -> None:
    native = tmp_path / "home" / "native"
    compiled(source, native)
    change(tmp_path / which)
    with pytest.raises(KernelsUnavailable, match=r"(delete it|chmod).*OMNIDRAFT_HOME"):
        compiled(source, native)


def test_no_such_library_is_opened(source: Path, tmp_path: Path) -> None:
    library = compiled(source, tmp_path / "native")
    open_to_all(library)
    with pytest.raises(KernelsUnavailable, match=r"delete it"):
        open_library(library)


def test_folders_are_for_their_owner_only_and_a_sticky_one_may_hold_them(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        (tmp_path / "shared").mkdir()
        make_folder(tmp_path / "shared" / "home" / "native")
        make_folder(tmp_path / "shared" / "home" / "native")
    finally:
        os.umask(before)
    folders = [tmp_path / "shared" / "home", tmp_path / "shared" / "home" / "native"]
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700, 0o700]
    with pytest.raises(PermissionError, match="others may write"):
        require_unshared_folder(folders[0])
    (tmp_path / "shared").chmod(0o1777)
    require_unshared_folder(folders[0])
    require_unshared_folder(folders[1])


def test_a_group_of_the_users_own_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    file.chmod(0o664)
    require_unshared_file(file)
    monkeypatch.setattr("grp.getgrgid", lambda group_id: type("Group", (), {"gr_name": "staff", "gr_mem": ["eve"]}))
    with pytest.raises(PermissionError, match="others may write"):
        require_unshared_file(file)
