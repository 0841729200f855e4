"""Best-effort decoding of a broken record, for people who search for the cause. Nothing is learned from it."""

import io
from collections.abc import Mapping
from typing import Any

import fastavro
import numpy as np

from omnidraft.traces.schema import LOGPROB_COLUMNS, RECORD_COLUMNS, ROUND_COLUMNS, SCHEMA_VERSION, SCHEMAS

COLUMNS: Mapping[str, str] = {**RECORD_COLUMNS, **LOGPROB_COLUMNS, **ROUND_COLUMNS}


def readable_fields(payload: bytes, version: int = SCHEMA_VERSION) -> dict[str, Any]:
    """Return the fields in the order of the schema, up to the first that cannot be read, as plain data for JSON."""
    source, fields = io.BytesIO(payload), dict[str, Any]()
    for field in SCHEMAS[version]["fields"]:
        try:
            value = fastavro.schemaless_reader(source, fastavro.parse_schema(field["type"]), None)
        except (EOFError, IndexError, KeyError, TypeError, ValueError, OverflowError, MemoryError):
            break
        fields[field["name"]] = _plain(field["name"], value)
    return fields


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {column: _plain(column, packed) for column, packed in value.items()}
    if not isinstance(value, bytes):
        return value
    kind = np.dtype(COLUMNS.get(name, "|u1"))
    if len(value) % kind.itemsize:
        return value.hex()
    column = np.frombuffer(value, kind)
    return [number if np.isfinite(number) else None for number in column.tolist()]
