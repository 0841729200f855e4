"""The wire format of the trace topic: Avro, one message per trace record, with the fields of record.py in their order.

Columns of numbers are `bytes`, packed little-endian: plain Avro arrays decode 300 times slower.
Key: the request id, so one request stays in order in one partition. Headers: see codec.headers.
Evolution: a header names the version; any change of fields or of their meanings raises it, and a record of another
version is refused as unknown.
"""

from collections.abc import Mapping
from typing import Any

from omnidraft.traces.record import Field, TraceRecord, fields_of

SCHEMA_NAME = "omnidraft.trace"
SCHEMA_VERSION = 1

ENCRYPTION = "encryption"
"""The header of a message whose value is encrypted."""
KEY_ID = "encryption_key_id"
"""The header with the opaque id of the tenant's key; without it the message is encrypted with a master key."""
FORGOTTEN = "forgotten"
"""The header of a message without content: its tenant was forgotten."""
MAX_PAYLOAD_BYTES = 1 << 20
"""Larger messages are refused before they are parsed."""
MAX_WRITTEN_BYTES = 1_000_000
"""Larger records are not written: with key and headers a message must stay below Kafka's default of 1 MiB."""


def _avro_field(field: Field) -> dict[str, Any]:
    kind = "bytes" if field.is_column else field.kind
    if isinstance(kind, type):
        columns = [_avro_field(column) for column in fields_of(kind)]
        kind = {"type": "record", "name": field.name.capitalize(), "fields": columns}
    if not field.is_optional:
        return {"name": field.name, "type": kind, "doc": field.doc}
    return {"name": field.name, "type": ["null", kind], "default": None, "doc": field.doc}


SCHEMA: Mapping[str, Any] = {
    "type": "record",
    "name": "TraceRecord",
    "namespace": "omnidraft",
    "doc": "What a worker tells the learner about a stretch of emitted tokens.",
    "fields": [_avro_field(field) for field in fields_of(TraceRecord)],
}
