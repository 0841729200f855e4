"""A broken record is shown up to where it breaks."""

import pytest

from omnidraft.traces import codec
from omnidraft.traces.best_effort_decode import readable_fields
from omnidraft.traces.schema import SCHEMA_V3
from tests.trace_records import make_record

NAMES = [field["name"] for field in SCHEMA_V3["fields"]]


def test_a_whole_record_has_all_its_fields():
    record = make_record("request-9")
    fields = readable_fields(codec.encode(record))
    assert list(fields) == NAMES
    assert fields["request_id"] == "request-9"
    assert fields["emitted_ids"] == record.emitted_ids.tolist()
    assert fields["rounds"]["parents_M"] == record.rounds.parents_M.tolist()


@pytest.mark.parametrize("num_bytes", [0, 1, 40, 200, 500])
def test_a_truncated_record_has_the_fields_before_the_cut(num_bytes):
    whole = codec.encode(make_record("request-9"))
    fields = readable_fields(whole[:num_bytes])
    assert list(fields) == NAMES[: len(fields)]
    assert len(fields) < len(NAMES)
    assert bool(fields) == (num_bytes > 10)
