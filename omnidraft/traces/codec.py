"""Encoding and decoding of trace records; every record enters and leaves the process through this module.

A record is checked by the same rules before it is written and after it is read, so a record that a learner would refuse
fails where it was made. Arrays of a decoded record are read-only views into its payload.
"""

import io
from collections.abc import Mapping
from functools import cache
from typing import Any

import fastavro
import numpy as np

from omnidraft.errors import RecordForgotten, RecordTooLarge, UnknownKey, UnknownSchema, WireError
from omnidraft.traces.checks import check
from omnidraft.traces.record import MAX_EMITTED, SEED_BYTES, Field, Rounds, TargetLogprobs, TraceRecord, fields_of
from omnidraft.traces.schema import (
    ENCRYPTION,
    FORGOTTEN,
    MAX_PAYLOAD_BYTES,
    MAX_WRITTEN_BYTES,
    SCHEMA,
    SCHEMA_NAME,
    SCHEMA_VERSION,
)

AVRO_ERRORS = (EOFError, IndexError, KeyError, TypeError, ValueError, OverflowError, MemoryError)
"""What fastavro raises for bytes that are not what they should be."""


def no_rounds() -> Rounds:
    """Return the rounds of a record that tells nothing about drafts."""
    return Rounds(**{field.name: np.zeros(0, field.kind) for field in fields_of(Rounds)})


def key(record: TraceRecord) -> bytes:
    """Return the message key: one request stays in one partition, in order."""
    return record.request_id.encode()


def headers(record: TraceRecord) -> dict[str, bytes]:
    """Return the headers, for readers that do not parse the message; facts that the record lacks are left out."""
    facts = {
        "schema": SCHEMA_NAME,
        "schema_version": str(SCHEMA_VERSION),
        "target": record.target,
        "drafter_version": None if record.snapshot_version is None else str(record.snapshot_version),
        "alignment": record.alignment,
        "traceparent": record.traceparent,
    }
    return {name: fact.encode() for name, fact in facts.items() if fact is not None}


def encode(record: TraceRecord, *, max_bytes: int | None = MAX_WRITTEN_BYTES) -> bytes:
    """Return the message value.

    Args:
        max_bytes: None for a copy that is kept outside a log.

    Raises:
        WireError: the record breaks a rule of checks.py; names the field.
        RecordTooLarge: it has more than `max_bytes`.
    """
    payload = io.BytesIO()
    try:
        row = to_row(record)
        fastavro.schemaless_writer(payload, parsed_schema(), row)
    except (AttributeError, *AVRO_ERRORS) as exc:
        raise WireError(f"not a trace record: {type(exc).__name__}: {exc}") from exc
    if max_bytes is not None and payload.tell() > max_bytes:
        raise RecordTooLarge(f"record: {payload.tell()} bytes, at most {max_bytes} are written; shorten the prompt")
    return payload.getvalue()


def decode(payload: bytes, headers: Mapping[str, bytes], *, max_bytes: int | None = MAX_PAYLOAD_BYTES) -> TraceRecord:
    """Return the record in a message.

    Args:
        max_bytes: None for a copy that was kept outside a log.

    Raises:
        RecordForgotten: its tenant was forgotten.
        UnknownKey: it is encrypted, and the log reader could not decrypt it.
        UnknownSchema: another program or another version wrote it.
        WireError: it is broken; names the field.
    """
    if FORGOTTEN in headers:
        raise RecordForgotten("payload: gone, as its tenant was forgotten")
    if ENCRYPTION in headers:
        raise UnknownKey("payload: encrypted with a key that is not among log.encryption_keys")
    _require_schema(headers)
    if max_bytes is not None and len(payload) > max_bytes:
        raise WireError(f"payload: {len(payload)} bytes, at most {max_bytes} are read")
    source = io.BytesIO(payload)
    try:
        row = fastavro.schemaless_reader(source, parsed_schema(), None)
    except AVRO_ERRORS as exc:
        raise WireError(f"payload: not Avro of version {SCHEMA_VERSION}: {type(exc).__name__}: {exc}") from exc
    if source.tell() != len(payload):
        raise WireError(f"payload: {len(payload) - source.tell()} bytes behind the record")
    return from_row(row)


@cache
def parsed_schema() -> Any:
    """Return the schema, parsed by fastavro."""
    return fastavro.parse_schema(dict(SCHEMA))


def to_row(record: TraceRecord) -> dict[str, Any]:
    """Return the record as Avro fields.

    Raises:
        WireError: it breaks a rule of checks.py; names the field.
    """
    row = _row(record)
    check(record)
    row["seed"] = record.seed.to_bytes(SEED_BYTES, "little")
    return row


def from_row(row: Any) -> TraceRecord:
    """Return the record of a mapping of Avro fields.

    Raises:
        WireError: it breaks a rule of checks.py; names the field.
    """
    fields = _unpacked(TraceRecord, row)
    fields["rounds"] = Rounds(**_unpacked(Rounds, row["rounds"]))
    if row["beliefs"] is not None:
        fields["beliefs"] = _logprobs(row["beliefs"], len(fields["emitted_ids"]))
    record = TraceRecord(**fields | {"seed": int.from_bytes(row["seed"], "little")})
    check(record)
    return record


def to_json(record: TraceRecord | TargetLogprobs | Rounds) -> dict[str, Any]:
    """Return the record for people: lists and rounded numbers; -inf becomes null, as JSON has no infinity."""
    fields = {}
    for field in fields_of(type(record)):
        value = getattr(record, field.name)
        if isinstance(value, TargetLogprobs | Rounds):
            value = to_json(value)
        fields[field.name] = _to_list(value) if field.is_column else value
    return fields


def readable_fields(payload: bytes) -> dict[str, Any]:
    """Return what can be read of a broken record, for people who search for the cause; nothing is learned from it.

    The fields come in the order of the schema, up to the first that cannot be read, as plain data for JSON.
    """
    source, fields = io.BytesIO(payload), dict[str, Any]()
    for field, avro in zip(fields_of(TraceRecord), SCHEMA["fields"], strict=True):
        try:
            value = fastavro.schemaless_reader(source, fastavro.parse_schema(avro["type"]), None)
        except AVRO_ERRORS:
            break
        fields[field.name] = _plain_value(field, value)
    return fields


def _to_list(column: np.ndarray) -> list[Any]:
    if column.dtype.kind != "f":
        return column.tolist()
    flat = [round(number, 4) if np.isfinite(number) else None for number in column.ravel().tolist()]
    if column.ndim == 1:
        return flat
    width = column.shape[1]
    return [flat[start : start + width] for start in range(0, len(flat), width)]


def _plain_value(field: Field, value: Any) -> Any:
    if isinstance(value, dict):
        return {column.name: _plain_value(column, value[column.name]) for column in fields_of(field.kind)}
    if not isinstance(value, bytes):
        return value
    kind = field.kind if field.is_column else np.dtype("|u1")
    if len(value) % kind.itemsize:
        return value.hex()
    return [number if np.isfinite(number) else None for number in np.frombuffer(value, kind).tolist()]


def _require_schema(headers: Mapping[str, bytes]) -> None:
    name = headers.get("schema", b"")
    if name != SCHEMA_NAME.encode():
        raise UnknownSchema(f"header schema: {name!r}, this reader knows {SCHEMA_NAME}")
    version = headers.get("schema_version", b"")
    if version != str(SCHEMA_VERSION).encode():
        raise UnknownSchema(f"header schema_version: {version!r}, this reader knows {SCHEMA_VERSION}")


def _row(record: object) -> dict[str, Any]:
    row = {}
    for field in fields_of(type(record)):
        value = getattr(record, field.name)
        if field.is_column:
            value = _packed(field, np.asarray(value))
        elif isinstance(field.kind, type) and value is not None:
            value = _row(value)
        row[field.name] = value
    return row


def _packed(field: Field, column: np.ndarray) -> bytes:
    """Pack a column into bytes; a number that does not fit its type is refused, never wrapped."""
    if column.dtype != field.kind:
        _refuse_wrapping(field.name, column, field.kind)
    return column.astype(field.kind, copy=False).tobytes()


def _refuse_wrapping(name: str, column: np.ndarray, kind: np.dtype) -> None:
    if column.dtype.kind == kind.kind == "f":
        return
    if column.dtype.kind not in "iu" or kind.kind not in "iu":
        raise WireError(f"{name}: values of type {column.dtype}, expected {kind}")
    limits = np.iinfo(kind)
    if column.size and not limits.min <= int(column.min()) <= int(column.max()) <= limits.max:
        raise WireError(f"{name}: a value lies outside {limits.min} to {limits.max}")


def _unpacked(record: type, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row, columns as arrays."""
    fields = {}
    for field in fields_of(record):
        value = row[field.name]
        if field.is_column:
            size = field.kind.itemsize
            if len(value) % size:
                raise WireError(f"{field.name}: {len(value)} bytes are no whole number of values of {size} bytes")
            value = np.frombuffer(value, dtype=field.kind)
        fields[field.name] = value
    return fields


def _logprobs(row: Mapping[str, bytes], num_emitted: int) -> TargetLogprobs:
    columns = _unpacked(TargetLogprobs, row)
    if not 1 <= num_emitted <= MAX_EMITTED:
        raise WireError(f"emitted_ids: {num_emitted} ids, allowed are 1 to {MAX_EMITTED}")
    for name in ("top_ids_EK", "top_log_p_EK"):
        if len(columns[name]) % num_emitted:
            raise WireError(f"{name}: {len(columns[name])} values are no whole number of rows for {num_emitted} ids")
        columns[name] = columns[name].reshape(num_emitted, -1)
    return TargetLogprobs(**columns)
