"""Staged snapshots do not outlive the process that staged them, whichever way it ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from omnidraft.registry.staging import own_folder, remove_abandoned

CODE = (
    "import os, signal, sys; from omnidraft.registry.staging import own_folder\n"
    "folder = own_folder(); (folder / 'ngrams').write_text('x'); print(folder, flush=True)\n"
    "if sys.argv[1] == 'killed': os.kill(os.getpid(), signal.SIGKILL)\n"
)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def staged_by(how: str) -> Path:
    done = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=False, timeout=60)
    return Path(done.stdout.strip())


def test_a_process_that_ends_removes_its_folder(temporary: Path) -> None:
    assert not staged_by("ended").exists()
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_others_use_stays(temporary: Path) -> None:
    in_use, older = own_folder(), temporary / "omnidraft-snapshots-older"
    older.mkdir()
    abandoned = staged_by("killed")
    assert (abandoned / "ngrams").exists()
    remove_abandoned()
    assert (abandoned.exists(), in_use.exists(), older.exists()) == (False, True, True)
