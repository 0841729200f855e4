"""Reports on disk: whole or not there, in folders that are made, and refusals that say what to do."""

import json
import os
import re
import resource
from pathlib import Path

import pytest

from omnidraft import json_report
from omnidraft.errors import RequestError


def test_a_report_is_json_in_a_folder_that_is_made(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "report.json"
    for rows in ([1], [1, 2]):
        json_report.save({"rows": rows}, path)
        assert json.loads(path.read_text()) == {"rows": rows}
    assert list(path.parent.iterdir()) == [path]


def test_a_report_that_the_disk_does_not_take_leaves_the_last_one(tmp_path: Path) -> None:
    """No file of this process can become larger than a limit: writing fails as on a full disk."""
    path = tmp_path / "report.json"
    json_report.save({"rows": [1]}, path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(RequestError, match=re.escape(f"cannot write {path}: File too large; name another file")):
            json_report.save({"rows": list(range(1000))}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert json.loads(path.read_text()) == {"rows": [1]}


def test_a_folder_is_refused_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(RequestError, match=re.escape(f"cannot write {folder}: Is a directory; name another file")):
        json_report.save({}, folder)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_pipe_is_written_to() -> None:
    """So is /dev/stdout, which must not be replaced by a file."""
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w"):
        json_report.save({"rows": [1]}, Path(f"/proc/self/fd/{writer}"))
        assert json.loads(os.read(reader, 1000)) == {"rows": [1]}
