"""Archives that cannot be read, or would not fit into memory, are refused in one sentence."""

import tracemalloc
import zlib
from pathlib import Path

import fastavro
import pytest

from omnidraft.errors import RequestError, WireError
from omnidraft.traces import archive


@pytest.mark.parametrize(("name", "reason"), [("missing.avro", "No such file"), (".", "Is a directory")])
def test_an_archive_that_cannot_be_read_is_refused_in_one_line(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(RequestError, match=rf"^cannot read trace records: .*{reason}[^\n]*$"):
        list(archive.read(tmp_path / name))


def test_a_block_that_unpacks_to_more_than_a_block_may_have_takes_no_memory_for_it(tmp_path: Path) -> None:
    path = tmp_path / "traces.avro"
    archive.write(path, [])
    packed = zlib.compress(bytes(5 * archive.MAX_BLOCK_BYTES), wbits=-zlib.MAX_WBITS)
    with path.open("ab") as file:
        fastavro.schemaless_writer(file, "long", 1)
        fastavro.schemaless_writer(file, "bytes", packed)
    tracemalloc.start()
    with pytest.raises(WireError, match=rf"a block of {len(packed):,} bytes unpacks to 33,554,432 or more"):
        list(archive.read(path))
    assert tracemalloc.get_traced_memory()[1] < 3 * archive.MAX_BLOCK_BYTES
    tracemalloc.stop()
