"""The wire format of the trace topic: Avro, one message per trace record.

Columns of numbers are `bytes`, packed little-endian: plain Avro arrays decode 300 times slower. Fields,
shapes and meanings are those of record.py; the sampling settings come last.
Key: the request id, so one request stays in order in one partition. Headers: see codec.headers.
Evolution: a header names the version; any change of fields or of their meanings raises it, and a record of another
version is refused as unknown.
"""

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np

from omnidraft.params import ROWS, SamplingNumbers
from omnidraft.traces.record import Rounds, TargetLogprobs, TraceRecord

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
MAX_EMITTED = 4096
MAX_TOP_K = 1024
MAX_ID = (1 << 24) - 1
"""No vocabulary has as many ids; a negative id read as unsigned is larger."""
MAX_INT = (1 << 31) - 1
"""The largest `int` of Avro, whose readers do not check it and whose writers do."""


def _annotated(holder: type) -> dict[str, tuple[Any, ...]]:
    """Return name -> (Python type, what its annotation tells) of the fields of a class of record.py."""
    hints = get_type_hints(holder, include_extras=True)
    return {
        name: (hint.__origin__, *hint.__metadata__) for name, hint in hints.items() if get_origin(hint) is Annotated
    }


def _columns(holder: type) -> dict[str, str]:
    return {name: notes[0] for name, (python, *notes) in _annotated(holder).items() if python is np.ndarray}


RECORD_COLUMNS = _columns(TraceRecord)
"""Column -> numpy type of its packed values."""
LOGPROB_COLUMNS = _columns(TargetLogprobs)
ROUND_COLUMNS = _columns(Rounds)

_AVRO_TYPES = {str: "string", int: "long", float: "double", bool: "boolean"}


def _field(name: str, annotated: Any, *notes: Any) -> dict[str, Any]:
    """Return an Avro field; one that may be None is null or its type."""
    python, *null = get_args(annotated) or (annotated,)
    *kinds, doc = notes
    kind: Any
    if python is np.ndarray:
        kind, doc = "bytes", f"{np.dtype(kinds[0]).name}, {doc}"
    elif python in (TargetLogprobs, Rounds):
        columns = [_field(column, *each) for column, each in _annotated(python).items()]
        kind = {"type": "record", "name": name.capitalize(), "fields": columns}
    else:
        kind = kinds[0] if kinds else _AVRO_TYPES[python]
    default = {"default": None} if null else {}
    return {"name": name, "type": ["null", kind] if null else kind, **default, "doc": doc}


def _sampling_field(each: Field[Any]) -> dict[str, Any]:
    row = ROWS[each.name]
    return _field(each.name, each.type, *(["int"] if row.bounds.is_integer else []), row.doc)


SCHEMA: Mapping[str, Any] = {
    "type": "record",
    "name": "TraceRecord",
    "namespace": "omnidraft",
    "doc": TraceRecord.__doc__,
    "fields": [
        *(_field(name, *each) for name, each in _annotated(TraceRecord).items()),
        *map(_sampling_field, fields(SamplingNumbers)),
    ],
}
