"""What everybody has read is deleted, and offsets go on as they were."""

from pathlib import Path

from omnidraft.bus.sqlite_log import SqliteReader, SqliteWriter, delete_before
from omnidraft.ports import Outgoing


def test_messages_before_the_offsets_are_gone_and_all_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    for topic in ("t", "other"):
        writer = SqliteWriter(path, topic)
        writer.append([Outgoing(b"k", f"secret {number}".encode()) for number in range(6)])
        writer.close()
    delete_before(path, "t", {0: 4, 7: 1})
    reader, other = SqliteReader(path, "t"), SqliteReader(path, "other")
    assert [each.offset for each in reader.poll(10, 0.0).messages] == [4, 5]
    assert len(other.poll(10, 0.0).messages) == 6
    delete_before(path, "t", {0: 6})
    assert reader.first_offsets() == reader.end_offsets() == {0: 6}
    for each in (reader, other):
        each.close()
