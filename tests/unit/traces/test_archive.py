"""Archives that cannot be read are refused in one sentence."""

from pathlib import Path

import pytest

from omnidraft.errors import RequestError
from omnidraft.traces import archive


@pytest.mark.parametrize(("name", "reason"), [("missing.avro", "No such file"), (".", "Is a directory")])
def test_an_archive_that_cannot_be_read_is_refused_in_one_line(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(RequestError, match=rf"^cannot read trace records: .*{reason}[^\n]*$"):
        list(archive.read(tmp_path / name))
