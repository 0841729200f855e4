"""`pipelines.evaluate` counts the records that a snapshot learned: those before its offsets, less those held out."""

from pathlib import Path

import pytest

from omnidraft import config, wiring
from omnidraft.distill.ingest.record_disposition import is_held_out
from omnidraft.ports import Outgoing
from omnidraft.traces import codec
from omnidraft.traces.record import TraceRecord
from pipelines.evaluate import LearnedRecords
from tests.snapshot_folders import manifest
from tests.trace_records import make_record

EVERY = 4
NUM_READ = 12
RECORDS = [make_record(f"request-{number}") for number in range(20)]
LEARNABLE = [record for record in RECORDS[:NUM_READ] if not is_held_out(record, EVERY)]


@pytest.fixture
def settings(tmp_path: Path) -> config.Settings:
    """Settings with a log of one partition that has the records in order, one of them twice, and junk."""
    settings = config.load(None, {}, log={"url": f"sqlite:///{tmp_path}/log.db"}, learner={"held_out_every": EVERY})
    writer = wiring.log_writer(settings, settings.log.traces_topic)
    writer.append([Outgoing(codec.key(each), codec.encode(each), codec.headers(each)) for each in RECORDS])
    writer.append([Outgoing(codec.key(each), codec.encode(each), codec.headers(each)) for each in RECORDS[:1]])
    writer.append([Outgoing(b"k", b"junk", codec.headers(RECORDS[0]))])
    writer.close()
    return settings


def learned(settings: config.Settings, records: list[TraceRecord] = RECORDS, *, is_log: bool = True) -> LearnedRecords:
    return LearnedRecords(settings, records, is_log=is_log)


def test_records_before_the_offsets_are_learned_unless_they_were_held_out(settings: config.Settings) -> None:
    assert 0 < len(LEARNABLE) < NUM_READ
    snapshot = manifest(num_records=9, offsets={0: NUM_READ})
    assert learned(settings).count(snapshot) == len(LEARNABLE)
    assert learned(settings, RECORDS[NUM_READ:]).count(snapshot) == 0


def test_a_snapshot_tells_itself_what_was_held_out_from_it(settings: config.Settings) -> None:
    other = manifest(num_records=9, offsets={0: NUM_READ}, settings={"held_out_every": "0"})
    assert learned(settings).count(other) == NUM_READ


def test_a_drafter_that_learned_nothing_has_learned_no_record(settings: config.Settings) -> None:
    assert learned(settings).count(None) == 0
    assert learned(settings).count(manifest(offsets={0: NUM_READ})) == 0


def test_offsets_of_another_log_and_archives_do_not_tell(settings: config.Settings) -> None:
    snapshot = manifest(num_records=9, offsets={0: NUM_READ})
    assert learned(settings).count(manifest(num_records=9)) is None
    assert learned(settings).count(snapshot.model_copy(update={"log_id": "another"})) is None
    assert learned(settings, is_log=False).count(snapshot) is None
    held_out = [record for record in RECORDS if is_held_out(record, EVERY)]
    assert learned(settings, held_out, is_log=False).count(snapshot) == 0
