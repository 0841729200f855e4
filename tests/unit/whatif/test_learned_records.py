"""The records that a snapshot learned are those before its offsets, less those held out."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from omnidraft import assembly, config
from omnidraft.distill.ingest.record_disposition import is_held_out
from omnidraft.ports import Outgoing
from omnidraft.snapshots.manifest import Manifest
from omnidraft.traces import archive, codec
from omnidraft.traces.record import TraceRecord
from omnidraft.whatif import log_slice
from omnidraft.whatif.learned_records import count
from omnidraft.whatif.log_slice import Slice, SliceFilter
from tests.snapshot_folders import manifest
from tests.trace_records import make_record

EVERY = 4
NUM_READ = 12
RECORDS = [make_record(f"request-{number}") for number in range(20)]
LEARNABLE = [record for record in RECORDS[:NUM_READ] if not is_held_out(record, EVERY)]


@pytest.fixture
def log(tmp_path: Path) -> Slice:
    """A log of one partition that has the records in order, the first of them twice, and junk."""
    settings = config.load(None, {}, log={"url": f"sqlite:///{tmp_path}/log.db"}, learner={"held_out_every": EVERY})
    writer = assembly.log_writer(settings, settings.log.traces_topic)
    messages = [Outgoing(codec.key(each), codec.encode(each), codec.headers(each)) for each in RECORDS]
    writer.append([*messages, messages[0], Outgoing(b"k", b"junk", codec.headers(RECORDS[0]))])
    writer.close()
    return log_slice.read(None, settings, SliceFilter())


def learned(log: Slice, snapshot: Manifest, records: Sequence[TraceRecord] = RECORDS) -> int | None:
    return count(snapshot, log, records, EVERY)


def test_records_before_the_offsets_are_learned_unless_they_were_held_out(log: Slice) -> None:
    assert 0 < len(LEARNABLE) < NUM_READ
    snapshot = manifest(num_records=9, offsets={0: NUM_READ})
    assert learned(log, snapshot) == len(LEARNABLE)
    assert learned(log, snapshot, RECORDS[NUM_READ:]) == 0


def test_a_record_that_is_in_the_log_twice_was_learned_at_its_first_copy(log: Slice) -> None:
    assert (log.positions[0], log.positions[-1]) == ((0, 0), (0, len(RECORDS)))
    first = manifest(num_records=9, offsets={0: 1}, settings={"held_out_every": "0"})
    assert learned(log, first, log.records) == 2


def test_a_snapshot_tells_itself_what_was_held_out_from_it(log: Slice) -> None:
    other = manifest(num_records=9, offsets={0: NUM_READ}, settings={"held_out_every": "0"})
    assert learned(log, other) == NUM_READ


def test_offsets_of_another_log_and_archives_do_not_tell(log: Slice, tmp_path: Path) -> None:
    snapshot = manifest(num_records=9, offsets={0: NUM_READ})
    assert learned(log, manifest(num_records=9)) is None
    assert learned(log, snapshot.model_copy(update={"log_id": log.log_id})) == len(LEARNABLE)
    assert learned(log, snapshot.model_copy(update={"log_id": "another"})) is None
    archive.write(tmp_path / "traces.avro", RECORDS)
    archived = log_slice.read(tmp_path / "traces.avro", config.load(None, {}), SliceFilter())
    assert learned(archived, snapshot) is None
    held_out = [record for record in RECORDS if is_held_out(record, EVERY)]
    assert learned(archived, snapshot, held_out) == 0
