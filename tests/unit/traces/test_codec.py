"""The trace codec: a faithful round trip, small messages, and WireError for everything broken."""

import io
import json
from dataclasses import fields, replace
from pathlib import Path

import fastavro
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.errors import UnknownSchema, WireError
from omnidraft.traces import archive, codec
from omnidraft.traces.record import MAX_INT, SOURCES, Rounds, TargetLogprobs, TraceRecord
from omnidraft.traces.schema import MAX_PAYLOAD_BYTES, MAX_WRITTEN_BYTES, SCHEMA
from tests.trace_records import make_record

GOLDEN = Path(__file__).parents[1] / "golden"
FIELD_NAMES = [field["name"] for field in SCHEMA["fields"]]
WIDE_SCHEMA = fastavro.parse_schema(json.loads(json.dumps(SCHEMA).replace('"int"', '"long"')))
"""It writes numbers above Avro's int into the same bytes."""
HEADERS = {"schema": b"omnidraft.trace", "schema_version": b"1"}


def assert_same(left: TraceRecord, right: TraceRecord) -> None:
    for holder in (lambda record: record, lambda record: record.beliefs, lambda record: record.rounds):
        ours, theirs = holder(left), holder(right)
        if ours is None or theirs is None:
            assert ours is theirs
            continue
        for field in fields(ours):
            value, other = getattr(ours, field.name), getattr(theirs, field.name)
            if isinstance(value, np.ndarray):
                assert value.dtype == other.dtype, field.name
                assert np.array_equal(value, other), field.name
            elif not isinstance(value, TargetLogprobs | Rounds):
                assert value == other, field.name


def with_column(record: TraceRecord, name: str, column: np.ndarray) -> TraceRecord:
    """The record with one column replaced, wherever it lives."""
    if hasattr(record.rounds, name):
        return replace(record, rounds=replace(record.rounds, **{name: column}))
    if record.beliefs is not None and hasattr(record.beliefs, name):
        return replace(record, beliefs=replace(record.beliefs, **{name: column}))
    return replace(record, **{name: column})


ALMOST_NOTHING = {"beliefs": None, "snapshot_version": None, "top_p": None, "finish_reason": None, "traceparent": None}


@pytest.mark.parametrize(
    "fields", [{}, ALMOST_NOTHING, {"num_emitted": 1, "num_kept": 1}, {"tenant": "memory group g"}]
)
def test_a_record_comes_back_as_it_was(fields):
    record = make_record(**fields)
    assert_same(codec.decode(codec.encode(record), codec.headers(record)), record)


def test_the_golden_bytes_of_the_schema_version_never_change():
    """Written once; whoever changes them breaks every log that exists."""
    golden = (GOLDEN / "trace.bin").read_bytes()
    record = codec.decode(golden, HEADERS)
    assert codec.to_json(record) == json.loads((GOLDEN / "trace.json").read_text())
    assert codec.encode(record) == golden


def test_headers_tell_target_version_alignment_and_trace_without_parsing():
    record = make_record()
    assert codec.headers(record) == HEADERS | {
        "target": b"target",
        "drafter_version": b"7",
        "alignment": b"aligned",
        "traceparent": record.traceparent.encode(),
    }
    assert codec.key(record) == b"request-1"


@pytest.mark.parametrize("headers", [{}, HEADERS | {"schema_version": b"2"}, HEADERS | {"schema": b"other"}])
def test_another_schema_is_named_as_unknown(headers):
    with pytest.raises(UnknownSchema, match="header schema"):
        codec.decode(codec.encode(make_record()), headers)


def test_every_truncation_is_refused():
    payload = codec.encode(make_record())
    for length in range(len(payload)):
        with pytest.raises(WireError):
            codec.decode(payload[:length], HEADERS)


def test_a_payload_above_the_cap_is_refused_before_it_is_parsed():
    with pytest.raises(WireError, match=f"at most {MAX_PAYLOAD_BYTES}"):
        codec.decode(bytes(MAX_PAYLOAD_BYTES + 1), HEADERS)


def test_a_record_too_large_for_a_message_is_not_written():
    with pytest.raises(WireError, match="at most"):
        codec.encode(make_record(prompt_ids=np.zeros(300_000, np.uint32)))


def broken_columns() -> dict[str, np.ndarray]:
    good = make_record()
    nan = np.float16("nan")
    return {
        "emitted_ids": np.array([], np.uint32),
        "prompt_ids": np.array([1 << 24], np.uint32),
        "drafter_prompt_ids": np.array([-1], np.int64),
        "before_ids": np.array([0.5]),
        "top_ids_EK": good.beliefs.top_ids_EK[:-1],
        "top_log_p_EK": good.beliefs.top_log_p_EK[:, ::-1],
        "emitted_log_p_E": np.full(6, nan),
        "tail_log_p_E": np.full(6, 1.0, np.float16),
        "num_nodes_R": np.array([2, 2, 3], np.uint16),
        "num_accepted_R": np.array([1, 1, 2], np.uint16),
        "num_emitted_R": np.array([2, 2, 3], np.uint16),
        "draft_ids_D": good.rounds.draft_ids_D[:-1],
        "parents_M": np.array([0, 2, 0, 1, 0, 1], np.uint16),
        "sources_M": np.full(6, len(SOURCES), np.uint8),
        "log_q_M": np.full(6, nan),
        "accepted_M": np.full(6, 2, np.uint8),
        "node_ids_M": np.full(6, 1 << 31, np.uint32),
        "draft_s_R": np.full(3, np.inf, np.float32),
        "target_s_R": np.full(3, -1.0, np.float32),
    }


@pytest.mark.parametrize(("name", "column"), broken_columns().items(), ids=broken_columns().keys())
def test_a_broken_column_is_refused_by_name(name, column):
    with pytest.raises(WireError):
        codec.encode(with_column(make_record(), name, column))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("seed", -1), ("seed", 1 << 64), ("segment", -1), ("segment", 1 << 31), ("mode", "slow")),
        *(("temperature", float("nan")), ("top_p", -0.1), ("top_k", 0), ("top_k", 1 << 31), ("request_id", "")),
        *(("finish_reason", "bored"), ("snapshot_version", -2)),
        *(("min_p", 1.5), ("noise_weight", float("nan")), ("repetition_penalty", 0.0)),
        *(("presence_penalty", float("inf")), ("frequency_penalty", float("nan"))),
        *(("tenant", "t" * 1025), ("tenant", "a\0b")),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(WireError, match=name):
        codec.encode(make_record(**{name: value}))


@pytest.mark.parametrize("number", [1, MAX_INT, MAX_INT + 1, 1 << 40])
@pytest.mark.parametrize("name", ["segment", "top_k"])
def test_what_is_read_can_be_written_whatever_its_numbers_are(name, number):
    payload = io.BytesIO()
    fastavro.schemaless_writer(payload, WIDE_SCHEMA, codec.to_row(make_record()) | {name: number})
    if number > MAX_INT:
        with pytest.raises(WireError, match=name):
            codec.decode(payload.getvalue(), HEADERS)
    else:
        assert codec.encode(codec.decode(payload.getvalue(), HEADERS)) == payload.getvalue()


def test_a_copy_that_is_kept_may_be_larger_than_what_is_written_or_read():
    for num_ids in (255_000, 300_000):
        record = make_record(prompt_ids=np.zeros(num_ids, np.uint32))
        payload = codec.encode(record, max_bytes=None)
        assert len(payload) > MAX_WRITTEN_BYTES
        assert_same(codec.decode(payload, HEADERS, max_bytes=None), record)


@given(st.binary(max_size=400))
@settings(max_examples=300)
def test_random_bytes_never_raise_anything_but_wire_error(payload):
    with pytest.raises(WireError):
        codec.decode(payload, HEADERS)


@given(st.data())
@settings(max_examples=120)
def test_a_damaged_record_decodes_to_a_sound_one_or_raises_wire_error(data):
    payload = bytearray(codec.encode(make_record()))
    for _ in range(data.draw(st.integers(1, 4))):
        offset = data.draw(st.integers(0, len(payload) - 1))
        payload[offset] = data.draw(st.integers(0, 255))
    try:
        record = codec.decode(bytes(payload), HEADERS)
    except WireError:
        return
    assert_same(codec.decode(codec.encode(record), HEADERS), record)


def test_json_holds_every_field_and_no_infinity():
    text = json.dumps(codec.to_json(make_record()), allow_nan=False)
    assert set(json.loads(text)) == {field.name for field in fields(TraceRecord)}


def test_an_archive_gives_back_its_records_in_order(tmp_path):
    records = [make_record(f"request-{number}", num_emitted=number + 1) for number in range(20)]
    archive.write(tmp_path / "traces.avro", records)
    for read, written in zip(archive.read(tmp_path / "traces.avro"), records, strict=True):
        assert_same(read, written)


def test_an_archive_that_fails_half_way_leaves_no_file(tmp_path):
    with pytest.raises(WireError):
        archive.write(tmp_path / "traces.avro", [make_record(), make_record(mode="slow")])
    assert not list(tmp_path.iterdir())


def test_a_damaged_archive_raises_wire_error(tmp_path):
    path = tmp_path / "traces.avro"
    archive.write(path, [make_record(f"request-{number}") for number in range(5)])
    whole = path.read_bytes()
    for cut in range(0, len(whole), 97):
        path.write_bytes(whole[:cut] + bytes(8) + whole[cut + 8 :])
        try:
            list(archive.read(path))
        except WireError:
            continue
        assert cut > 16, "a damaged magic number was read"


def test_a_whole_record_is_readable_in_all_its_fields():
    record = make_record("request-9")
    fields = codec.readable_fields(codec.encode(record))
    assert list(fields) == FIELD_NAMES
    assert fields["request_id"] == "request-9"
    assert fields["emitted_ids"] == record.emitted_ids.tolist()
    assert fields["rounds"]["parents_M"] == record.rounds.parents_M.tolist()


@pytest.mark.parametrize("num_bytes", [0, 1, 40, 200, 500])
def test_of_a_truncated_record_the_fields_before_the_cut_are_readable(num_bytes):
    whole = codec.encode(make_record("request-9"))
    fields = codec.readable_fields(whole[:num_bytes])
    assert list(fields) == FIELD_NAMES[: len(fields)]
    assert len(fields) < len(FIELD_NAMES)
    assert bool(fields) == (num_bytes > 10)
